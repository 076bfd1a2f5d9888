"""Log-probabilities of a prompt, which the prefill server computes, put into the decode server's answer.

For /generate (meta_info.input_token_logprobs and similar lists) and /v1/completions with echo (the parallel
lists of a choice). Both servers got the same request; the prefill server's answer has one token of output,
the decode server's nothing of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

_DATA = b"data: "
_LISTS = ("tokens", "token_logprobs", "top_logprobs")


def merge_for(path: str, body: Mapping[str, Any]) -> Callable[[Any], Merge] | None:
    """The Merge to construct from the prefill server's answer, decoded; None if the request needs none."""
    if path == "/generate":
        logprobs = any(body.get(name) for name in ("return_logprob", "top_logprobs_num", "token_ids_logprob"))
        starts = _listed(body.get("logprob_start_len"))
        scored = any(isinstance(start, int) and start >= 0 for start in starts)
        # A request without output asks for the prompt's, wherever they start.
        params = _listed(body.get("sampling_params"))
        scored |= any(isinstance(each, dict) and each.get("max_new_tokens") == 0 for each in params)
        return NativeMerge if logprobs and scored else None
    if path == "/v1/completions" and body.get("echo") and body.get("logprobs") is not None:
        return CompletionMerge
    return None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class Merge:
    """Adds another answer's entries to this one: `change` is called for each of its JSON objects."""

    def whole(self, body: bytes) -> bytes:
        answer = msgspec.json.decode(body)
        items = answer if isinstance(answer, list) else [answer]
        for index, item in enumerate(items):
            self.change(item, index, last=True)
        return msgspec.json.encode(answer)

    def events(self, data: bytes) -> bytes:
        """data: whole events of a stream. Lines that hold no JSON object, such as comments and [DONE], stay
        as they are."""
        lines = data.split(b"\n")
        for at, line in enumerate(lines):
            if line.startswith(_DATA + b"{"):
                item = msgspec.json.decode(line[len(_DATA) :])
                if self.change(item, item.get("index", 0)):
                    lines[at] = _DATA + msgspec.json.encode(item)
        return b"\n".join(lines)

    def change(self, item: dict[str, Any], index: int, *, last: bool = False) -> bool:
        """Change `item`, an answer or an event, and return whether it changed. index: in a batch; last: no
        event of it follows."""
        raise NotImplementedError


class NativeMerge(Merge):
    """In a stream the prompt's are in an item's first event and in its last, as a server's own are."""

    def __init__(self, prefill: Any) -> None:
        items = prefill if isinstance(prefill, list) else [prefill]
        self._values = [
            {
                name: value
                for name, value in item.get("meta_info", {}).items()
                if name.startswith("input_") and isinstance(value, list)
            }
            for item in items
        ]
        self._begun: set[int] = set()

    def change(self, item: dict[str, Any], index: int, *, last: bool = False) -> bool:
        meta = item.get("meta_info")
        if meta is None or not 0 <= index < len(self._values):
            return False
        ends = last or meta.get("finish_reason") is not None
        if index in self._begun and not ends:
            return False
        self._begun.add(index)
        for name, value in self._values[index].items():
            if not meta.get(name):
                meta[name] = value
        return True


class CompletionMerge(Merge):
    """The prompt's entries come before a choice's first ones; all of its offsets count from the prompt on."""

    def __init__(self, prefill: Any) -> None:
        choices = prefill.get("choices") or []
        outputs = int((prefill.get("usage") or {}).get("completion_tokens", 0)) // max(1, len(choices))
        self._prompt: dict[int, dict[str, list[Any]]] = {}
        self._offset: dict[int, int] = {}
        for choice in choices:
            logprobs = choice.get("logprobs") or {}
            count = len(logprobs.get("tokens", ())) - outputs
            index, offsets = int(choice["index"]), logprobs.get("text_offset") or []
            self._prompt[index] = {
                name: logprobs[name][:count] for name in (*_LISTS, "text_offset") if logprobs.get(name)
            }
            # The offset of the output's first token; without output, 0.
            self._offset[index] = int(offsets[count]) if outputs and count < len(offsets) else 0

    def change(self, item: dict[str, Any], index: int, *, last: bool = False) -> bool:
        changed = False
        for choice in item.get("choices") or []:
            logprobs = choice.get("logprobs")
            number = int(choice.get("index", 0))
            if logprobs is None or number not in self._offset:
                continue
            shift = self._offset[number]
            logprobs["text_offset"] = [offset + shift for offset in logprobs.get("text_offset") or []]
            for name, values in self._prompt.pop(number, {}).items():
                if logprobs.get(name) is not None:
                    logprobs[name] = [*values, *logprobs[name]]
            changed = True
        return changed

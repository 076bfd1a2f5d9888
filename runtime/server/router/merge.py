"""Log-probabilities of a prompt, which the prefill server computes, put into the decode server's answer.

Of /generate (meta_info.input_token_logprobs and its kin) and of /v1/completions with echo (the parallel lists
of a choice). Both sides were asked the same; the prefill side's answer has one token of output, the decode
side's has nothing of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from runtime.protocol.errors import WorkerFailed
from runtime.server.router.pool import Worker

_DATA = b"data: "
_LISTS = ("tokens", "token_logprobs", "top_logprobs")


def merge_for(path: str, body: Mapping[str, Any]) -> Callable[[Any], Merge] | None:
    """What makes a Merge of the prefill side's answer, decoded; None where this request needs none."""
    if path == "/generate":
        wanted = any(body.get(name) for name in ("return_logprob", "top_logprobs_num", "token_ids_logprob"))
        starts = _listed(body.get("logprob_start_len"))
        scored = any(isinstance(start, int) and start >= 0 for start in starts)
        # A request that makes no tokens asks for the prompt's, wherever they start.
        params = _listed(body.get("sampling_params"))
        scored |= any(isinstance(each, dict) and each.get("max_new_tokens") == 0 for each in params)
        return NativeMerge if wanted and scored else None
    if path == "/v1/completions" and body.get("echo") and body.get("logprobs") is not None:
        return CompletionMerge
    return None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def decoded(worker: Worker, body: bytes) -> Any:
    """Raises WorkerFailed."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        raise WorkerFailed("did not answer with JSON", where=worker.name) from None


class Merge:
    """Puts what another answer says into this one: `change` is called for each of its JSON objects."""

    def whole(self, body: bytes) -> bytes:
        answer = msgspec.json.decode(body)
        items = answer if isinstance(answer, list) else [answer]
        for place, item in enumerate(items):
            self.change(item, place, last=True)
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

    def change(self, item: dict[str, Any], place: int, *, last: bool = False) -> bool:
        """item: of a whole answer or an event; place: in a batch; last: there is nothing of it after this.
        Whether anything was changed."""
        raise NotImplementedError


class NativeMerge(Merge):
    """In a stream the prompt's are in an item's first event and in its last, as a server's own are."""

    def __init__(self, prefill: Any) -> None:
        items = prefill if isinstance(prefill, list) else [prefill]
        self._found = [
            {
                name: value
                for name, value in item.get("meta_info", {}).items()
                if name.startswith("input_") and isinstance(value, list)
            }
            for item in items
        ]
        self._told: set[int] = set()

    def change(self, item: dict[str, Any], place: int, *, last: bool = False) -> bool:
        meta = item.get("meta_info")
        if meta is None or not 0 <= place < len(self._found):
            return False
        ends = last or meta.get("finish_reason") is not None
        if place in self._told and not ends:
            return False
        self._told.add(place)
        for name, value in self._found[place].items():
            if not meta.get(name):
                meta[name] = value
        return True


class CompletionMerge(Merge):
    """The prompt's entries come before a choice's first ones; all of its offsets count from the prompt on."""

    def __init__(self, prefill: Any) -> None:
        choices = prefill.get("choices") or []
        made = int((prefill.get("usage") or {}).get("completion_tokens", 0)) // max(1, len(choices))
        self._prompt: dict[int, dict[str, list[Any]]] = {}
        self._offset: dict[int, int] = {}
        for choice in choices:
            logprobs = choice.get("logprobs") or {}
            count = len(logprobs.get("tokens", ())) - made
            place, offsets = int(choice["index"]), logprobs.get("text_offset") or []
            self._prompt[place] = {
                name: logprobs[name][:count] for name in (*_LISTS, "text_offset") if logprobs.get(name)
            }
            # Where the output's first token stands; where there is none, behind the last of the prompt.
            self._offset[place] = int(offsets[count]) if made and count < len(offsets) else 0

    def change(self, item: dict[str, Any], place: int, *, last: bool = False) -> bool:
        changed = False
        for choice in item.get("choices") or []:
            logprobs = choice.get("logprobs")
            where = int(choice.get("index", 0))
            if logprobs is None or where not in self._offset:
                continue
            shift = self._offset[where]
            logprobs["text_offset"] = [offset + shift for offset in logprobs.get("text_offset") or []]
            for name, values in self._prompt.pop(where, {}).items():
                if logprobs.get(name) is not None:
                    logprobs[name] = [*values, *logprobs[name]]
            changed = True
        return changed

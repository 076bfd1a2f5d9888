"""What of a request had no effect, listed in the `Warning` header of its answer (RFC 7234, section 5.5: 299).

The gate opens a list for each request; what reads the body adds to it. Knows no route.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

MOST_TOLD = 20
"""Names in one header; how many more there are is a number."""
ELSEWHERE: dict[str, Any] = {
    "length_penalty": 1.0, "return_flat_raw_top_logprobs_b64": True, "mm_payload": "tensors",
    "routed_experts_start_len": 0, "routed_experts_prompt_start": 0, "embed_dtype": "float32",
    "endianness": "native", "stop_str_max_len": 0, "stop_regex_max_len": 0,
}  # fmt: skip
"""Defaults of sglang's and vLLM's fields that this server does not have: clients that send whole objects send
them, and they ask for nothing."""


@dataclass(slots=True)
class LeftOut:
    """ignore: unknown fields are left out instead of refused. fields: those that were; remarks: what else had
    no effect."""

    ignore: bool = False
    fields: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def header(self) -> bytes | None:
        """The header's value; None: nothing was left out."""
        parts = list(self.remarks)
        if self.fields:
            more = len(self.fields) - MOST_TOLD
            names = ", ".join(_plain(name) for name in self.fields[:MOST_TOLD])
            parts.append(f"unknown fields ignored: {names}" + (f" and {more} more" if more > 0 else ""))
        return f'299 sglang-dsl "{"; ".join(parts)}"'.encode() if parts else None


_OF_REQUEST: ContextVar[LeftOut | None] = ContextVar("left_out", default=None)


def open_list(ignore: bool) -> LeftOut:
    """Begin the list of the request that this task answers."""
    record = LeftOut(ignore)
    _OF_REQUEST.set(record)
    return record


def says_nothing(value: Any) -> bool:
    """Null, false, and an empty text, list or object: what clients send for what they do not use."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def may_be_left_out(name: str, value: Any, where: str = "") -> bool:
    """Whether an unknown field is no reason to refuse the request: it says nothing, has another server's
    default, or unknown fields are ignored, which is noted then. where: the path of the object around it."""
    if says_nothing(value):
        return True
    if name in ELSEWHERE and type(value) is type(ELSEWHERE[name]) and value == ELSEWHERE[name]:
        return True
    current = _OF_REQUEST.get()
    if current is None or not current.ignore:
        return False
    current.fields.append(f"{where}.{name}" if where else name)
    return True


def remark(text: str) -> None:
    """Tell the client that something it sent has no effect. text: without what came from the client."""
    current = _OF_REQUEST.get()
    if current is not None and text not in current.remarks:
        current.remarks.append(text)


def _plain(name: str) -> str:
    """A client's text as a header may hold it."""
    return "".join(c if " " < c < "\x7f" and c not in '"\\,;' else "?" for c in name[:80])

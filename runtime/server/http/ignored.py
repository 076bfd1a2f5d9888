"""Fields of a request that have no effect, listed in the `Warning` header of its answer (RFC 7234, section
5.5: 299). The gate opens a record for each request, what reads the body adds to it. Knows no route.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from runtime.protocol.errors import NotSupported

MAX_LISTED = 20
"""Names in one header; the number of the others follows."""
OTHER_DEFAULTS: dict[str, Any] = {
    "length_penalty": 1.0, "return_flat_raw_top_logprobs_b64": True, "mm_payload": "tensors",
    "routed_experts_start_len": 0, "routed_experts_prompt_start": 0, "embed_dtype": "float32",
    "endianness": "native", "stop_str_max_len": 0, "stop_regex_max_len": 0,
}  # fmt: skip
"""Defaults of fields of sglang and vLLM that this server does not have: clients that send whole objects send
them, and they change nothing."""


@dataclass(slots=True)
class IgnoredFields:
    """ignore: unknown fields are accepted. fields: those that were ignored; remarks: what else had no
    effect."""

    ignore: bool = False
    fields: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def header(self) -> bytes | None:
        """The value of the `Warning` header; None if everything had an effect."""
        parts = list(self.remarks)
        if self.fields:
            more = len(self.fields) - MAX_LISTED
            names = ", ".join(_printable(name) for name in self.fields[:MAX_LISTED])
            parts.append(f"unknown fields ignored: {names}" + (f" and {more} more" if more > 0 else ""))
        return f'299 sglang-dsl "{"; ".join(parts)}"'.encode() if parts else None


_CURRENT: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)


def open_record(ignore: bool) -> IgnoredFields:
    """Begin the record of the request that this task answers."""
    record = IgnoredFields(ignore)
    _CURRENT.set(record)
    return record


def is_empty(value: Any) -> bool:
    """Null, false, and an empty text, list or object: what clients send for fields that they do not use."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def may_ignore(name: str, value: Any, path: str = "") -> bool:
    """Whether the unknown field `name` of the object at `path` may be ignored: it is empty, has a default of
    another server, or the server ignores unknown fields, which is then recorded."""
    if is_empty(value):
        return True
    if name in OTHER_DEFAULTS and type(value) is type(OTHER_DEFAULTS[name]) and value == OTHER_DEFAULTS[name]:
        return True
    record = _CURRENT.get()
    if record is None or not record.ignore:
        return False
    record.fields.append(f"{path}.{name}" if path else name)
    return True


def remark(text: str) -> None:
    """Tell the client that something has no effect. `text` must not quote the client."""
    record = _CURRENT.get()
    if record is not None and text not in record.remarks:
        record.remarks.append(text)


def refuse_unsupported(body: Any, reasons: Mapping[str, str]) -> None:
    """Raise NotSupported if the body has a field of `reasons` (name -> why) that is not empty."""
    for name, why in reasons.items():
        if not is_empty(getattr(body, name)):
            raise NotSupported(f"{name} is not supported: {why}", where=name)


def _printable(name: str) -> str:
    """A client's text as a header may contain it."""
    return "".join(c if " " < c < "\x7f" and c not in '"\\,;' else "?" for c in name[:80])

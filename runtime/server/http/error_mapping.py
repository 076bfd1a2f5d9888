"""Faults with the field names of the interface that a client uses: what the runtime calls
`sampling_params.max_new_tokens` is `max_tokens` to a client of OpenAI's. Knows no route.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from runtime.protocol.errors import ContextExceeded, PromptTooLong, RuntimeFault

FieldNames = Mapping[str, str]
"""The runtime's name of a field -> the client's."""
_PLACE = re.compile(r"(?:sampling_params(?:\[\d+\])?\.)?(\w+)(.*)", re.DOTALL)
_OWN_ONLY = re.compile(r"\b(?:max_new_tokens|min_new_tokens|sampling_params)\b")


def mapped(fault: RuntimeFault, names: FieldNames, context: int | None = None) -> RuntimeFault:
    """The same fault with the client's names in its place, its message and its hint. `context`: tokens that
    a request may have, for clients that look for them when it has more."""
    where, message = fault.where, fault.message
    if where is not None and (found := _PLACE.fullmatch(where)) is not None:
        own, named = found[1], names.get(found[1], found[1])
        where = named + found[2]
        if message.startswith(f"{own} "):
            message = named + message[len(own) :]
    hint = None if fault.hint is None else _renamed(fault.hint, names)
    message = _renamed(message, names)
    if isinstance(fault, PromptTooLong) and context is not None:
        text = f"This model's maximum context length is {context} tokens: {message}"
        return ContextExceeded(text, where=where, hint=hint)
    return type(fault)(message, where=where, hint=hint)


def _renamed(text: str, names: FieldNames) -> str:
    """Only names that are nothing but names are looked for in prose."""
    return _OWN_ONLY.sub(lambda found: names.get(found[0], found[0]), text)


@contextmanager
def mapped_errors(names: FieldNames, context: int | None = None) -> Iterator[None]:
    """Faults that leave the block are reported in the client's names (see `mapped`)."""
    try:
        yield
    except RuntimeFault as fault:
        raise mapped(fault, names, context) from fault

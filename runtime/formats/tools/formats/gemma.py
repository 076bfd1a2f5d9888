"""Gemma 4: keys without quotes, texts in marks of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.formats.tools.named_calls import NamedCalls
from runtime.formats.tools.types import Call, StructureInfo
from runtime.formats.tools.values import Dialect, text_of

_QUOTE = '<|"|>'


class _Gemma(NamedCalls):
    def written(self, number: int, call: Call) -> str:
        return f"{self.opener}{call.name}{_literal(call.arguments)}{self.closer}"

    def structure_info(self, name: str) -> StructureInfo | None:
        return None


def _literal(found: Any) -> str:
    match found:
        case str():
            return f"{_QUOTE}{found}{_QUOTE}"
        case Mapping():
            return f"{{{','.join(f'{key}:{_literal(one)}' for key, one in found.items())}}}"
        case list():
            return f"[{','.join(map(_literal, found))}]"
    return text_of(found)


GEMMA_4 = _Gemma(
    opener="<|tool_call>call:",
    after="",
    closer="<tool_call|>",
    dialect=Dialect(quotes=(_QUOTE,), escaped=False, bare_keys=True),
)

"""Typed: as what type the text of a generation is read. Knows no nodes, and how types are described neither
(sglang_dsl.ir.typed)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Typed:
    """A type, by name and kind ("int", "float", "bool", "text", "choices" or "json"). What only the running
    Python has (`annotation`, `adapter`, `options`) takes no part in equality and is not written to JSON; a
    node read back from JSON then gives plain data."""

    name: str
    kind: str
    annotation: Any = field(default=None, compare=False)
    adapter: Any = field(default=None, compare=False)
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        return self.name

    def read(self, text: str) -> Any:
        """The value of a whole text. Raises ValueError: the text is no value of the type, and why."""
        match self.kind:
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "bool":
                if text not in ("True", "False"):
                    raise ValueError("it is neither True nor False")
                return text == "True"
            case "text":
                return text
            case "choices":
                if self.options and text not in self.options:
                    raise ValueError(f"it is not one of {', '.join(map(repr, self.options))}")
                return self.options.get(text, text)
            case _:
                return json.loads(text) if self.adapter is None else self._validated(text)

    def _validated(self, text: str) -> Any:
        import pydantic  # installed: an adapter was made

        try:
            return self.adapter.validate_json(text)
        except pydantic.ValidationError as error:
            found = json_in(text)
            if found is not None and found != text.strip():
                return self._validated(found)
            faults = error.errors(include_url=False, include_input=False)
            raise ValueError(
                "; ".join(f"{'.'.join(map(str, one['loc'])) or 'the whole'}: {one['msg']}" for one in faults)
            ) from error


def json_in(text: str) -> str | None:
    """The only JSON value in a text: all of it, what stands in its only fence (```), or an object or array
    within prose. None where there is none, or where the prose has braces or brackets of its own, which may be
    another one or a part of it."""
    whole = text.strip()
    if _is_json(whole):
        return whole
    begin = re.search(r"[\[{]", text)
    if begin is None:
        inner = unfenced(text)
        return inner if _is_json(inner) else None
    try:
        _, end = json.JSONDecoder().raw_decode(text, begin.start())
    except (ValueError, RecursionError):
        return None
    return None if re.search(r"[\[{}\]]", text[end:]) else text[begin.start() : end]


def unfenced(text: str) -> str:
    """What stands in the only fence of a text, without blanks around it; the text where it has no fence."""
    parts = text.split("```")
    return re.sub(r"\A\w*[ \t]*\n", "", parts[1]).strip() if len(parts) == 3 else text.strip()


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True

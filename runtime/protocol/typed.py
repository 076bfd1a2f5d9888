"""Typed: the type of a generation's value, and how it is read from the text. Knows no nodes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Typed:
    """A type, by name and kind ("int", "float", "bool", "text", "choices" or "json"). `annotation`, `adapter`
    and `options` exist in the running Python only: they are not compared and not written to JSON, and a node
    read from JSON gives plain data."""

    name: str
    kind: str
    annotation: Any = field(default=None, compare=False)
    adapter: Any = field(default=None, compare=False)
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        return self.name

    def read(self, text: str) -> Any:
        """The value of a text. Raises ValueError with the reason why it is no value of the type."""
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
            inner = json_in(text)
            if inner is not None and inner != text.strip():
                return self._validated(inner)
            faults = error.errors(include_url=False, include_input=False)
            raise ValueError(
                "; ".join(f"{'.'.join(map(str, one['loc'])) or 'the whole'}: {one['msg']}" for one in faults)
            ) from error


def json_in(text: str) -> str | None:
    """The only JSON value in a text: the whole text, the content of its only fence (```), or an object or
    array within prose. None if there is none, or if the prose has other braces or brackets."""
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
    """The content of a text's only fence, or the text, without blanks around it."""
    parts = text.split("```")
    return re.sub(r"\A\w*[ \t]*\n", "", parts[1]).strip() if len(parts) == 3 else text.strip()


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True

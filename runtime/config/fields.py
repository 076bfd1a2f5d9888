"""Fields: reads typed values from a JSON object on disk, with errors that name file, field, value and rule.

It knows JSON and files; not models, nor the meaning of the values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from runtime.protocol.errors import ModelLoadError


class Fields:
    """A JSON object and its file. Every getter raises ModelLoadError for a missing value without a default
    (None), a wrong type, or a number out of range. `renamed`: the names of fields in this file, by the names
    that the getters use."""

    def __init__(
        self, values: Mapping[str, Any], source: str, renamed: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.values, self.source, self._renamed = values, source, renamed

    @classmethod
    def read(cls, path: Path) -> Fields:
        """The object in `path`. Raises ModelLoadError if it is unreadable, not UTF-8, not JSON (with line and
        column), or not an object."""
        try:
            text = path.read_bytes().decode("utf-8")
        except OSError as error:
            raise ModelLoadError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
        except UnicodeDecodeError as error:
            raise ModelLoadError(
                f"is not UTF-8: bad byte at offset {error.start}", where=str(path)
            ) from error
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            position = f"line {error.lineno} column {error.colno}"
            raise ModelLoadError(f"is not valid JSON at {position}: {error.msg}", where=str(path)) from error
        except RecursionError as error:
            raise ModelLoadError("is nested too deeply to be a configuration", where=str(path)) from error
        if not isinstance(values, dict):
            raise ModelLoadError(
                f"must contain a JSON object, contains {type(values).__name__}", where=str(path)
            )
        return cls(values, str(path))

    def fail(self, message: str, hint: str | None = None) -> ModelLoadError:
        return ModelLoadError(message, where=self.source, hint=hint)

    def has(self, name: str) -> bool:
        """Whether the field exists and is not null."""
        return self.values.get(self.name_of(name)) is not None

    def name_of(self, name: str) -> str:
        """The name of the field in this file."""
        return self._renamed.get(name, name)

    def _get(self, name: str, default: Any) -> tuple[str, Any]:
        """The name of the field in this file, and its value."""
        name = self.name_of(name)
        value = self.values.get(name)
        if value is None and default is None:
            raise self.fail(f"the field {name!r} is missing")
        return name, default if value is None else value

    def integer(self, name: str, default: Any = None, *, minimum: int = 1) -> int:
        name, value = self._get(name, default)
        if type(value) is not int or value < minimum:
            raise self.fail(f"{name!r} must be an integer of at least {minimum}, got {value!r}")
        return value

    def number(self, name: str, default: Any = None, *, above: float = 0.0) -> float:
        name, value = self._get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= above:
            raise self.fail(f"{name!r} must be a finite number above {above:g}, got {value!r}")
        return float(value)

    def flag(self, name: str, default: Any = None) -> bool:
        name, value = self._get(name, default)
        if type(value) is not bool:
            raise self.fail(f"{name!r} must be true or false, got {value!r}")
        return value

    def text(self, name: str, default: Any = None) -> str:
        name, value = self._get(name, default)
        if type(value) is not str:
            raise self.fail(f"{name!r} must be a string, got {value!r}")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """A token id, a list of them, or nothing."""
        name = self.name_of(name)
        value = self.values.get(name)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(item) is int and item >= 0 for item in listed):
            raise self.fail(f"{name!r} must be a token id or a list of them, got {value!r}")
        return tuple(listed)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers above 0; empty if the field is missing."""
        name, value = self._get(name, [])
        if not isinstance(value, list) or not all(
            type(item) in (int, float) and 0 < item < math.inf for item in value
        ):
            raise self.fail(f"{name!r} must be a list of finite numbers above 0")
        return tuple(map(float, value))

    def names(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty if the field is missing."""
        name, value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(f"{name!r} must be a list of strings, got {value!r}")
        return tuple(value)

    def child(self, name: str) -> Fields:
        """The object under `name`; an empty one if it is missing."""
        name, value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.fail(f"{name!r} must be an object, got {value!r}")
        return Fields(value, f"{self.source} [{name}]")

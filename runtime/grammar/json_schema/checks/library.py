"""The jsonschema library; import it from here.

Where rfc3987-syntax is installed, as Jupyter does, the library's own import reads a grammar for 2.7 s, for
the formats "iri" and "iri-reference" of its FormatChecker alone.
Here that waits until one of these is checked.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_SLOW = "rfc3987_syntax"


def _is_valid_syntax(*args: str, **named: str) -> bool:
    return bool(importlib.import_module(_SLOW).is_valid_syntax(*args, **named))


@contextmanager
def _read_later() -> Iterator[None]:
    """A stand-in for the slow module, which nobody else finds afterwards."""
    if _SLOW in sys.modules or importlib.util.find_spec(_SLOW) is None:
        yield
        return
    stand_in = ModuleType(_SLOW)
    stand_in.is_valid_syntax = _is_valid_syntax  # type: ignore[attr-defined]
    sys.modules[_SLOW] = stand_in
    try:
        yield
    finally:
        del sys.modules[_SLOW]


with _read_later():
    import jsonschema  # type: ignore[import-untyped]
    from jsonschema.exceptions import SchemaError, ValidationError  # type: ignore[import-untyped]

__all__ = ["SchemaError", "ValidationError", "jsonschema"]

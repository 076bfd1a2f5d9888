"""Calls of tools as programs read them. Plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `result`: what the model was told, None where the call was not run; `failed`: that was an
    error. `arguments`: empty where they are no JSON object; `text` has them as they were written."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    result: str | None = None
    failed: bool = False
    text: str = ""


@dataclass(frozen=True, slots=True)
class ToolStep:
    """One reply that called tools. `text`: what the model said beside the calls; `variable`: of which
    generation."""

    text: str
    calls: tuple[ToolCall, ...]
    variable: str | None = None

"""`lang.tracer`: compiled programs under the names that sglang's programs use. Holds no code of its own."""

from __future__ import annotations

from sglang_dsl.compiler.trace import Program, Tracer

__all__ = ["Program", "Tracer"]

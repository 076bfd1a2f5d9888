"""`lang.backend.crusoe`: where sglang's programs import Crusoe from. Holds no code of its own."""

from __future__ import annotations

from sglang_dsl.backends.crusoe import Crusoe

__all__ = ["Crusoe"]

"""`lang.backend.base_backend`: where sglang's programs import BaseBackend from. Holds no code of its own."""

from __future__ import annotations

from sglang_dsl.backends.base import Backend as BaseBackend

__all__ = ["BaseBackend"]

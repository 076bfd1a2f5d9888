"""`lang.backend.base_backend`: where sglang's programs import BaseBackend from. Holds no code of its own."""

from __future__ import annotations

from sglang_dsl.backends.blocking import BaseBackend

__all__ = ["BaseBackend"]

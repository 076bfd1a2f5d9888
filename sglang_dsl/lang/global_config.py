"""`lang.global_config`: the process-wide settings, under the module name that sglang's programs import from.
Holds no code of its own."""

from __future__ import annotations

from sglang_dsl.settings import global_config

__all__ = ["global_config"]

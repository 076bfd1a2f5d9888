"""Settings: the process-wide defaults, in one small object. Knows no backend class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang_dsl.ir import Sampling


@dataclass
class Settings:
    """default_backend: anything `backend=` takes, or None. sampling: the lowest defaults, under every
    program's.

    timeout_s: seconds one call of a backend may take, None = no limit. max_threads: how many ordinary (not
    async) program bodies may run at once in the background, per depth of nesting.
    """

    default_backend: Any = None
    sampling: Sampling = field(default_factory=Sampling)
    timeout_s: float | None = 600.0
    max_threads: int = 64


global_config = Settings()

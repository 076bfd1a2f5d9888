"""Settings: defaults for the whole process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sglang_dsl.errors import BadProgram
from sglang_dsl.ir import Sampling


class _AlwaysFalse:
    """An option of sglang that cannot be set: setting it to True raises BadProgram."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __get__(self, settings: object, owner: type | None = None) -> bool:
        return False

    def __set__(self, settings: object, value: bool) -> None:
        if value:
            raise BadProgram(self._why)


@dataclass(slots=True)
class Settings:
    """Defaults for the whole process. `global_config` is the only instance.

    default_backend               anything that `backend=` takes, or None
    sampling                      sampling parameters with the lowest priority, below those of every program
    timeout_s                     seconds that one call of a backend may take; None: no limit
    max_threads                   how many functions of ordinary (not async) programs may run at once in the
                                  background, for each level of nesting
    verbosity                     from 2 on, a program waits for its end and prints its whole text
    enable_precache_with_tracing  has no effect; kept for programs that set it. The shared prompt of a batch
                                  is computed once in any case
    """

    default_backend: Any = None
    sampling: Sampling = field(default_factory=Sampling)
    timeout_s: float | None = 600.0
    max_threads: int = 64
    verbosity: int = 0
    enable_precache_with_tracing: bool = True

    @property
    def skip_special_tokens_in_output(self) -> bool:
        """Whether special tokens are left out of generated text: skip_special_tokens of `sampling`."""
        return self.sampling.skip_special_tokens is not False

    @skip_special_tokens_in_output.setter
    def skip_special_tokens_in_output(self, value: bool) -> None:
        # None if it is the default anyway, as not every backend has the parameter.
        self.sampling = replace(self.sampling, skip_special_tokens=None if value else False)

    spaces_between_special_tokens_in_out = _AlwaysFalse(
        "spaces between special tokens are not supported; texts are as the tokenizer returns them"
    )
    enable_parallel_encoding = _AlwaysFalse(
        "parallel encoding is not supported; a join adds the text of its forks, and the backend computes it "
        "in its place"
    )


global_config = Settings()
"""The defaults of this process: a Settings object. Assign to its attributes."""

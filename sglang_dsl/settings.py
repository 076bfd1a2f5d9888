"""Settings: the process-wide defaults, in one small object. Knows no backend class."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sglang_dsl.errors import BadProgram
from sglang_dsl.ir import Sampling


@dataclass(slots=True)
class Settings:
    """default_backend: anything `backend=` takes, or None. sampling: the lowest defaults, under every
    program's.

    verbosity: from 2 on, a program waits for its end and prints its whole text.
    enable_precache_with_tracing: for programs that set it. What the prompts of a batch share is computed once
    either way: the backend finds it, and no item is run an extra time for it.

    timeout_s: seconds one call of a backend may take, None = no limit. max_threads: how many ordinary (not
    async) program bodies may run at once in the background, per depth of nesting.
    """

    default_backend: Any = None
    sampling: Sampling = field(default_factory=Sampling)
    timeout_s: float | None = 600.0
    max_threads: int = 64
    verbosity: int = 0
    enable_precache_with_tracing: bool = True

    @property
    def skip_special_tokens_in_output(self) -> bool:
        """Whether special tokens stay out of generated text: `sampling`'s skip_special_tokens."""
        return self.sampling.skip_special_tokens is not False

    @skip_special_tokens_in_output.setter
    def skip_special_tokens_in_output(self, value: bool) -> None:
        # Said only where it is not the default anyway: not every backend can be told.
        self.sampling = replace(self.sampling, skip_special_tokens=None if value else False)

    @property
    def spaces_between_special_tokens_in_out(self) -> bool:
        """False: the tokenizers of today put none, and no text is changed on top of that."""
        return False

    @spaces_between_special_tokens_in_out.setter
    def spaces_between_special_tokens_in_out(self, value: bool) -> None:
        """Raises BadProgram for what is not offered."""
        if value:
            raise BadProgram("spaces between special tokens are not offered: texts are as the tokenizer says")

    @property
    def enable_parallel_encoding(self) -> bool:
        """False: what joined forks said is read again in its place, never glued together as it was cached."""
        return False

    @enable_parallel_encoding.setter
    def enable_parallel_encoding(self, value: bool) -> None:
        """Raises BadProgram for what is not offered."""
        if value:
            raise BadProgram(
                "parallel encoding is not offered: a join adds the text of its forks, and the backend reads "
                "it in its place"
            )


global_config = Settings()

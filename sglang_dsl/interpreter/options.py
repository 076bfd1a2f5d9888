"""What a program runs with besides the arguments of its function, checked. Knows no programs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_dsl.budgets import Budget
from sglang_dsl.errors import BadProgram
from sglang_dsl.interpreter import lower
from sglang_dsl.ir import Sampling

MODES = ("rw", "ro", "off")


@dataclass(frozen=True, slots=True)
class Options:
    """How a program runs, apart from its arguments. `timeout`: seconds per call of the backend. `cache`:
    whether calls are recorded and replayed ("rw"), only replayed ("ro") or neither ("off"), in
    `cache_dir`. `batch_budget`: of all items of a batch together; `meters`: what counts it while they run."""

    backend: Any = None
    stream: bool = False
    timeout: float | None = None
    sampling: Sampling = field(default_factory=Sampling)
    budget: Budget | None = None
    cache: str = "off"
    cache_dir: str | None = None
    use_thread: bool = True
    num_api_spec_tokens: int | None = None
    batch_budget: Budget | None = None
    meters: tuple[Any, ...] = ()

    def with_words(self, words: Mapping[str, Any]) -> Options:
        """These options, with keyword arguments of run over them. Raises BadProgram."""
        said = lower.sampling({word: value for word, value in words.items() if word in lower.WORDS})
        timeout = words.get("timeout", self.timeout)
        if timeout is not None and not timeout > 0:
            raise BadProgram(f"timeout must be a positive number of seconds, got {timeout!r}")
        backend = words.get("backend")
        budget = words.get("budget", self.budget)
        if budget is not None and not isinstance(budget, Budget):
            raise BadProgram(f"budget takes a Budget(...), got {budget!r}")
        ahead = words.get("num_api_spec_tokens", self.num_api_spec_tokens)
        if ahead is not None and not (type(ahead) is int and ahead >= 1):
            raise BadProgram(f"num_api_spec_tokens must be at least 1, or None; got {ahead!r}")
        folder = words.get("cache_dir", self.cache_dir)
        cache = words.get("cache", "rw" if "cache_dir" in words and folder is not None else self.cache)
        if cache not in MODES:
            raise BadProgram(f"cache must be one of {', '.join(map(repr, MODES))}; got {cache!r}")
        if cache != "off" and folder is None:
            raise BadProgram("cache needs cache_dir, the folder of the record")
        return Options(
            self.backend if backend is None else backend,
            bool(words.get("stream", self.stream)),
            timeout,
            said.over(self.sampling),
            budget,
            cache,
            None if folder is None else os.fspath(folder),
            bool(words.get("use_thread", self.use_thread)),
            ahead,
        )


RUN_WORDS = frozenset(
    {
        "backend", "stream", "timeout", "budget", "cache", "cache_dir", "use_thread", "num_api_spec_tokens",
        *lower.WORDS,
    }
)  # fmt: skip

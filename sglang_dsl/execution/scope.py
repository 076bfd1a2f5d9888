"""What a program that is started takes over: its own words, the settings, and what the program that calls it
hands down. Starts nothing.
"""

from __future__ import annotations

import contextvars
import dataclasses
import inspect
import weakref
from typing import Any, Protocol

import msgspec

from sglang_dsl.backends import as_backend
from sglang_dsl.backends.base import Backend
from sglang_dsl.budgets import Budget
from sglang_dsl.errors import BadProgram
from sglang_dsl.interpreter.metering import Meter
from sglang_dsl.interpreter.record import CallLog, records
from sglang_dsl.interpreter.run import RunInfo
from sglang_dsl.ir import Sampling
from sglang_dsl.settings import global_config

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Wanted(Protocol):
    """How a program is to run, apart from its arguments."""

    @property
    def backend(self) -> Any: ...
    @property
    def stream(self) -> bool: ...
    @property
    def timeout(self) -> float | None: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def budget(self) -> Budget | None: ...
    @property
    def cache(self) -> str: ...
    @property
    def cache_dir(self) -> str | None: ...
    @property
    def num_api_spec_tokens(self) -> int | None: ...
    @property
    def use_thread(self) -> bool: ...


class Startable(Protocol):
    """A program, as it is started."""

    @property
    def name(self) -> str: ...
    @property
    def signature(self) -> inspect.Signature: ...
    @property
    def is_async(self) -> bool: ...
    def fill(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]: ...
    def check(self, args: Args, kwargs: Kwargs) -> None: ...
    def write(self, state: Any, args: Args, kwargs: Kwargs) -> Any: ...


class Scope(msgspec.Struct, frozen=True, eq=False):
    """What a program hands to the programs that it calls."""

    backend: Backend | None
    sampling: Sampling
    timeout: float | None
    meters: tuple[Meter, ...] = ()
    record: CallLog | None = None
    inline: bool = False

    def run(
        self, program: str, index: int | None, *, stream: bool, speculation: int | None = None
    ) -> RunInfo:
        """What a run in this scope shares. Its seed is no default of its calls: each derives its own. Raises
        BadProgram for a stream that is to speculate."""
        if stream and speculation is not None and self.backend is not None and self.backend.speculates:
            raise BadProgram(
                f"{program} has num_api_spec_tokens, so its values are known only when a whole reply is "
                "there: it cannot stream; run it, or use .options(num_api_spec_tokens=None).stream(...)"
            )
        return RunInfo(
            program,
            self.backend,
            self.sampling if self.sampling.seed is None else dataclasses.replace(self.sampling, seed=None),
            self.timeout,
            stream,
            self.sampling.seed,
            self.meters,
            self.record,
            index,
            self.inline,
            None if stream else speculation,
        )


_Handed = tuple[Scope, "weakref.ref[Backend] | None"]


class _Current:
    """The scope of the code that runs. Its backend is not kept alive by it: timers and connections hold the
    context they were made in, and outlive the run."""

    def __init__(self) -> None:
        self._handed: contextvars.ContextVar[_Handed | None] = contextvars.ContextVar(
            "sglang_dsl_scope", default=None
        )

    def set(self, scope: Scope) -> contextvars.Token[_Handed | None]:
        held = None if scope.backend is None else weakref.ref(scope.backend)
        return self._handed.set((msgspec.structs.replace(scope, backend=None), held))

    def reset(self, before: contextvars.Token[_Handed | None]) -> None:
        self._handed.reset(before)

    def get(self) -> Scope | None:
        handed = self._handed.get()
        if handed is None or handed[1] is None:
            return None if handed is None else handed[0]
        return msgspec.structs.replace(handed[0], backend=handed[1]())


SCOPE = _Current()


def scope_of(wanted: Wanted) -> Scope:
    """Settings < caller's program < this one."""
    outer = SCOPE.get()
    if outer is None:
        outer = Scope(None, global_config.sampling, global_config.timeout_s)
        backend = global_config.default_backend if wanted.backend is None else wanted.backend
    else:
        backend = outer.backend if wanted.backend is None else wanted.backend
    record = outer.record
    if wanted.cache != "off" and wanted.cache_dir is not None:
        record = records.at(wanted.cache_dir, wanted.cache)  # type: ignore[arg-type]
    return Scope(
        None if backend is None else as_backend(backend),
        wanted.sampling.over(outer.sampling),
        outer.timeout if wanted.timeout is None else wanted.timeout,
        outer.meters if wanted.budget is None else (*outer.meters, Meter(wanted.budget)),
        record,
        not wanted.use_thread,
    )

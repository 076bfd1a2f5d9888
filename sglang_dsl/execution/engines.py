"""Engines that run a batch in other processes, by name, and RayData: how a batch is spread over Ray's worker
processes. Loads Ray when a batch is run."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from runtime.protocol.errors import BadRequest, InternalFault
from runtime.protocol.ray_cluster import connect
from runtime.protocol.registry import Registry
from sglang_dsl.compiler.follow import Startable
from sglang_dsl.errors import BackendError, BadProgram
from sglang_dsl.execution.launch import SCOPE
from sglang_dsl.execution.results import Batch, Items
from sglang_dsl.interpreter.parameters import Options


@runtime_checkable
class BatchEngine(Protocol):
    """Runs a program for each item and returns finished states, or errors by policy."""

    def run_batch(
        self,
        program: Startable,
        options: Options,
        items: Iterable[Any],
        *,
        limit: int | None,
        progress: bool,
        on_error: str,
        ordered: bool,
    ) -> Iterator[Any]: ...


ENGINES: Registry[Callable[[], BatchEngine]] = Registry(
    "batch engine", {"ray": "sglang_dsl.execution.engines:RayData"}
)


def run_batch_on(
    engine: Any,
    program: Startable,
    options: Options,
    items: Iterable[Any],
    *,
    lazy: bool,
    ordered: bool,
    **how: Any,
) -> Any:
    """SglFunction.run_batch by `engine`, a name of ENGINES or a BatchEngine. Raises BadProgram for other
    values, UnknownName, MissingExtra."""
    chosen = ENGINES.load(engine)() if isinstance(engine, str) else engine
    if not isinstance(chosen, BatchEngine):
        known = ", ".join(["local", *ENGINES])
        raise BadProgram(
            f"engine must be one of {known}, or an object such as RayData(...); got {engine!r:.80}"
        )
    if lazy:
        return chosen.run_batch(program, options, items, ordered=ordered, **how)
    source = Items(program.signature, items)
    results = chosen.run_batch(program, options, source, ordered=ordered, **how)
    return Batch(results, program.name, source.arguments, ordered=ordered)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayData:
    """How run_batch spreads its items over Ray's worker processes: run_batch(..., engine=RayData(workers=8)).
    engine="ray" uses the defaults.

    workers     processes that run programs; None: as many as the cluster has CPUs for
    cpus, gpus  what each worker reserves, including the model if the backend runs one in the worker
    batch_size  items sent to a worker at a time; it works on two such blocks at once
    attempts    how often a block of items is started if its worker dies; after that, how often each of its
                items is
    address     of the cluster; None: RAY_ADDRESS, or a Ray on this machine, for this process alone

    Raises BadProgram for invalid values.
    """

    workers: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    batch_size: int = 16
    attempts: int = 3
    address: str | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "batch_size", "attempts"):
            value = getattr(self, name)
            if not (value is None and name == "workers") and not (type(value) is int and value >= 1):
                raise BadProgram(f"RayData: {name} must be at least 1, got {value!r}")
        for name in ("cpus", "gpus"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadProgram(f"RayData: {name} must be at least 0, got {getattr(self, name)!r}")

    def run_batch(
        self,
        program: Startable,
        options: Options,
        items: Iterable[Any],
        *,
        limit: int | None,
        progress: bool,
        on_error: str,
        ordered: bool,
    ) -> Iterator[Any]:
        """The results, as SglFunction.run_batch returns them. Raises BadProgram, MissingExtra, and
        BackendError if Ray cannot be started, before anything runs."""
        if SCOPE.get() is not None:
            raise BadProgram('a program cannot run a batch with engine="ray": run the batch outside of it')
        try:
            connect(self.address, None if self.workers is None else self.workers * self.cpus)
            # Imported now: Ray reads its environment when it is imported.
            ray_batch = importlib.import_module("sglang_dsl.execution.ray_batch")
            results = ray_batch.run_batch(
                self,
                program,
                options,
                items,
                limit=limit,
                progress=progress,
                on_error=on_error,
                ordered=ordered,
            )
        except BadRequest as fault:
            raise BadProgram(str(fault)) from fault
        except InternalFault as fault:
            raise BackendError(str(fault), program=program.name) from fault
        return cast("Iterator[Any]", results)

"""What else than this process can run a batch, by name. An engine's module is loaded when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from runtime.protocol.registry import Registry
from sglang_dsl.compiler.follow import Startable
from sglang_dsl.errors import BadProgram
from sglang_dsl.execution.results import Batch, Items
from sglang_dsl.interpreter.parameters import Options


@runtime_checkable
class BatchEngine(Protocol):
    """Runs a program for each item and gives finished states, or errors by policy."""

    def run_batch(
        self,
        program: Startable,
        wanted: Options,
        items: Iterable[Any],
        *,
        limit: int | None,
        progress: bool,
        on_error: str,
        ordered: bool,
    ) -> Iterator[Any]: ...


ENGINES: Registry[Callable[[], BatchEngine]] = Registry(
    "batch engine", {"ray": "sglang_dsl.execution.ray_data:RayData"}
)


def run_batch_on(
    engine: Any,
    program: Startable,
    wanted: Options,
    items: Iterable[Any],
    *,
    lazy: bool,
    ordered: bool,
    **how: Any,
) -> Any:
    """SglFunction.run_batch by `engine`, a name of ENGINES or a BatchEngine. Raises BadProgram for anything
    else, UnknownName, MissingExtra."""
    made = ENGINES.load(engine)() if isinstance(engine, str) else engine
    if not isinstance(made, BatchEngine):
        known = ", ".join(["local", *ENGINES])
        raise BadProgram(
            f"engine must be one of {known}, or an object such as RayData(...); got {engine!r:.80}"
        )
    if lazy:
        return made.run_batch(program, wanted, items, ordered=ordered, **how)
    taken = Items(program.signature, items)
    results = made.run_batch(program, wanted, taken, ordered=ordered, **how)
    return Batch(results, program.name, taken.arguments, ordered=ordered)

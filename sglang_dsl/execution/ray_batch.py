"""run_batch over Ray Data: the programs of a batch run in worker processes, on one machine or many.

Items go to an actor pool in small blocks and come back as they end. Ray restarts a worker that dies and sends
it its blocks again; a block that ends it repeatedly is tried item by item, so that only the item responsible
is lost. With a record (`resume`) one actor on the sender's machine records every call, so that no answered
call is repeated, by any worker or later run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import ray.data
from ray import cloudpickle
from ray.util.debug import log_once
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from runtime.protocol.ray_cluster import refuse_what_never_fits
from sglang_dsl.backends.base import Backend
from sglang_dsl.budgets import Budget
from sglang_dsl.compiler.follow import Startable
from sglang_dsl.errors import BadProgram, ProgramError, headline, of_item
from sglang_dsl.errors.tracebacks import trim
from sglang_dsl.execution.batch import bar_of, batch_of
from sglang_dsl.execution.engines import RayData
from sglang_dsl.execution.finished import PackedRun, unpack
from sglang_dsl.execution.ray_worker import Keeper, Work, Worker
from sglang_dsl.interpreter.parameters import Options
from sglang_dsl.interpreter.record import Mode, Record
from sglang_dsl.settings import global_config

CALLS_PER_WORKER = 2
"""Blocks per worker at once, so that it is not idle behind the last slow item of one."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a batch is distributed: worker processes, blocks per worker, items per block, and items of a block
    that run at once."""

    workers: int
    calls: int
    block: int
    limit: int


def run_batch(
    how: RayData,
    program: Startable,
    options: Options,
    items: Iterable[Any],
    *,
    limit: int | None,
    progress: bool,
    on_error: str,
    ordered: bool,
) -> Iterator[Any]:
    """RayData.run_batch, when Ray is connected."""
    refuse_what_never_fits(ray, {"CPU": how.cpus, "GPU": how.gpus}, "RayData")
    waiting, refused = _packed(items, program.name)
    backend = global_config.default_backend if options.backend is None else options.backend
    mode = None if options.cache == "off" else cast(Mode, options.cache)
    if mode is not None and options.cache_dir is not None:
        Record(options.cache_dir, mode).close()  # raises for an unusable folder
    shape = _shape(how, limit, len(waiting))
    bare = replace(cast(Any, options), backend=None, cache="off", cache_dir=None, batch_budget=None)
    settings, budget = (global_config.sampling, global_config.timeout_s), options.batch_budget
    work = _sendable(
        Work(program, bare, backend, *settings, shape.limit, mode, budget), program.name, backend
    )
    keeper = _keeper(options.cache_dir, mode, how.attempts, budget)
    outcomes = _outcomes(how, work, keeper, waiting, refused, shape, program.name)
    results = _in_order(outcomes) if ordered else outcomes
    return _settled(results, on_error, bar_of(len(waiting) + len(refused)) if progress else None)


def _shape(how: RayData, limit: int | None, items: int) -> Shape:
    cpus = ray.cluster_resources().get("CPU", 1.0)
    workers = how.workers or max(1, int(cpus / how.cpus) if how.cpus else int(cpus))
    if limit is None:
        workers = min(workers, max(1, math.ceil(items / how.batch_size)))
        return Shape(workers, CALLS_PER_WORKER, how.batch_size, how.batch_size)
    workers = min(workers, limit)
    each = limit // workers
    calls = min(CALLS_PER_WORKER, each)
    return Shape(workers, calls, min(how.batch_size, each // calls), each // calls)


def _outcomes(
    how: RayData,
    work: bytes,
    keeper: Any,
    waiting: dict[int, bytes],
    refused: dict[int, Exception],
    shape: Shape,
    program: str,
) -> Iterator[tuple[int, Any]]:
    """Position and outcome of every item, once, as they end."""
    try:
        yield from refused.items()
        alone = Shape(shape.workers, 1, 1, 1)
        for size in (shape, alone):  # the rest one by one: one of its items ended the worker
            if not waiting:
                return
            for index, outcome in _pass(how, work, keeper, waiting, size):
                if (item := waiting.pop(index, None)) is not None:  # else a block that was run twice
                    yield index, _read(outcome, index, item, program)
        message = "the worker process ended each time that it ran item"
        hint = "it was killed, or out of memory"
        for index in sorted(waiting):
            lost = ProgramError(f"{message} {index}", program=program, hint=hint)
            yield index, _named(lost, index, waiting[index], program)
    finally:
        ray.kill(keeper)  # Ray does not say when it would collect it


def _pass(
    how: RayData, work: bytes, keeper: Any, waiting: dict[int, bytes], shape: Shape
) -> Iterator[tuple[int, bytes]]:
    log_once("ray_data_progress_manager_disabled")  # so that Ray does not warn about it
    rows = [{"index": index, "item": item} for index, item in waiting.items()]
    data = ray.data.from_items(rows, override_num_blocks=math.ceil(len(rows) / shape.block))
    data.context.max_errored_blocks = -1  # lost blocks are tried again, or reported by item
    data.context.enable_progress_bars = False
    data = data.map_batches(
        Worker,
        fn_constructor_args=(work, keeper),
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(
            size=min(shape.workers, len(rows)),
            max_tasks_in_flight_per_actor=shape.calls,
            max_concurrent_calls_per_actor=shape.calls,
            enable_true_multi_threading=True,
        ),
        num_cpus=how.cpus,
        num_gpus=how.gpus,
    )
    for block in data.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        yield from zip(block["index"].to_pylist(), block["outcome"].to_pylist())


def _packed(items: Iterable[Any], program: str) -> tuple[dict[int, bytes], dict[int, Exception]]:
    """The items as bytes by position, and the errors of those that cannot be sent."""
    packed: dict[int, bytes] = {}
    refused: dict[int, Exception] = {}
    for index, item in enumerate(items):
        try:
            packed[index] = cloudpickle.dumps(item)
        except Exception as error:  # noqa: BLE001 - the outcome of this item
            refused[index] = BadProgram(f"item {index} cannot be sent to a worker: {headline(error)}")
            of_item(refused[index], index, item, batch_of(program))
    return packed, refused


def _sendable(work: Work, program: str, backend: Any) -> bytes:
    """Raises BadProgram."""
    try:
        return bytes(cloudpickle.dumps(work))
    except Exception as error:
        what = "the backend" if isinstance(backend, Backend) else f"{program!r}"
        raise BadProgram(
            f"{what} cannot be sent to Ray's workers: {headline(error)}; pass backend= a server's URL, a "
            "backend's name, or a function without arguments that makes one in the worker"
        ) from error


def _keeper(folder: str | None, mode: Mode | None, attempts: int, budget: Budget | None) -> Any:
    """A Keeper on this machine, which has the folder; it ends with this process."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Keeper)
    return actor.options(scheduling_strategy=here).remote(folder, mode, attempts, budget)


def _read(outcome: bytes, index: int, item: bytes, program: str) -> Any:
    try:
        result: PackedRun | BaseException = cloudpickle.loads(outcome)
    except Exception as error:  # noqa: BLE001 - the outcome of this item
        result = BadProgram(
            f"the result of {program!r} for item {index} cannot be read here: {headline(error)}"
        )
    if not isinstance(result, BaseException):
        return unpack(result, index)
    return _named(result, index, item, program)


def _named(error: BaseException, index: int, item: bytes, program: str) -> BaseException:
    """The error of an item, with the item. The item is unpickled, so that items are not kept twice."""
    try:
        value = cloudpickle.loads(item)
    except Exception as fault:  # noqa: BLE001 - its class cannot be read back
        value = f"an item that cannot be read: {headline(fault)}"
    of_item(error, index, value, batch_of(program))
    return error


def _in_order(outcomes: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    held: dict[int, Any] = {}
    following = 0
    for index, outcome in outcomes:
        held[index] = outcome
        while following in held:
            yield following, held.pop(following)
            following += 1


def _settled(outcomes: Iterator[tuple[int, Any]], on_error: str, bar: Any) -> Iterator[Any]:
    """The outcomes by the policy for errors."""
    try:
        for _, outcome in outcomes:
            if bar is not None:
                bar.update(1)
            if isinstance(outcome, BaseException):
                trim(outcome)
                if on_error != "return" or not isinstance(outcome, Exception):
                    raise outcome
            yield outcome
    finally:
        if bar is not None:
            bar.close()

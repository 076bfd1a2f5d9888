"""Code in Ray's processes: workers run the programs of a batch, and a keeper records their calls.

Ray sends everything between processes as pickles; a cluster trusts everyone who can send it work.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pickle import PicklingError
from typing import Any, NamedTuple

import pyarrow
import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError

from sglang_dsl.backends import as_backend
from sglang_dsl.backends.base import Backend
from sglang_dsl.budgets import Budget
from sglang_dsl.compiler.follow import Startable
from sglang_dsl.errors import BackendError, BadProgram, BudgetExceeded, headline
from sglang_dsl.execution.batch import Job, run_items
from sglang_dsl.execution.finished import PackedRun, instead_of, pack, sendable
from sglang_dsl.interpreter.metering import Ask, Hold, Meter
from sglang_dsl.interpreter.parameters import Options
from sglang_dsl.interpreter.record import Mode, Record
from sglang_dsl.interpreter.run import Scope
from sglang_dsl.ir import Sampling

OUTCOMES = pyarrow.schema([("index", pyarrow.int64()), ("outcome", pyarrow.binary())])
LOG_S = 60.0
"""Timeout for an answer of the keeper."""
LONGEST_CALL_S = 3600.0
"""How long the reservation of a call without a deadline is kept if its worker dies."""
POLL_S = 0.05


class Work(NamedTuple):
    """The job of every worker of a batch. `backend`: a value for `backend=`, or a function that creates it;
    `sampling`, `timeout`: the sender's settings; `limit`: items of one block that run at once; `mode`: of the
    record, None without one; `budget`: of the whole batch."""

    program: Startable
    options: Options
    backend: Any
    sampling: Sampling
    timeout: float | None
    limit: int
    mode: Mode | None
    budget: Budget | None = None


class Keeper:
    """An actor on the sender's machine: the one process that writes the batch's record, counts its budget,
    and counts how often each block was begun."""

    def __init__(
        self, folder: str | None, mode: Mode | None, attempts: int, budget: Budget | None = None
    ) -> None:
        self._record = None if folder is None or mode is None else Record(folder, mode)
        self._meter = Meter(budget or Budget())
        self._holds: dict[int, tuple[Hold, float]] = {}
        self._numbers = itertools.count()
        self._attempts = attempts
        self._begun: Counter[tuple[int, int]] = Counter()

    def begin(self, block: tuple[int, int]) -> bool:
        """A worker is about to run this block (first item, size). False if it has ended too many workers."""
        self._begun[block] += 1
        return self._begun[block] <= self._attempts

    def find(self, key: str, identity: str | None) -> dict[str, Any] | None:
        """As Record.find."""
        assert self._record is not None
        return self._record.find(key, identity)

    def keep(self, key: str, identity: str, request: dict[str, Any], reply: dict[str, Any]) -> None:
        """As Record.keep."""
        assert self._record is not None
        self._record.keep(key, identity, request, reply)

    def left_s(self) -> float | None:
        """Seconds that the budget has left."""
        return self._meter.left_s

    def reserve(self, ask: Ask, limit_s: float) -> tuple[int, int] | str | None:
        """Reserve a call of at most `limit_s` seconds. Returns its number and the tokens that it may have,
        None if it has to wait, or a message if the budget is used up."""
        now = time.monotonic()
        for number, (_, until) in list(self._holds.items()):
            if until < now:  # its worker has died
                self.release(number, True)
        try:
            hold = self._meter.reserve_now(ask)
        except BudgetExceeded as error:
            return error.message
        if hold is None:
            return None
        number = next(self._numbers)
        self._holds[number] = hold, now + limit_s
        return number, hold.most

    def release(self, number: int, counts: bool) -> None:
        """As Meter.release."""
        if (held := self._holds.pop(number, None)) is not None:
            self._meter.release(held[0], counts=counts)

    def charge(self, meta: Mapping[str, Any]) -> None:
        """As Meter.charge."""
        self._meter.charge(meta)


class SharedHold(Hold, frozen=True, gc=False):
    """A reservation of a Keeper under `number`."""

    number: int = 0


class SharedMeter(Meter):
    """A Meter for all workers of a batch, counted by a Keeper. Raises BackendError if that does not
    answer."""

    def __init__(self, keeper: Any, budget: Budget, call_s: float | None) -> None:
        super().__init__(budget)
        self._keeper, self._call_s = keeper, call_s or LONGEST_CALL_S
        left: float | None = _answer(keeper.left_s.remote())
        self._until = None if left is None else self._clock() + left

    @property
    def left_s(self) -> float | None:
        return None if self._until is None else self._until - self._clock()

    async def reserve(self, ask: Ask) -> Hold:
        while True:
            reference = self._keeper.reserve.remote(ask, self._call_s + LOG_S)
            try:
                answer = await asyncio.wait_for(asyncio.wrap_future(reference.future()), LOG_S)
            except (TimeoutError, RayError) as error:
                raise BackendError(f"the batch's budget cannot be counted: {headline(error)}") from error
            if isinstance(answer, str):
                raise BudgetExceeded(answer, hint="pass a larger Budget(...)")
            if answer is not None:
                return SharedHold(self, answer[1], number=answer[0])
            await asyncio.sleep(POLL_S)

    def release(self, hold: Hold, *, counts: bool = True) -> None:
        if isinstance(hold, SharedHold):
            self._keeper.release.remote(hold.number, counts)

    def charge(self, meta: Mapping[str, Any]) -> None:
        # Calls of one worker reach the keeper in order: this is counted before the reservation is released.
        self._keeper.charge.remote(dict(meta))


class KeptElsewhere:
    """A CallLog written by a Keeper. Raises BackendError if that does not answer."""

    def __init__(self, keeper: Any, mode: Mode) -> None:
        self._keeper, self.mode = keeper, mode

    def find(self, key: str, identity: str | None) -> dict[str, Any] | None:
        reply: dict[str, Any] | None = _answer(self._keeper.find.remote(key, identity))
        return reply

    def keep(self, key: str, identity: str, request: Mapping[str, Any], reply: Mapping[str, Any]) -> None:
        # Waited for: a call is answered when it is recorded.
        _answer(self._keeper.keep.remote(key, identity, dict(request), dict(reply)))


def _answer(reference: Any) -> Any:
    try:
        return ray.get(reference, timeout=LOG_S)
    except GetTimeoutError as error:
        raise BackendError(f"the batch's record did not answer within {LOG_S:g} s") from error
    except RayError as error:
        raise BackendError(f"the batch's record cannot be reached: {headline(error)}") from error


class Worker:
    """Runs items of a batch, in several threads. Failures are per item; the job is unpacked with the first
    items, so that they report its errors."""

    def __init__(self, work: bytes, keeper: Any) -> None:
        self._work, self._keeper = work, keeper
        self._ready: tuple[Work, Scope] | BaseException | None = None
        self._making = threading.Lock()

    def __call__(self, block: Any) -> Any:
        """`block`: an Arrow table of `index` and `item`. Returns one of `index` and `outcome`, empty if this
        block has ended too many workers."""
        items = dict(zip(block["index"].to_pylist(), block["item"].to_pylist()))
        may_run = _answer(self._keeper.begin.remote((min(items), len(items))))
        outcomes = dict(self._outcomes(items)) if may_run else {}
        columns = {"index": list(outcomes), "outcome": list(outcomes.values())}
        return pyarrow.table(columns, schema=OUTCOMES)

    def _outcomes(self, items: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        ready = self._prepared()
        if isinstance(ready, BaseException):
            yield from ((index, _sent(ready, "")) for index in items)
            return
        work, scope = ready
        loaded: list[tuple[int, Any]] = []
        for index, item in items.items():
            try:
                loaded.append((index, cloudpickle.loads(item)))
            except Exception as error:  # noqa: BLE001 - the outcome of this item
                message = f"item {index} cannot be read in the worker: {headline(error)}"
                yield index, _sent(BadProgram(message), work.program.name)
        jobs = run_items(work.program, work.options, scope, loaded, work.limit)
        for (index, _), job in zip(loaded, jobs):
            yield index, _sent(_outcome_of(job), work.program.name)

    def _prepared(self) -> tuple[Work, Scope] | BaseException:
        with self._making:
            if self._ready is None:
                try:
                    work: Work = cloudpickle.loads(self._work)
                    log = None if work.mode is None else KeptElsewhere(self._keeper, work.mode)
                    budget, timeout = work.budget, work.timeout
                    meters = () if budget is None else (SharedMeter(self._keeper, budget, timeout),)
                    scope = Scope(_backend_of(work.backend), work.sampling, timeout, meters, log)
                    self._ready = work, scope
                except Exception as error:  # noqa: BLE001 - the outcome of every item
                    self._ready = error
            return self._ready


def _backend_of(value: Any) -> Backend | None:
    if value is None:
        return None
    try:
        return as_backend(value)
    except TypeError:
        if not callable(value):
            raise
        make: Callable[[], Any] = value
        return as_backend(make())


def _outcome_of(job: Job) -> PackedRun | BaseException:
    if job.error is not None:
        return job.error
    assert job.state is not None
    return pack(job.state)


def _sent(outcome: PackedRun | BaseException, program: str) -> bytes:
    """`outcome` as bytes that can be unpickled, whatever a program returns or raises."""
    if isinstance(outcome, BaseException):
        try:
            data: bytes = cloudpickle.dumps(sendable(outcome))
            cloudpickle.loads(data)  # its constructor may take other arguments
        except Exception:  # noqa: BLE001 - sent as text instead
            data = cloudpickle.dumps(instead_of(outcome, program))
        return data
    try:
        done: bytes = cloudpickle.dumps(outcome)
    except (PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        error_sent = BadProgram(
            f"the values that {program!r} returned or set cannot be sent from the worker: {headline(error)}; "
            "return plain data"
        )
        return bytes(cloudpickle.dumps(error_sent))
    return done

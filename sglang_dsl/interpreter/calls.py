"""Calls of a backend, as a run makes them: within deadlines and budgets, seeded, recorded or replayed,
reported to hooks and the ledger. Knows no nodes' meaning and no transcript.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import json
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, nullcontext
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from sglang_dsl.backends.base import Backend
from sglang_dsl.concurrency.loop import Deadline, background
from sglang_dsl.conversation.requests import (
    Call,
    CallRecord,
    ChoiceCall,
    ChoiceScore,
    ChoiceScores,
    Completion,
    Delta,
    Ledger,
)
from sglang_dsl.errors import BackendError, ReplayMiss, Timeout
from sglang_dsl.hooks import CallEvent, hooks
from sglang_dsl.interpreter.metering import Ask, Hold, Meter
from sglang_dsl.interpreter.record import CallLog, key_of
from sglang_dsl.ir import Source

T = TypeVar("T")
Before: TypeAlias = "Callable[[Backend], Awaitable[None]] | None"
_NUMBERS, _RUNS = itertools.count(), itertools.count()
_CHARACTERS = 4
"""Characters per token, as an estimate."""


class CallContext(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Which call of a run this is. `meters`: those of the run and of the branches around it. `timeout`:
    seconds it may take. `fresh`: estimated number of prompt tokens that are not cached."""

    kind: str
    name: str | None
    branch: tuple[int, ...]
    step: int
    source: Source | None = None
    timeout: float | None = None
    meters: tuple[Meter, ...] = ()
    fresh: int = 0


class _Clock(msgspec.Struct, gc=False):
    began: float
    first: float | None = None
    replayed: bool = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class Calls:
    """All calls of one run. backend None: everything is replayed. `seed`: calls without a seed get one
    derived from it by program, item, branch and step."""

    def __init__(
        self,
        program: str,
        backend: Backend | None,
        ledger: Ledger,
        *,
        record: CallLog | None = None,
        seed: int | None = None,
        index: int | None = None,
    ) -> None:
        self.program, self.backend, self.ledger = program, backend, ledger
        self.record, self.seed, self.index = record, seed, index
        self._run = next(_RUNS)

    def derived(self, context: CallContext) -> int | None:
        """The seed of a call without one."""
        if self.seed is None:
            return None
        key = json.dumps([self.seed, self.program, self.index, context.branch, context.step])
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def generate(
        self,
        context: CallContext,
        call: Call,
        before: Before = None,
        piece: Callable[[Delta], None] | None = None,
    ) -> Coroutine[Any, Any, Completion]:
        """`before`: prepares the backend; `piece`: called with each piece of the stream."""
        if self.seed is not None and call.sampling.seed is None:
            sampling = msgspec.structs.replace(call.sampling, seed=self.derived(context))
            call = msgspec.structs.replace(call, sampling=sampling)
        alone = before is None and piece is None and self.record is None
        if alone and not context.meters and not hooks.listeners:
            return self._plain(context, call)
        drawn = call.sampling.seed is None and not call.sampling.greedy
        make = self._metered if context.meters else self._within
        return make(context, _Generation(call, before, piece), drawn)

    async def _plain(self, context: CallContext, call: Call) -> Completion:
        """A generation without stream, record, budgets and hooks, as most are."""
        assert self.backend is not None
        began = time.monotonic()
        deadline = None if context.timeout is None else background().deadlines.begin(context.timeout)
        try:
            done = await self.backend.generate(call)
            if len(done.texts) != call.n:
                raise _other_number(done, call)
        except BaseException as raised:  # noqa: BLE001 - raised again, some by another name
            error = _named(raised, deadline, None)
            try:
                if error is raised:
                    raise
                raise error from raised
            finally:
                del error  # which keeps this frame
        if deadline is not None:
            deadline.end(None)
        seconds = time.monotonic() - began
        self.ledger.add(
            CallRecord(
                context.kind,
                context.name,
                context.branch,
                seconds,
                context.source,
                done.meta,
                None,
                False,
                began,
            )
        )
        return done

    def score(
        self, context: CallContext, call: ChoiceCall, before: Before = None, drawn: bool = False
    ) -> Coroutine[Any, Any, ChoiceScores]:
        """`drawn`: one of the choices will be drawn at random; meta["draw"] is then the seed for it, so that
        a replay draws the same one."""
        make = self._metered if context.meters else self._within
        return make(context, _Scoring(call, before, drawn), drawn)

    def tool(self, context: CallContext, request: Request[T]) -> Coroutine[Any, Any, T]:
        """Call a tool for the model. Its result is recorded and replayed like a model's answer."""
        return self._within(context, request, drawn=True)

    async def _metered(self, context: CallContext, request: Request[T], drawn: bool) -> T:
        """A call that is charged to budgets."""
        holds = await _reserved(context, request)
        try:
            return await self._within(context, request, drawn, holds)
        finally:
            for hold in holds:
                hold.meter.release(hold)

    async def _within(
        self, context: CallContext, request: Request[T], drawn: bool, holds: Sequence[Hold] = ()
    ) -> T:
        """A call whose budget is reserved."""
        if holds:
            request = request.within(min(hold.most for hold in holds))
        limit, budget = _limit(context) if context.meters else (context.timeout, None)
        clock, number = _Clock(time.monotonic()), next(_NUMBERS)
        if hooks.listeners:
            self._tell("begin", number, context, clock, request)
        deadline = None if limit is None else background().deadlines.begin(limit)
        try:
            if self.record is not None:
                done = await self._recorded(self.record, context, request, drawn, clock)
            else:
                assert self.backend is not None
                done = request.checked(await request.make(self.backend, clock))
        except BaseException as raised:  # noqa: BLE001 - raised again, some by another name
            error = _named(raised, deadline, budget)
            if hooks.listeners:
                self._tell("error", number, context, clock, request, error=error)
            try:
                if error is raised:
                    raise
                raise error from raised
            finally:
                del error  # which keeps this frame
        if deadline is not None:
            deadline.end(None)
        meta: dict[str, Any] = done.meta  # type: ignore[attr-defined]
        for meter in context.meters:
            meter.charge(meta)
        self.ledger.add(
            CallRecord(
                context.kind,
                context.name,
                context.branch,
                clock.seconds,
                context.source,
                meta,
                clock.first,
                clock.replayed,
                clock.began,
            )
        )
        if hooks.listeners:
            self._tell("end", number, context, clock, request, meta=meta, reply=partial(request.write, done))
        return done

    async def _recorded(
        self, record: CallLog, context: CallContext, request: Request[T], drawn: bool, clock: _Clock
    ) -> T:
        """The answer from the record, or from the backend."""
        backend = self.backend
        content = request.request()
        if drawn:
            content["place"] = [self.program, self.index, list(context.branch), context.step]
        key, identity = key_of(content), None if backend is None else backend.identity
        reply = record.find(key, identity)
        if reply is not None:
            clock.replayed = True
            return request.read(reply, streamed=False)
        if record.mode == "ro" or backend is None:
            raise ReplayMiss(
                "this call is not in the record",
                hint="the program, its prompts or its sampling have changed since; record again with "
                'cache="rw"',
            )
        reply = request.write(request.checked(await request.make(backend, clock)))
        # As a replay returns it, so that both runs see the same.
        plain: dict[str, Any] = json.loads(json.dumps(reply, default=str))
        record.keep(key, backend.identity, content, plain)
        return request.read(plain, streamed=True)

    def _tell(
        self,
        phase: Any,
        number: int,
        context: CallContext,
        clock: _Clock,
        request: Request[Any],
        meta: dict[str, Any] | None = None,
        error: BaseException | None = None,
        reply: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        hooks.tell(
            CallEvent(
                phase=phase,
                number=number,
                program=self.program,
                kind=context.kind,
                name=context.name,
                branch=context.branch,
                step=context.step,
                index=self.index,
                backend=None if self.backend is None else self.backend.name,
                source=context.source,
                seconds=clock.seconds,
                first_token_s=clock.first,
                replayed=clock.replayed,
                meta=meta or {},
                error=error,
                run=self._run,
                request=request.request,
                reply=reply,
            )
        )


class Request(Protocol[T]):
    """One call, ready to be made or replayed. An object and not a closure, because a failed frame keeps its
    function's closure alive as long as the error is kept."""

    def ask(self, fresh: int) -> Ask:
        """What it may use, with about `fresh` prompt tokens that are not cached."""
        ...

    def within(self, most: int) -> Request[T]:
        """The same with at most `most` tokens per text."""
        ...

    def request(self) -> dict[str, Any]: ...
    def make(self, backend: Backend, clock: _Clock) -> Coroutine[Any, Any, T]: ...
    def checked(self, done: T) -> T:
        """The answer, if it fits the call. Raises BackendError."""
        ...

    def write(self, done: T) -> dict[str, Any]: ...
    def read(self, reply: dict[str, Any], *, streamed: bool) -> T:
        """The answer that write() wrote; `streamed`: its pieces were passed on already."""
        ...


class _Generation(msgspec.Struct, frozen=True, eq=False):
    call: Call
    before: Before
    piece: Callable[[Delta], None] | None
    clamped: bool = False

    def ask(self, fresh: int) -> Ask:
        return Ask(fresh, self.call.sampling.max_new_tokens, self.call.n)

    def within(self, most: int) -> _Generation:
        sampling = self.call.sampling
        if most >= sampling.max_new_tokens:
            return self
        fewer = msgspec.structs.replace(
            sampling, max_new_tokens=most, min_new_tokens=min(most, sampling.min_new_tokens)
        )
        call = msgspec.structs.replace(self.call, sampling=fewer)
        return _Generation(call, self.before, self.piece, clamped=True)

    def request(self) -> dict[str, Any]:
        return _plain(self.call)

    def make(self, backend: Backend, clock: _Clock) -> Coroutine[Any, Any, Completion]:
        if self.before is None and self.piece is None:
            return backend.generate(self.call)
        return self._prepared(backend, clock)

    async def _prepared(self, backend: Backend, clock: _Clock) -> Completion:
        if self.before is not None:
            await self.before(backend)
        if self.piece is None:
            return await backend.generate(self.call)
        return await self._streamed(backend, self.piece, clock)

    def checked(self, done: Completion) -> Completion:
        if len(done.texts) != self.call.n:
            raise _other_number(done, self.call)
        if self.clamped:
            meta = {**done.meta, "clamped_max_tokens": self.call.sampling.max_new_tokens}
            return Completion(done.texts, meta)
        return done

    async def _streamed(self, backend: Backend, piece: Callable[[Delta], None], clock: _Clock) -> Completion:
        pieces: list[str] = []
        meta: dict[str, Any] = {}
        deltas: Any = backend.stream(self.call)
        ended = False
        # Closed at once when this task is cancelled, so that the backend stops too.
        async with aclosing(deltas) if hasattr(deltas, "aclose") else nullcontext():
            async for delta in deltas:
                if clock.first is None:
                    clock.first = clock.seconds
                pieces.append(delta.text)
                if delta.meta is not None:
                    meta, ended = delta.meta, True
                piece(delta)
        if not ended:
            raise BackendError("the stream broke off: it ended without its finish reason", retryable=True)
        return Completion(("".join(pieces),), meta)

    def write(self, done: Completion) -> dict[str, Any]:
        return {"texts": list(done.texts), "meta": done.meta}

    def read(self, reply: dict[str, Any], *, streamed: bool) -> Completion:
        done = Completion(tuple(reply["texts"]), reply["meta"])
        if self.piece is not None and not streamed:
            thought = done.meta.get("reasoning_content") or ""
            self.piece(Delta(done.texts[0], done.meta, reasoning=thought))
        return done


def _other_number(done: Completion, call: Call) -> BackendError:
    return BackendError(f"the backend returned {len(done.texts)} texts instead of {call.n}")


class _Scoring(msgspec.Struct, frozen=True, eq=False):
    call: ChoiceCall
    before: Before
    drawn: bool

    def ask(self, fresh: int) -> Ask:
        return Ask(fresh, sum(map(about, self.call.choices)), fixed=True)

    def within(self, most: int) -> _Scoring:
        return self

    def request(self) -> dict[str, Any]:
        return _plain(self.call)

    async def make(self, backend: Backend, clock: _Clock) -> ChoiceScores:
        if self.before is not None:
            await self.before(backend)
        return await backend.score(self.call)

    def checked(self, done: ChoiceScores) -> ChoiceScores:
        if len(done.scores) != len(self.call.choices):
            raise BackendError(f"the backend scored {len(done.scores)} of {len(self.call.choices)} choices")
        if self.drawn:
            # Not from `random`, whose sequence is the user's.
            draw = int.from_bytes(os.urandom(8), "big") >> 1
            return ChoiceScores(done.scores, {**done.meta, "draw": draw})
        return done

    def write(self, done: ChoiceScores) -> dict[str, Any]:
        return {"scores": [dataclasses.asdict(score) for score in done.scores], "meta": done.meta}

    def read(self, reply: dict[str, Any], *, streamed: bool) -> ChoiceScores:
        return ChoiceScores(tuple(msgspec.convert(reply["scores"], list[ChoiceScore])), reply["meta"])


async def _reserved(context: CallContext, request: Request[Any]) -> list[Hold]:
    """Reserve the call in all budgets, the innermost first, so that a call that waits for one blocks no other
    from ending. Raises BudgetExceeded."""
    holds: list[Hold] = []
    ask = request.ask(context.fresh)
    limit, meter = _limit(
        CallContext(context.kind, context.name, context.branch, context.step, meters=context.meters)
    )
    try:
        async with asyncio.timeout(limit):
            for one in reversed(context.meters):
                holds.append(await one.reserve(ask))
                ask = msgspec.structs.replace(ask, most=holds[-1].most)
    except BaseException as error:
        for hold in holds:
            hold.meter.release(hold, counts=False)
        if meter is not None and isinstance(error, TimeoutError):
            raise meter.late() from error
        raise
    return holds


def about(text: str | int) -> int:
    """Estimated tokens of a text, or of so many characters."""
    return -(-(text if isinstance(text, int) else len(text)) // _CHARACTERS)


def _named(raised: BaseException, deadline: Deadline | None, meter: Meter | None) -> BaseException:
    """The error of a call: a timeout, by its own limit or by the budget of `meter`, or as it is."""
    if deadline is not None and deadline.end(raised):
        return TimeoutError() if meter is None else meter.late()
    if isinstance(raised, TimeoutError):
        # The backend's, such as a deadline of its connection.
        return Timeout(f"{type(raised).__name__}: {raised}".rstrip(": "), retryable=True)
    return raised


def _limit(context: CallContext) -> tuple[float | None, Meter | None]:
    """How many seconds a call may take, and the meter whose budget limits it, if one does."""
    limited = [(left, meter) for meter in context.meters if (left := meter.left_s) is not None]
    shortest = min(limited, key=lambda pair: pair[0]) if limited else None
    if shortest is None or (context.timeout is not None and context.timeout <= shortest[0]):
        return context.timeout, None
    return max(0.0, shortest[0]), shortest[1]


def _plain(call: Call | ChoiceCall) -> dict[str, Any]:
    """Everything an answer depends on, as JSON data."""
    plain: dict[str, Any] = {
        "kind": type(call).__name__,
        "messages": msgspec.to_builtins(call.prompt.messages),
    }
    tools = call.prompt.tools
    left = ["prompt", "timeout", "peeks"]
    left += [] if tools else ["tool_choice", "parallel_tools"]
    left += [] if isinstance(call, Call) or call.temperature else ["temperature", "seed"]
    for name in (name for name in call.__struct_fields__ if name not in left):
        plain[name] = msgspec.to_builtins(getattr(call, name))
    return plain | ({"tools": msgspec.to_builtins(tools)} if tools else {})

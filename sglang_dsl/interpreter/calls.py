"""Calls of a backend, as a run makes them: within deadlines and budgets, seeded, recorded or replayed, told
to hooks and written into the ledger. Knows no nodes' meaning and no transcript.
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
"""Of a token, as a rule of thumb."""


class Where(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Which call of a run this is. `meters`: those of the run and of the branches it stands in. `timeout`:
    seconds it may take. `fresh`: how many tokens of the prompt the backend does not know yet, about."""

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
    """All calls of one run. backend None: everything is replayed. `seed`: calls that have none of their own
    get one each, derived from it by program, item, branch and step."""

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

    def derived(self, where: Where) -> int | None:
        """The seed of a call that has none of its own."""
        if self.seed is None:
            return None
        place = json.dumps([self.seed, self.program, self.index, where.branch, where.step])
        digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def generate(
        self,
        where: Where,
        call: Call,
        before: Before = None,
        piece: Callable[[Delta], None] | None = None,
    ) -> Coroutine[Any, Any, Completion]:
        """`before` prepares the backend, where it has to be; `piece` is given the stream's pieces as they
        come."""
        if self.seed is not None and call.sampling.seed is None:
            sampling = msgspec.structs.replace(call.sampling, seed=self.derived(where))
            call = msgspec.structs.replace(call, sampling=sampling)
        alone = before is None and piece is None and self.record is None
        if alone and not where.meters and not hooks.listeners:
            return self._plain(where, call)
        drawn = call.sampling.seed is None and not call.sampling.greedy
        return self._made(where, _Generation(call, before, piece), drawn)

    async def _plain(self, where: Where, call: Call) -> Completion:
        """A generation that nobody else has a part in, as most are."""
        assert self.backend is not None
        began = time.monotonic()
        deadline = None if where.timeout is None else background().deadlines.begin(where.timeout)
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
                where.kind, where.name, where.branch, seconds, where.source, done.meta, None, False, began
            )
        )
        return done

    def score(
        self, where: Where, call: ChoiceCall, before: Before = None, drawn: bool = False
    ) -> Coroutine[Any, Any, ChoiceScores]:
        """`drawn`: one of the choices will be drawn by chance; meta["draw"] is then a seed to do it with, so
        that a replay draws the same one."""
        return self._made(where, _Scoring(call, before, drawn), drawn)

    def tool(self, where: Where, asked: Asked[T]) -> Coroutine[Any, Any, T]:
        """A tool called by the model. Its result is recorded and replayed as a model's answer is."""
        return self._within(where, asked, drawn=True)

    def _made(self, where: Where, asked: Asked[T], drawn: bool) -> Coroutine[Any, Any, T]:
        return (self._metered if where.meters else self._within)(where, asked, drawn)

    async def _metered(self, where: Where, asked: Asked[T], drawn: bool) -> T:
        """A call that budgets are charged for."""
        holds = await _reserved(where, asked)
        try:
            return await self._within(where, asked, drawn, holds)
        finally:
            for hold in holds:
                hold.meter.release(hold)

    async def _within(self, where: Where, asked: Asked[T], drawn: bool, holds: Sequence[Hold] = ()) -> T:
        """A call for which there is room."""
        if holds:
            asked = asked.within(min(hold.most for hold in holds))
        limit, budget = _limit(where) if where.meters else (where.timeout, None)
        clock, number = _Clock(time.monotonic()), next(_NUMBERS)
        if hooks.listeners:
            self._tell("begin", number, where, clock, asked)
        deadline = None if limit is None else background().deadlines.begin(limit)
        try:
            if self.record is not None:
                done = await self._recorded(self.record, where, asked, drawn, clock)
            else:
                assert self.backend is not None
                done = asked.checked(await asked.make(self.backend, clock))
        except BaseException as raised:  # noqa: BLE001 - raised again, some by another name
            error = _named(raised, deadline, budget)
            if hooks.listeners:
                self._tell("error", number, where, clock, asked, error=error)
            try:
                if error is raised:
                    raise
                raise error from raised
            finally:
                del error  # which keeps this frame
        if deadline is not None:
            deadline.end(None)
        meta: dict[str, Any] = done.meta  # type: ignore[attr-defined]
        for meter in where.meters:
            meter.charge(meta)
        self.ledger.add(
            CallRecord(
                where.kind,
                where.name,
                where.branch,
                clock.seconds,
                where.source,
                meta,
                clock.first,
                clock.replayed,
                clock.began,
            )
        )
        if hooks.listeners:
            self._tell("end", number, where, clock, asked, meta=meta, reply=partial(asked.write, done))
        return done

    async def _recorded(
        self, record: CallLog, where: Where, asked: Asked[T], drawn: bool, clock: _Clock
    ) -> T:
        """By the record, or by the backend."""
        backend = self.backend
        request = asked.request()
        if drawn:
            request["place"] = [self.program, self.index, list(where.branch), where.step]
        key, identity = key_of(request), None if backend is None else backend.identity
        found = record.find(key, identity)
        if found is not None:
            clock.replayed = True
            return asked.read(found, told=False)
        if record.mode == "ro" or backend is None:
            raise ReplayMiss(
                "this call is not in the record",
                hint="the program, its prompts or its sampling have changed since; record again with "
                'cache="rw"',
            )
        reply = asked.write(asked.checked(await asked.make(backend, clock)))
        # As a replay would give it, so that both runs see the same.
        plain: dict[str, Any] = json.loads(json.dumps(reply, default=str))
        record.keep(key, backend.identity, request, plain)
        return asked.read(plain, told=True)

    def _tell(
        self,
        phase: Any,
        number: int,
        where: Where,
        clock: _Clock,
        asked: Asked[Any],
        meta: dict[str, Any] | None = None,
        error: BaseException | None = None,
        reply: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        hooks.tell(
            CallEvent(
                phase=phase,
                number=number,
                program=self.program,
                kind=where.kind,
                name=where.name,
                branch=where.branch,
                step=where.step,
                index=self.index,
                backend=None if self.backend is None else self.backend.name,
                source=where.source,
                seconds=clock.seconds,
                first_token_s=clock.first,
                replayed=clock.replayed,
                meta=meta or {},
                error=error,
                run=self._run,
                request=asked.request,
                reply=reply,
            )
        )


class Asked(Protocol[T]):
    """One call, ready to be made or replayed. These are objects and not closures, because a failed frame
    keeps its function's closure alive as long as the error is kept."""

    def ask(self, fresh: int) -> Ask:
        """What it may use, its prompt about `fresh` tokens that are not cached."""
        ...

    def within(self, most: int) -> Asked[T]:
        """The same with at most so many tokens for each text."""
        ...

    def request(self) -> dict[str, Any]: ...
    def make(self, backend: Backend, clock: _Clock) -> Coroutine[Any, Any, T]: ...
    def checked(self, done: T) -> T:
        """What was made, if it is what was asked for. Raises BackendError."""
        ...

    def write(self, done: T) -> dict[str, Any]: ...
    def read(self, reply: dict[str, Any], *, told: bool) -> T:
        """The answer that write() wrote; `told`: its pieces were."""
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
        if self.clamped:  # the reader sees why it is so short
            meta = {**done.meta, "clamped_max_tokens": self.call.sampling.max_new_tokens}
            return Completion(done.texts, meta)
        return done

    async def _streamed(self, backend: Backend, piece: Callable[[Delta], None], clock: _Clock) -> Completion:
        pieces: list[str] = []
        meta: dict[str, Any] = {}
        deltas: Any = backend.stream(self.call)
        ended = False
        # Closed here and now when this task is cancelled, so that the backend stops too.
        async with aclosing(deltas) if hasattr(deltas, "aclose") else nullcontext():
            async for delta in deltas:
                if clock.first is None:
                    clock.first = clock.seconds
                pieces.append(delta.text)
                if delta.meta is not None:
                    meta, ended = delta.meta, True
                piece(delta)
        if not ended:
            raise BackendError(
                "the stream broke off: it ended without its finish reason",
                retryable=True,
            )
        return Completion(("".join(pieces),), meta)

    def write(self, done: Completion) -> dict[str, Any]:
        return {"texts": list(done.texts), "meta": done.meta}

    def read(self, reply: dict[str, Any], *, told: bool) -> Completion:
        done = Completion(tuple(reply["texts"]), reply["meta"])
        if self.piece is not None and not told:
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

    def checked(self, found: ChoiceScores) -> ChoiceScores:
        if len(found.scores) != len(self.call.choices):
            said = f"the backend scored {len(found.scores)} of {len(self.call.choices)} choices"
            raise BackendError(said)
        if self.drawn:
            # Not from `random`, whose sequence is the user's own.
            draw = int.from_bytes(os.urandom(8), "big") >> 1
            return ChoiceScores(found.scores, {**found.meta, "draw": draw})
        return found

    def write(self, done: ChoiceScores) -> dict[str, Any]:
        return {"scores": [dataclasses.asdict(score) for score in done.scores], "meta": done.meta}

    def read(self, reply: dict[str, Any], *, told: bool) -> ChoiceScores:
        return ChoiceScores(tuple(map(_score, reply["scores"])), reply["meta"])


async def _reserved(where: Where, asked: Asked[Any]) -> list[Hold]:
    """Room in all budgets, the innermost first: who waits for one keeps no other call from ending. Raises
    BudgetExceeded."""
    holds: list[Hold] = []
    ask = asked.ask(where.fresh)
    limit, meter = _limit(Where(where.kind, where.name, where.branch, where.step, meters=where.meters))
    try:
        async with asyncio.timeout(limit):
            for one in reversed(where.meters):
                holds.append(await one.reserve(ask))
                ask = msgspec.structs.replace(ask, most=holds[-1].most)
    except BaseException as error:
        for hold in holds:
            hold.meter.release(hold, made=False)
        if meter is not None and isinstance(error, TimeoutError):
            raise meter.late() from error
        raise
    return holds


def about(text: str | int) -> int:
    """How many tokens a text, or one of so many characters, has, about."""
    return -(-(text if isinstance(text, int) else len(text)) // _CHARACTERS)


def _named(raised: BaseException, deadline: Deadline | None, meter: Meter | None) -> BaseException:
    """What went wrong with a call: too late, by its own limit or by the budget of `meter`, or as it is."""
    if deadline is not None and deadline.end(raised):
        return TimeoutError() if meter is None else meter.late()
    if isinstance(raised, TimeoutError):
        # The backend's own: a deadline of its connection, say.
        return Timeout(f"{type(raised).__name__}: {raised}".rstrip(": "), retryable=True)
    return raised


def _limit(where: Where) -> tuple[float | None, Meter | None]:
    """How many seconds a call may take, and whose budget says so, if one does."""
    limited = [(left, meter) for meter in where.meters if (left := meter.left_s) is not None]
    shortest = min(limited, key=lambda pair: pair[0]) if limited else None
    if shortest is None or (where.timeout is not None and where.timeout <= shortest[0]):
        return where.timeout, None
    return max(0.0, shortest[0]), shortest[1]


def _plain(call: Call | ChoiceCall) -> dict[str, Any]:
    """All that an answer depends on, as JSON data."""
    made: dict[str, Any] = {
        "kind": type(call).__name__,
        "messages": msgspec.to_builtins(call.prompt.messages),
    }
    tools = call.prompt.tools
    left = ["prompt", "timeout", "peeks"]
    left += [] if tools else ["tool_choice", "parallel_tools"]
    left += [] if isinstance(call, Call) or call.temperature else ["temperature", "seed"]
    for name in (name for name in call.__struct_fields__ if name not in left):
        made[name] = msgspec.to_builtins(getattr(call, name))
    return made | ({"tools": msgspec.to_builtins(tools)} if tools else {})


def _score(told: dict[str, Any]) -> ChoiceScore:
    prior: Sequence[float | None] | None = told["unconditional"]
    return ChoiceScore(
        tuple(told["logprobs"]),
        tuple(told["token_ids"]),
        None if prior is None else tuple(prior),
        token_texts=tuple(told.get("token_texts") or ()),
    )

"""The executor: one coroutine per state, folding queued nodes over a transcript, through a backend.

The user's thread only appends to the queue; the coroutine runs on the background loop while there is work and
ends when there is none, so that an idle state, or a dropped one, holds nothing. After a failure later nodes
are skipped and whoever reads one of their values gets the failure. Knows no `s`, no threads of user code and
no particular backend.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from sglang_dsl import lower
from sglang_dsl.backends.base import Backend, ChoiceCall, Completion
from sglang_dsl.budgets import Budget, Meter
from sglang_dsl.calls import Where
from sglang_dsl.choices import METHODS, told
from sglang_dsl.core import Checkpoint, Core
from sglang_dsl.errors import (
    BackendError,
    BadProgram,
    MissingVariable,
    NoBackend,
    ProgramError,
    StateClosed,
    again,
)
from sglang_dsl.feed import Feed, Mark, Signal, Variable
from sglang_dsl.ir import (
    Gen,
    Media,
    Node,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Source,
    Text,
    caller,
    flatten,
)
from sglang_dsl.joins import CONCATENATE, replayed, taken_over
from sglang_dsl.loop import background
from sglang_dsl.passes import merge_text, role_after, sets
from sglang_dsl.reasoning import Split, Telling
from sglang_dsl.run import Body, Item, Prefix, RunInfo, forget_frames, placed, typed_value
from sglang_dsl.speculation import Speculation
from sglang_dsl.transcript import Transcript

_SETTERS = (Gen, Select, ScopeEnd)
# What costs nothing to do.
_FREE = (Text, RoleBegin, RoleEnd, Media, ScopeBegin, ScopeEnd)


class Executor:
    """One state's queue, transcript and variables. Methods are for the user's threads unless they begin with
    _."""

    def __init__(
        self,
        run: RunInfo,
        *,
        prefix: Prefix | None = None,
        role: str | None = None,
        variables: dict[str, Variable] | None = None,
        branch: tuple[int, ...] = (),
        body: Body | None = None,
        meters: tuple[Meter, ...] | None = None,
    ) -> None:
        self.run, self.branch, self.body = run, branch, body
        self.meters = (*(run.meters if meters is None else meters),)
        self._step = 0
        self._ahead = Speculation.of(run.speculation, run.backend)
        self.transcript = Transcript.EMPTY
        self.start = Transcript.EMPTY
        self.variables = variables if variables is not None else {}
        self.inherited = dict(self.variables)
        self.error: ProgramError | None = None
        self.feed = Feed()
        # (where, each branch's transcript at its fork and at its end), for display.
        self.joined: list[tuple[Mark, list[tuple[Transcript, Transcript]]]] = []
        self._prefix = prefix
        self._begun = prefix is None
        self._role = role
        self._ended = False
        self._queue: deque[Item] = deque()
        self._lock = threading.Lock()
        self._active = False
        self._task: asyncio.Task[Any] | None = None
        # Which item of the queue is being done, counted from 0; those before `_cancel_to` are cancelled.
        self._at, self._cancel_to, self._waits_since = -1, 0, 0
        self._src: Source | None = None  # where it was forked
        self._changed = Signal()
        self._scopes: dict[str, Transcript] = {}
        self._children: weakref.WeakSet[Executor] = weakref.WeakSet()
        self._forks = 0
        run.enter(self)

    @property
    def program(self) -> str:
        return self.run.program

    # -- adding ----------------------------------------------------------------------------------------------

    def submit(self, node: Node, src: Source | None) -> None:
        """Queue `node`. Raises BadProgram, NoBackend or StateClosed at once where it cannot be run at all."""
        if self._ended:
            raise StateClosed(f"this branch of {self.run.program!r} was joined; add to its parent instead")
        leaves = tuple(merge_text(flatten(node)))
        role = role_after(leaves, self._role)
        items = [self._item(leaf, src) for leaf in leaves]
        setters = [item for item in items if item.variable is not None]
        waited_for = bool(setters)
        with self._lock:
            self._role = role
            for made in itertools.chain.from_iterable((item.variable, item.thought) for item in setters):
                if made is not None and made.name is not None:
                    # The last queued setter is the one that readers wait for.
                    self.variables[made.name] = made
            self._queue.extend(items)
            # Constant text waits for company; in a stream somebody may be looking at it.
            if waited_for or self.run.stream:
                self._kick()
        if waited_for:
            self._changed.notify()
            if self.run.inline:
                self.mark().wait()

    def _item(self, leaf: Node, src: Source | None) -> Item:
        """A leaf, as it is queued. Raises BadProgram, NoBackend."""
        if not isinstance(leaf, _SETTERS):
            return Item(leaf, src)
        ready = self._check(leaf)
        return Item(leaf, src, self._variable(leaf), thought=self._thought(leaf), ready=ready)

    @staticmethod
    def _variable(leaf: Node) -> Variable | None:
        typed = leaf.typed if isinstance(leaf, Gen) else None
        return Variable(sets(leaf), typed) if isinstance(leaf, Gen | Select | ScopeEnd) else None

    @staticmethod
    def _thought(leaf: Node) -> Variable | None:
        """Where a generation's reasoning goes, if it is kept apart."""
        apart = isinstance(leaf, Gen) and leaf.reasoning is not None and leaf.name is not None
        return Variable(f"{sets(leaf)}_reasoning_content") if apart else None

    def _check(self, leaf: Node) -> lower.Lowered | None:
        """Refuse what can never run; a generation, lowered."""
        if isinstance(leaf, Gen | Select) and self.run.backend is None and self.run.calls.record is None:
            raise NoBackend(
                f"program {self.run.program!r} generates but has no backend: pass backend=..., "
                "or call set_default_backend(...)"
            )
        return lower.lower(leaf, self.run.defaults) if isinstance(leaf, Gen) else None

    def set(self, name: str, value: Any) -> None:
        variable = Variable(name)
        variable.settle(value)
        with self._lock:
            self.variables[name] = variable
        self._changed.notify()

    def open_role(self) -> str | None:
        return self._role

    # -- reading ---------------------------------------------------------------------------------------------

    def known(self, name: str) -> bool:
        return name in self.variables

    def names(self) -> tuple[str, ...]:
        return tuple(self.variables)

    def find(self, name: str) -> Variable:
        """The last queued setter of `name`; while the body still runs beside the caller, waits for one.
        Raises MissingVariable, or what stopped the body."""
        body = self.body
        if body is not None and body.elsewhere:
            self._changed.wait(lambda: name in self.variables or body.done)
        return self._wanted(self._found(name))

    async def find_async(self, name: str) -> Variable:
        body = self.body
        if body is not None and body.elsewhere:
            await self._changed.wait_async(lambda: name in self.variables or body.done)
        return self._wanted(self._found(name))

    def _wanted(self, variable: Variable) -> Variable:
        """Somebody is going to read it: what is held back for the rest of its turn is asked for now."""
        if self._ahead is not None and not variable.done:
            self.mark()
        return variable

    def _found(self, name: str) -> Variable:
        variable = self.variables.get(name)
        if variable is not None:
            return variable
        if self.body is not None and self.body.error is not None:
            raise _fresh(self.body.error)
        if self.error is not None:
            raise again(self.error)
        known = ", ".join(map(repr, list(self.variables))) or "none"
        raise MissingVariable(
            f"no variable {name!r}; known: {known}", program=self.program, variable=name, source=caller()
        )

    def mark(self) -> Mark:
        """A mark after everything queued so far; reached at once where nothing is under way."""
        mark = Mark(self.feed.signal if self.run.stream else None)
        self.put_mark(mark)
        return mark

    def put_mark(self, mark: Mark) -> None:
        with self._lock:
            self._queue.append(Item(mark=mark))
            self._kick()

    def settled(self) -> Transcript:
        """What was said by all that was queued so far; waits. In a stream, waits for the body too."""
        body = self.body
        if body is not None and body.elsewhere:
            body.end.wait()
        transcript = self.mark().wait()
        if body is not None and body.error is not None:
            raise _fresh(body.error)
        return transcript

    async def settled_async(self) -> Transcript:
        body = self.body
        if body is not None and body.elsewhere:
            await body.end.signal.wait_async(lambda: body.end.done)
        mark = self.mark()
        await mark.signal.wait_async(lambda: mark.done)
        transcript = mark.result()
        if body is not None and body.error is not None:
            raise _fresh(body.error)
        return transcript

    def so_far(self) -> Transcript:
        """What has been said by now; does not wait."""
        return self.transcript

    def pieces(self) -> Iterator[str]:
        """The whole text as it comes; in one piece where the run does not stream. Raises what went wrong."""
        if not self.run.stream:
            yield self.settled().text()
            return
        end = self._stream_end()
        yield from (piece.text for piece in self.feed.read(lambda: end.index) if piece.text)
        end.result()

    async def pieces_async(self) -> AsyncGenerator[str, None]:
        if not self.run.stream:
            mark = self.mark()
            await mark.signal.wait_async(lambda: mark.done)
            yield mark.result().text()
            return
        end = self._stream_end()
        async with aclosing(self.feed.read_async(lambda: end.index)) as pieces:
            async for piece in pieces:
                if piece.text:
                    yield piece.text
        end.result()

    def _stream_end(self) -> Mark:
        body = self.body
        return body.end if body is not None and body.elsewhere else self.mark()

    def usage(self) -> dict[str, int]:
        """Totals over this run, its forks included; waits for what they have queued. Failures do not stop
        it."""
        for member in self.run.live():
            mark = member.mark()
            mark.signal.wait(lambda mark=mark: mark.done)  # type: ignore[misc]
        return self.run.ledger.total()

    async def usage_async(self) -> dict[str, int]:
        for member in self.run.live():
            mark = member.mark()
            await mark.signal.wait_async(lambda mark=mark: mark.done)  # type: ignore[misc]
        return self.run.ledger.total()

    def finish_body(self, error: BaseException | None) -> None:
        """The user's function has returned, or raised `error` (stream mode)."""
        assert self.body is not None
        self.body.error, self.body.done = error, True
        self.put_mark(self.body.end)
        self._changed.notify()

    # -- branches --------------------------------------------------------------------------------------------

    def fork(self, size: int, src: Source | None, budget: Budget | None = None) -> list[Executor]:
        prefix = Prefix(self.mark(), size)
        with self._lock:
            first, self._forks = self._forks, self._forks + size
            children = [
                Executor(
                    self.run,
                    prefix=prefix,
                    role=self._role,
                    variables=dict(self.variables),
                    branch=(*self.branch, first + index),
                    meters=(*self.meters, *(Meter(one) for one in (budget,) if one is not None)),
                )
                for index in range(size)
            ]
            for child in children:
                child._src = src
                self._children.add(child)
        return children

    def join(self, branches: Sequence[Core], mode: str, src: Source | None) -> None:
        """Wait for the branches and take over what they have. Raises the first branch's failure, in order."""
        members = [branch for branch in branches if isinstance(branch, Executor)]
        marks = [branch.mark() for branch in members]
        for mark in marks:
            mark.signal.wait(lambda mark=mark: mark.done)  # type: ignore[misc]
        self._take_over(members, marks, mode, src)

    async def join_async(self, branches: Sequence[Core], mode: str, src: Source | None) -> None:
        members = [branch for branch in branches if isinstance(branch, Executor)]
        marks = [branch.mark() for branch in members]
        for mark in marks:
            await mark.signal.wait_async(lambda mark=mark: mark.done)  # type: ignore[misc]
        self._take_over(members, marks, mode, src)

    def _take_over(
        self, members: Sequence[Executor], marks: Sequence[Mark], mode: str, src: Source | None
    ) -> None:
        for branch in members:
            branch._ended = True
        transcripts = [mark.result() for mark in marks]
        shared = [branch.start for branch in members]
        self.joined.append((self.mark(), list(zip(shared, transcripts, strict=True))))
        if mode == CONCATENATE:
            for begin, end in zip(shared, transcripts, strict=True):
                for node in replayed(begin, end):
                    self.submit(node, src)
            return
        for name, value in taken_over(mode, [_set_by(one) for one in members], self.variables).items():
            self.set(name, value)

    def adopt(self, branch: Core, src: Source | None) -> None:
        assert isinstance(branch, Executor)
        mark = branch.mark()
        mark.signal.wait(lambda: mark.done)
        self._go_on_with(branch, mark, src)

    async def adopt_async(self, branch: Core, src: Source | None) -> None:
        assert isinstance(branch, Executor)
        mark = branch.mark()
        await mark.signal.wait_async(lambda: mark.done)
        self._go_on_with(branch, mark, src)

    def _go_on_with(self, branch: Executor, mark: Mark, src: Source | None) -> None:
        for node in replayed(branch.start, mark.result()):
            self.submit(node, src)
        with self._lock:
            self.variables.update(
                {n: v for n, v in branch.variables.items() if branch.inherited.get(n) is not v}
            )
        self._changed.notify()

    def checkpoint(self) -> Checkpoint:
        mark = self.mark()
        with self._lock:
            return Checkpoint(self, mark, dict(self.variables), self._role)

    def rollback(self, checkpoint: Checkpoint) -> None:
        if checkpoint.owner is not self:
            raise BadProgram("this checkpoint belongs to another state")
        if self.run.stream:
            raise BadProgram("a program that streams cannot go back: what was read of it stays read")
        with self._lock:
            self.variables = dict(checkpoint.variables)
            self._role = checkpoint.role
            self._queue.append(Item(back=checkpoint.mark))
            self._kick()

    def watch(self, signal: Signal) -> Mark:
        mark = Mark(signal)
        self.put_mark(mark)
        return mark

    def cancel(self) -> None:
        """Stop what is under way, here and in the branches; readers get ProgramCancelled. Without effect when
        idle, but for a stream whose function has not returned: what that goes on to add is not done."""
        body = self.body
        if body is not None and body.elsewhere and not body.stop.stopped:
            body.stop.cancel()  # this executor too
            return
        with self._lock:
            children = list(self._children)
        for child in children:
            child.cancel()
        with self._lock:
            # What is queued by now: what is added later is not meant.
            self._cancel_to = self._at + 1 + len(self._queue)
            if not self._active:
                return
        background().call(self._cancel_task)

    def _cancel_task(self) -> None:
        # By now what was to be stopped may have ended, and what was added later have begun.
        if self._task is not None and self._at < self._cancel_to:
            self._task.cancel()

    def _is_cancelled(self, item: Item) -> bool:
        """Whether what is to be done now is not to be done. Text costs nothing: it is said, so that a
        rollback finds its checkpoint."""
        held = self._ahead is not None and bool(self._ahead.held)
        if not held:
            self._waits_since = self._at
        cancelled = self.run.stop.stopped or self._waits_since < self._cancel_to
        return cancelled and (held or isinstance(item.node, Gen | Select))

    # -- on the loop -----------------------------------------------------------------------------------------

    def _kick(self) -> None:
        """Begin the coroutine unless it runs. The lock is held."""
        if self._active:
            return
        waits = self._ahead is not None and bool(self._ahead.held)
        if self._begun and not waits and all(item.node is None for item in self._queue):
            # Nothing to wait for: the marks are reached here and now.
            while self._queue:
                self._at += 1
                self._reach(self._queue.popleft())
            return
        self._active = True
        background().start(self._drain)

    async def _drain(self) -> None:
        self._task = asyncio.current_task()
        while True:
            with self._lock:
                if not self._queue:
                    self._active, self._task = False, None
                    return
                item = self._queue.popleft()
                self._at += 1
            try:
                if not self._begun:
                    await self._begin()
                if self.error is None:
                    if self._ahead is None and isinstance(item.node, _FREE):
                        self._said(item.node, item)
                    else:
                        await self._do(item)
            except BaseException as error:  # noqa: BLE001 - answered to whoever reads; SystemExit too
                self._fail(error, item)
            if self.error is not None:
                for made in (item.variable, item.thought):
                    if made is not None and not made.done:
                        made.fail(self.error)
                if self._ahead is not None:
                    self._ahead.drop(self.error)
            if item.node is None:
                self._reach(item)

    async def _do(self, item: Item) -> None:
        if self._is_cancelled(item):
            raise asyncio.CancelledError
        if self._ahead is not None:
            await self._ahead.fold(item, self)
        elif item.node is not None:
            await self._fold(item.node, item)

    def _reach(self, item: Item) -> None:
        if item.back is not None and self._ahead is not None:
            self._ahead.ahead.forget()
        if item.back is not None and item.back.error is None:
            self.transcript, self.error = item.back.transcript, None
            length = self.transcript.length
            self._scopes = {name: begin for name, begin in self._scopes.items() if begin.length <= length}
        if item.mark is not None:
            body = self.body
            error: BaseException | None = self.error
            if body is not None and body.end is item.mark and body.error is not None:
                error = body.error
            item.mark.reach(self.transcript, error, len(self.feed.pieces))

    async def _begin(self) -> None:
        """Take over what the parent had said at the fork. Raises the parent's failure."""
        assert self._prefix is not None
        self._begun = True
        mark = await self._prefix.reached()
        self.transcript = self.start = mark.transcript
        if self.run.stream:
            self.feed.put(self.transcript.text())
        if mark.error is not None:
            raise mark.error

    async def _fold(self, node: Node, item: Item) -> None:
        match node:
            case Gen():
                await self._generate(node, item)
            case Select():
                await self._select(node, item)
            case _:
                if not self._said(node, item):
                    raise BadProgram(f"{node.label()} cannot be run")

    def _said(self, node: Node, item: Item) -> bool:
        """Do what no backend is needed for; False where one is."""
        match node:
            case Text(text=text):
                self._say(self.transcript.say(text))
            case RoleBegin(role=role):
                self._say(self.transcript.open(role))
            case RoleEnd():
                self._say(self.transcript.close())
            case Media(part=part):
                self._say(self.transcript.show(json.loads(part)))
            case ScopeBegin(name=name):
                self._scopes[name] = self.transcript
            case ScopeEnd(name=name):
                assert item.variable is not None
                since = self._scopes.pop(name, self.start)
                item.variable.settle(self.transcript.text(since))
            case _:
                return False
        return True

    def _say(self, transcript: Transcript) -> None:
        self.transcript = transcript
        if self.run.stream:
            self.feed.put(transcript.plain)

    async def _generate(self, node: Gen, item: Item) -> None:
        assert item.variable is not None
        assert item.ready is not None
        ready = item.ready
        streamed = self.run.stream and ready.n == 1 and not ready.peeks
        told = Telling(node, item.variable, item.thought, self.feed)
        if self._ahead is not None and not ready.peeks and self._ahead.goes_on(self.transcript):
            done = await self._ahead.answer(ready.call(self.transcript.prompt(), None), node, item, self)
        else:
            where = self._where("gen", node.name, item, node.timeout)
            call = ready.call(self.transcript.prompt(), where.timeout)
            done = await self.run.calls.generate(where, call, self._warm, told.piece if streamed else None)
        if streamed:
            told.end()
        splits = [told.split("" if ready.peeks else text) for text in done.texts]
        self._settle(node, item, done, splits, streamed)

    def _settle(
        self, node: Gen, item: Item, done: Completion, splits: Sequence[Split], streamed: bool = False
    ) -> None:
        """Say what was generated, and tell it to the readers."""
        assert item.variable is not None
        variable, one = item.variable, len(splits) == 1
        first, answers = splits[0], [split.answer for split in splits]
        self.transcript = self.transcript.say(
            first.answer, chosen=node.name or "", hidden=first.head, thought=first.reasoning
        )
        if self.run.stream and not streamed:
            self.feed.put(first.answer)
        if item.thought is not None:
            thoughts = [split.reasoning for split in splits]
            item.thought.settle(thoughts[0] if one else thoughts, streamed=streamed)
        variable.raw, variable.meta = answers[0] if one else answers, done.meta
        values = [typed_value(node, text, done.meta) for text in answers]
        variable.settle(values[0] if one else values, done.meta, streamed=streamed)

    async def _select(self, node: Select, item: Item) -> None:
        assert item.variable is not None
        variable, where = item.variable, self._where("select", node.name, item, node.timeout)
        method = METHODS[node.method]
        call = ChoiceCall(self.transcript.prompt(), node.choices, method.unconditional, where.timeout)
        seed = node.seed if node.seed is not None else self.run.calls.derived(where)
        drawn = node.temperature > 0 and seed is None
        found = await self.run.calls.score(where, call, self._warm, drawn)
        try:
            seed = found.meta["draw"] if drawn else seed
            pairs = zip(found.scores, node.choices, strict=True)
            scores = [dataclasses.replace(score, text=option) for score, option in pairs]
            decision = method.decide(scores, node.temperature, seed)
        except ValueError as error:
            raise BackendError(f"the choices cannot be compared: {error}") from error
        text = node.choices[decision.index]
        meta = dict(found.meta) | told(method, scores, decision)
        self.transcript = self.transcript.say(text, chosen=node.name or "")
        if self.run.stream:
            self.feed.put(text)
        variable.settle(text, meta)

    def _where(self, kind: str, name: str | None, item: Item, timeout: float | None) -> Where:
        """This call, and the next step."""
        step, self._step = self._step, self._step + 1
        limit = self.run.timeout if timeout is None else timeout
        return Where(kind, name, self.branch, step, item.src, limit, self.meters)

    async def _warm(self, backend: Backend) -> None:
        if self._prefix is not None:
            await self._prefix.warm(backend)

    def _fail(self, cause: BaseException, item: Item) -> None:
        """Remember the failure, with its place. The first one stays."""
        if self.error is not None:
            return
        place: dict[str, Any] = {
            "program": self.run.program,
            "source": item.src or self._src,
            "node": f"{item.node.label():.200}" if item.node is not None else None,
            "variable": item.variable.name if item.variable is not None else None,
            "backend": self.run.backend.name if self.run.backend is not None else None,
        }
        timeout = getattr(item.node, "timeout", None)
        self.error = placed(cause, place, self.run.timeout if timeout is None else timeout)
        forget_frames(cause)


def _set_by(branch: Executor) -> dict[str, Any]:
    """name -> value of every variable that a branch set itself. All are there already."""
    own = branch.variables.items()
    return {name: found.wait() for name, found in own if branch.inherited.get(name) is not found}


def _fresh(error: BaseException) -> BaseException:
    return again(error) if isinstance(error, ProgramError) else error

"""The executor: one state while it runs; its queue, variables, readers and branches. Knows no `s`, no threads
of user code and no backends.

The user's thread only appends; a coroutine runs on the background loop while there is work and ends when it
is done, so that an idle state, or a dropped one, holds nothing. After a failure later nodes are skipped, and
reading one of their values raises the failure. evaluator.py evaluates the nodes.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from sglang_dsl.budgets import Budget
from sglang_dsl.concurrency.loop import background
from sglang_dsl.concurrency.streams import Signal, Stream, Until, blocking, run_here
from sglang_dsl.conversation.requests import CallRecord
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.errors import BadProgram, InvalidValue, StateClosed, again
from sglang_dsl.interpreter.core import Checkpoint, Core
from sglang_dsl.interpreter.evaluator import SETTERS, Evaluator, item_of, turn_after
from sglang_dsl.interpreter.joins import CONCATENATE, joined_values, replayed
from sglang_dsl.interpreter.metering import Meter
from sglang_dsl.interpreter.run import Body, Item, Mark, Prefix, RunInfo, Variable, WeakRefs, missing
from sglang_dsl.ir import Gen, LoopBegin, LoopEnd, Node, ScopeEnd, Select, Seq, Source, Tools, caller, flatten
from sglang_dsl.ir.passes import merge_text, role_after
from sglang_dsl.tool_use.offers import NOTHING, Offer, offer_after
from sglang_dsl.views.snapshot import ForkSnapshot, Snapshot

_OFFERING = frozenset({Tools, LoopBegin, LoopEnd})


class Executor:
    """Methods are for the user's threads unless they begin with _. `body`: the user's function, where that
    runs beside the reader."""

    __slots__ = (
        "__weakref__", "_active", "_at", "_cancel_to", "_cancelled_at", "_changed", "_children", "_ended",
        "_evaluator", "_forks", "_joined", "_lead", "_lock", "_offer", "_queue", "_role", "_steps", "_task",
        "_waits_since", "body", "branch", "inherited", "run", "variables",
    )  # fmt: skip

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
        src: Source | None = None,
        offer: Offer = NOTHING,
    ) -> None:
        self.run, self.branch, self.body = run, branch, body
        self._evaluator = Evaluator(run, branch, run.meters if meters is None else meters, prefix, src)
        self.variables = variables if variables is not None else {}
        self.inherited: dict[str, Variable] = dict(self.variables) if self.variables else {}
        self._joined: list[tuple[Mark, tuple[Snapshot, ...]]] = []  # branches as they were then
        self._role, self._ended, self._offer = role, False, offer
        self._forks, self._steps = 0, 0
        self._changed = Signal()
        self._children: WeakRefs[Executor] = WeakRefs()
        self._active = False
        # Constant text is held here and goes into the queue with the next node.
        self._lead: list[Node] = []
        self._queue: deque[Item] = deque()
        self._lock = threading.Lock()
        self._task: asyncio.Task[Any] | None = None
        # Which item of the queue is being done, counted from 0; those before `_cancel_to` are cancelled.
        self._at, self._cancel_to, self._waits_since = -1, 0, 0
        self._cancelled_at = -1  # the item that was cancelled last
        run.enter(self)

    @property
    def program(self) -> str:
        return self.run.program

    @property
    def index(self) -> int | None:
        return None if self.branch else self.run.index

    @property
    def ret_value(self) -> Any:
        return None if self.branch else self.run.ret_value

    @property
    def body_error(self) -> BaseException | None:
        return None if self.body is None else self.body.error

    def fault(self) -> BaseException | None:
        for name, variable in list(self.variables.items()):
            if isinstance(variable.error, InvalidValue) and self.inherited.get(name) is not variable:
                return again(variable.error)
        return None

    @property
    def output(self) -> Stream:
        return self._evaluator.output

    # -- adding ----------------------------------------------------------------------------------------------

    def submit(self, node: Node, src: Source | None = None) -> None:
        """Queue `node`, added at `src` (or the user's line). Raises BadProgram, NoBackend, StateClosed."""
        if self._ended:
            raise StateClosed(f"this branch of {self.run.program!r} was joined; add to its parent instead")
        leaves = node.nodes if type(node) is Seq else (node,)
        state, offer, offers = turn_after(leaves, self._role), self._offer, False
        if state is None:
            leaves = tuple(merge_text(flatten(node)))
            kinds = set(map(type, leaves))
            state = role_after(leaves, self._role), not SETTERS.isdisjoint(kinds)
            offers = not _OFFERING.isdisjoint(kinds)
        role, sets = state
        held_back = self._evaluator.ahead is not None
        # First, because it may raise: then nothing was added.
        items: list[Item | None] = []
        if sets or held_back or offers:
            if src is None:
                src = caller()
            for leaf in leaves:
                if offers:
                    offer = offer_after(offer, leaf)
                if type(leaf) in SETTERS:
                    items.append(item_of(leaf, src, self.run, self._steps, offer))
                    self._steps += type(leaf) is not ScopeEnd
                else:
                    items.append(None)
        with self._lock:
            self._role, self._offer = role, offer
            for leaf, item in zip(leaves, items or [None] * len(leaves), strict=True):
                if item is not None:
                    # Readers wait for the setter that was queued last.
                    if (variable := item.variable) is not None and variable.name is not None:
                        self.variables[variable.name] = variable
                    if (reasoning := item.reasoning) is not None and reasoning.name is not None:
                        self.variables[reasoning.name] = reasoning
                    self._put(item)
                elif held_back:
                    self._put(Item(leaf, src))
                else:
                    self._lead.append(leaf)
            if self._lead and self.run.stream:  # it may have a reader
                self._put(Item())
            if sets or self.run.stream:
                self._kick()
        if sets:
            self._changed.notify()
            if self.run.inline:
                run_here(self.mark().wait(blocking))

    def set(self, name: str, value: Any) -> None:
        variable = Variable(name)
        variable.settle(value)
        with self._lock:
            self.variables[name] = variable
        self._changed.notify()

    def open_role(self) -> str | None:
        return self._role

    def mark(self) -> Mark:
        """A mark after everything queued so far; reached at once if nothing is running."""
        mark = Mark(self._evaluator.output if self.run.stream else None)
        self.put_mark(mark)
        return mark

    def put_mark(self, mark: Mark) -> None:
        with self._lock:
            self._put(Item(mark=mark))
            self._kick()

    def so_far(self) -> Transcript:
        return self._evaluator.transcript

    def _put(self, item: Item) -> None:
        """Add to the queue, behind the text before it. The lock is held."""
        if self._lead:
            item.lead, self._lead = tuple(self._lead), []
        self._queue.append(item)

    def _cancel_task(self) -> None:
        # By now the cancelled item may have ended, and a later one have begun. Once: a second cancellation
        # would interrupt the cleanup of the first, such as the closing of a connection.
        if self._task is not None and self._cancelled_at < self._at < self._cancel_to:
            self._cancelled_at = self._at
            self._task.cancel()

    def _is_cancelled(self, item: Item) -> bool:
        """Whether an item is not to be evaluated. Text costs nothing and is added all the same, so that a
        rollback finds its checkpoint."""
        ahead = self._evaluator.ahead
        held = ahead is not None and bool(ahead.held)
        if not held:
            self._waits_since = self._at
        if not self.run.stop.stopped and self._waits_since >= self._cancel_to:
            return False
        return held or isinstance(item.node, Gen | Select)

    # -- reading ---------------------------------------------------------------------------------------------

    def known(self, name: str) -> bool:
        return name in self.variables

    def names(self) -> tuple[str, ...]:
        return tuple(self.variables)

    @property
    def beside(self) -> bool:
        return self.body is not None and self.body.elsewhere

    async def appears(self, name: str, until: Until) -> None:
        body = self.body
        if body is not None and body.elsewhere:
            await until(self._changed, lambda: name in self.variables or body.done)

    def find(self, name: str) -> Variable:
        """The last queued setter of `name`, to be read: if its turn is held back, it is requested now. Raises
        MissingVariable, or what stopped the body."""
        variable = self.variables.get(name)
        if variable is not None:
            if self._evaluator.ahead is not None and not variable.done:
                self.mark()
            return variable
        error = self.body_error or self._evaluator.error
        if error is not None:
            raise again(error)
        raise missing(name, list(self.variables), self.program)

    async def settled(self, until: Until) -> Transcript:
        """The text with all that was queued so far; waits. In a stream, waits for the body too."""
        body = self.body
        if body is not None and body.elsewhere:
            await body.end.wait(until)
        transcript = await self.mark().wait(until)
        if body is not None and body.error is not None:
            raise again(body.error)
        return transcript

    def snapshot(self, timeout_s: float | None = 0) -> Snapshot:
        """The state at this moment; waits for what is queued, for at most `timeout_s` (None: to its end), and
        not at all on the language's own loop."""
        body = self.body
        end = body.end if body is not None and body.elsewhere else self.mark()
        if timeout_s != 0 and not background().here:
            end.signal.wait_for(lambda: end.done, timeout_s)
        return self._seen(self.run.ledger.records, lambda: self.run.ledger.called)

    def _seen(
        self,
        calls: Callable[[], tuple[CallRecord, ...]] = tuple,
        called: Callable[[], Mapping[str, int]] = dict,
    ) -> Snapshot:
        with self._lock:
            running = self._active or (self.body is not None and not self.body.done)
            variables, joined = list(self.variables.items()), list(self._joined)
            children = [child for child in self._children.live() if not child._ended]
        # Consistent if no variable was settled meanwhile. The calls are read last: a call is recorded before
        # its text is added and its variable set.
        while True:
            # Before the transcript, which gets constant text first.
            streamed = "".join(piece.text for piece in self.output.so_far()) if running else ""
            done = [variable.done for _, variable in variables]
            snapshots = {name: variable.snapshot() for name, variable in variables}
            transcript = self._evaluator.transcript
            error = self.body_error or self._evaluator.error or self.fault()
            if done == [variable.done for _, variable in variables]:
                break
        forks = [ForkSnapshot(branches, True, _at(mark)) for mark, branches in joined]
        children.sort(key=lambda child: child.branch)
        for prefix, group in itertools.groupby(children, lambda child: child._evaluator.prefix):
            assert prefix is not None
            forks.append(ForkSnapshot(tuple(child._seen() for child in group), False, _at(prefix.mark)))
        start, pending = self._evaluator.start, streamed[transcript.length :]
        return Snapshot(
            self.program, transcript, start, running, error, snapshots, tuple(forks), calls(), self.branch,
            pending, called(),
        )  # fmt: skip

    async def pieces(self, until: Until) -> AsyncGenerator[str, None]:
        """The whole text as it is generated; in one piece if the run does not stream. Raises its error."""
        if not self.run.stream:
            yield (await self.settled(until)).text()
            return
        body = self.body
        end = body.end if body is not None and body.elsewhere else self.mark()
        async with aclosing(self.output.read(lambda: end.index, until)) as pieces:
            async for piece in pieces:
                if piece.text:
                    yield piece.text
        end.result()
        if self.body_error is not None:
            raise again(self.body_error)

    async def usage(self, until: Until) -> dict[str, int]:
        return await self.run.usage(until)

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
                    offer=self._offer,
                    variables=dict(self.variables),
                    branch=(*self.branch, first + index),
                    meters=(*self._evaluator.meters, *(Meter(one) for one in (budget,) if one is not None)),
                    src=src,
                )
                for index in range(size)
            ]
            for child in children:
                self._children.add(child)
        return children

    async def join(self, branches: Sequence[Core], mode: str, src: Source | None, until: Until) -> None:
        """Wait for the branches and add their results. Raises the first branch's failure, in order."""
        members = [branch for branch in branches if isinstance(branch, Executor)]
        marks = [branch.mark() for branch in members]
        for mark in marks:
            await mark.reached(until)
        for branch in members:
            branch._ended = True
        transcripts = [mark.result() for mark in marks]
        seen = tuple(branch._seen() for branch in members)
        mark = self.mark()
        with self._lock:
            self._joined.append((mark, seen))
        if mode == CONCATENATE:
            for branch, end in zip(members, transcripts, strict=True):
                for node in replayed(branch._evaluator.start, end):
                    self.submit(node, src)
            return
        values = [{name: one.result() for name, one in _set_here(member).items()} for member in members]
        for name, value in joined_values(mode, values, self.variables).items():
            self.set(name, value)

    async def adopt(self, branch: Core, src: Source | None, until: Until) -> None:
        assert isinstance(branch, Executor)
        mark = branch.mark()
        await mark.reached(until)
        for node in replayed(branch._evaluator.start, mark.result()):
            self.submit(node, src)
        with self._lock:
            self._offer = branch._offer
            self.variables.update(_set_here(branch))
        self._changed.notify()

    def checkpoint(self) -> Checkpoint:
        mark = self.mark()
        with self._lock:
            return Checkpoint(self, mark, dict(self.variables), self._role, self._offer)

    def rollback(self, checkpoint: Checkpoint) -> None:
        if checkpoint.owner is not self:
            raise BadProgram("this checkpoint belongs to another state")
        if self.run.stream:
            raise BadProgram(
                "a program that streams cannot go back, because its text may already have been read"
            )
        with self._lock:
            self.variables = dict(checkpoint.variables)
            self._role, self._offer = checkpoint.role, checkpoint.offer
            self._put(Item(back=checkpoint.mark))
            self._kick()

    def watch(self, signal: Signal) -> Mark:
        mark = Mark(signal)
        self.put_mark(mark)
        return mark

    def cancel(self) -> None:
        """Stop what is running, here and in the branches; readers get ProgramCancelled. No effect when idle,
        except for a stream whose function has not returned: what it adds later is not evaluated."""
        body = self.body
        if body is not None and body.elsewhere and not body.stop.stopped:
            body.stop.cancel()  # this executor too
            return
        with self._lock:
            children = self._children.live()
        for child in children:
            child.cancel()
        with self._lock:
            self._cancel_to = self._at + 1 + len(self._queue)  # nothing that is added later
            active = self._active
        if active:
            background().call(self._cancel_task)

    # -- on the loop -----------------------------------------------------------------------------------------

    def _kick(self) -> None:
        """Begin the coroutine unless it runs. The lock is held."""
        if self._active:
            return
        evaluator, queue = self._evaluator, self._queue
        waits = evaluator.ahead is not None and bool(evaluator.ahead.held)
        if evaluator.begun and not waits and all(item.node is None for item in queue):
            # Nothing to wait for: text is added and marks are reached here and now.
            while queue:
                self._at += 1
                item = queue.popleft()
                if item.lead and evaluator.error is None:
                    evaluator.add(item.lead)
                self._reach(item)
            return
        self._active = True
        background().start(self._drain)

    async def _drain(self) -> None:
        self._task = asyncio.current_task()
        evaluator, queue, lock = self._evaluator, self._queue, self._lock
        while True:
            with lock:
                if not queue:
                    self._active, self._task = False, None
                    # From Python 3.13 on, the frames of an error's traceback hold this one even after its
                    # end: keeping the error must not keep the state.
                    del self, evaluator
                    return
                item = queue.popleft()
                self._at += 1
            try:
                if not evaluator.begun:
                    await evaluator.begin()
                if item.lead and evaluator.error is None:
                    evaluator.add(item.lead)
                if evaluator.error is None:
                    if self._is_cancelled(item):
                        raise asyncio.CancelledError
                    if evaluator.ahead is not None:
                        await evaluator.ahead.evaluate(item, evaluator)
                    elif item.node is not None:
                        await evaluator.evaluate(item.node, item)
            except asyncio.CancelledError as error:
                evaluator.cancelled(error, item)
            except BaseException as error:  # noqa: BLE001 - raised where it is read; SystemExit too
                evaluator.fail(error, item)
            if evaluator.error is not None:
                self._skip(item, evaluator.error)
            if item.node is not None:
                continue
            with lock:
                # Readers woken by the last mark find the state at rest.
                if at_rest := not queue:
                    self._active, self._task = False, None
                self._reach(item)
            if at_rest:
                del self, evaluator
                return

    def _skip(self, item: Item, error: BaseException) -> None:
        """Fail the variables of an item that is not evaluated."""
        for variable in (item.variable, item.reasoning):
            if variable is not None and not variable.done:
                variable.fail(error)
        if self._evaluator.ahead is not None:
            self._evaluator.ahead.drop(error)

    def _reach(self, item: Item) -> None:
        evaluator = self._evaluator
        if item.back is not None:
            if evaluator.ahead is not None:
                evaluator.ahead.ahead.forget()
            if item.back.error is None:
                evaluator.go_back(item.back.transcript)
        if item.mark is not None:
            body = self.body
            error: BaseException | None = evaluator.error
            if body is not None and body.end is item.mark and body.error is not None:
                error = body.error
            item.mark.reach(evaluator.transcript, error, len(evaluator.output.pieces))


def _at(mark: Mark) -> Transcript | None:
    """The text at `mark`, if it is reached."""
    return mark.transcript if mark.done else None


def _set_here(branch: Executor) -> dict[str, Variable]:
    """The variables that a branch set itself."""
    inherited = branch.inherited
    return {name: one for name, one in branch.variables.items() if inherited.get(name) is not one}

"""The executor: one state while it runs; its queue, its variables, who waits for them, and its branches.

Knows no `s`, no threads of user code and no backends.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from sglang_dsl.budgets import Budget
from sglang_dsl.concurrency.loop import background
from sglang_dsl.concurrency.streams import Signal, Stream, Until, blocking, run_here
from sglang_dsl.conversation.requests import CallRecord
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.errors import BadProgram, InvalidValue, NoBackend, StateClosed, again
from sglang_dsl.interpreter.core import Checkpoint, Core
from sglang_dsl.interpreter.evaluator import Evaluator
from sglang_dsl.interpreter.joins import CONCATENATE, replayed, taken_over
from sglang_dsl.interpreter.lower import lower
from sglang_dsl.interpreter.metering import Meter
from sglang_dsl.interpreter.queue import Queue
from sglang_dsl.interpreter.run import Body, Item, Prefix, RunInfo, WeakRefs
from sglang_dsl.interpreter.variables import Mark, Variable, missing
from sglang_dsl.ir import Gen, LoopBegin, LoopEnd, Node, ScopeEnd, Select, Seq, Source, Tools, caller, flatten
from sglang_dsl.ir.passes import merge_text, role_after, sets, simple
from sglang_dsl.tool_use.offers import NOTHING, Offer, offer_after
from sglang_dsl.views.snapshot import ForkSnapshot, Snapshot

_SETTERS = frozenset({Gen, Select, ScopeEnd})
_OFFERING = frozenset({Tools, LoopBegin, LoopEnd})


class Executor(Queue):
    """Methods are for the user's threads unless they begin with _."""

    __slots__ = (
        "__weakref__", "_changed", "_children", "_ended", "_forks", "_joined", "_offer", "_role", "_steps",
        "branch", "inherited", "variables",
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
        own = Evaluator(run, branch, run.meters if meters is None else meters, prefix, src)
        super().__init__(run, own, body)
        self.branch = branch
        self.variables = variables if variables is not None else {}
        self.inherited: dict[str, Variable] = dict(self.variables) if self.variables else {}
        # Where branches were joined, and each one as it was then.
        self._joined: list[tuple[Mark, tuple[Snapshot, ...]]] = []
        self._role, self._ended, self._offer = role, False, offer
        self._forks, self._steps = 0, 0
        self._changed = Signal()
        self._children: WeakRefs[Executor] = WeakRefs()
        run.enter(self)

    @property
    def program(self) -> str:
        return self.run.program

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
        """What this state says, in pieces, where the run streams."""
        return self._evaluator.output

    @property
    def start(self) -> Transcript:
        """What had been said when this branch began."""
        return self._evaluator.start

    @property
    def meters(self) -> tuple[Meter, ...]:
        """Whose budgets its calls are charged to."""
        return self._evaluator.meters

    # -- adding ----------------------------------------------------------------------------------------------

    def submit(self, node: Node, src: Source | None = None) -> None:
        """Queue `node`, added at `src`; by default where the user's code stands. Raises BadProgram, NoBackend
        or StateClosed at once where it cannot be run at all."""
        if self._ended:
            raise StateClosed(f"this branch of {self.run.program!r} was joined; add to its parent instead")
        leaves = node.nodes if type(node) is Seq else (node,)
        seen, offer, offers = simple(leaves, self._role), self._offer, False
        if seen is None:
            leaves = tuple(merge_text(flatten(node)))
            kinds = set(map(type, leaves))
            seen = role_after(leaves, self._role), not _SETTERS.isdisjoint(kinds)
            offers = not _OFFERING.isdisjoint(kinds)
        role, waited_for = seen
        held_back = self._evaluator.ahead is not None
        # First, because it may raise: then nothing was added.
        items: list[Item | None] = []
        if waited_for or held_back or offers:
            if src is None:
                src = caller()
            for leaf in leaves:
                if offers:
                    offer = offer_after(offer, leaf)
                items.append(self._item(leaf, src, offer) if type(leaf) in _SETTERS else None)
        if not waited_for and not held_back:
            with self._lock:
                self._role, self._offer = role, offer
                self._lead.extend(leaves)
                if self.run.stream:  # somebody may be looking at it
                    self._put(Item())
                    self._kick()
            return
        with self._lock:
            self._role, self._offer = role, offer
            for leaf, item in zip(leaves, items, strict=True):
                if item is not None:
                    # The last queued setter is the one that readers wait for.
                    if (made := item.variable) is not None and made.name is not None:
                        self.variables[made.name] = made
                    if (reasoning := item.reasoning) is not None and reasoning.name is not None:
                        self.variables[reasoning.name] = reasoning
                    self._put(item)
                elif held_back:
                    self._put(Item(leaf, src))
                else:
                    self._lead.append(leaf)
            if self._lead and self.run.stream:
                self._put(Item())
            if waited_for:
                self._kick()
        if waited_for:
            self._changed.notify()
            if self.run.inline:
                run_here(self.mark().wait(blocking))

    def _item(self, leaf: Node, src: Source | None, offer: Offer) -> Item:
        """What sets a variable, as it is queued. Raises BadProgram, NoBackend."""
        step, self._steps = self._steps, self._steps + (type(leaf) is not ScopeEnd)
        if type(leaf) is Gen:
            if self.run.backend is None:
                self._need_backend()
            reasoning = None
            if leaf.reasoning is not None and leaf.name is not None:
                reasoning = Variable(f"{leaf.name}_reasoning_content")
            ready = lower(leaf, self.run.defaults)
            variable = Variable(leaf.name, leaf.typed)
            if offer is not NOTHING and (offer.runners or offer.loop is not None):
                return Item(leaf, src, variable, None, None, reasoning, ready, (), step, offer)
            return Item(leaf, src, variable, None, None, reasoning, ready, (), step)
        if isinstance(leaf, Select):
            self._need_backend()
        return Item(leaf, src, Variable(sets(leaf)), step=step)

    def _need_backend(self) -> None:
        """Raises NoBackend."""
        if self.run.backend is None and self.run.record is None:
            raise NoBackend(
                f"program {self.run.program!r} generates but has no backend: pass backend=..., "
                "or call set_default_backend(...)"
            )

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

    @property
    def beside(self) -> bool:
        return self.body is not None and self.body.elsewhere

    async def appears(self, name: str, until: Until) -> None:
        body = self.body
        if body is not None and body.elsewhere:
            await until(self._changed, lambda: name in self.variables or body.done)

    def find(self, name: str) -> Variable:
        """The last queued setter of `name`, which somebody is going to read: what is held back for the rest
        of its turn is asked for now. Raises MissingVariable, or what stopped the body."""
        variable = self.variables.get(name)
        if variable is not None:
            if self._evaluator.ahead is not None and not variable.done:
                self.mark()
            return variable
        if self.body is not None and self.body.error is not None:
            raise again(self.body.error)
        if self._evaluator.error is not None:
            raise again(self._evaluator.error)
        raise missing(name, list(self.variables), self.program)

    async def settled(self, until: Until) -> Transcript:
        """What was said by all that was queued so far; waits. In a stream, waits for the body too."""
        body = self.body
        if body is not None and body.elsewhere:
            await body.end.wait(until)
        transcript = await self.mark().wait(until)
        if body is not None and body.error is not None:
            raise again(body.error)
        return transcript

    def snapshot(self, timeout_s: float | None = 0) -> Snapshot:
        """How it stands; waits for what is queued, for at most `timeout_s` (None: to its end), and not at all
        on the language's own loop."""
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
        # A variable is done once and for all: where none became so while this looked, it was one moment. The
        # calls last, as a call is recorded before its text is said and its variable set.
        while True:
            # Before the transcript, where constant text stands first.
            heard = "".join(piece.text for piece in self.output.so_far()) if running else ""
            done = [variable.done for _, variable in variables]
            seen = {name: variable.snapshot() for name, variable in variables}
            said, error = self._evaluator.transcript, self.body_error or self._evaluator.error or self.fault()
            if done == [variable.done for _, variable in variables]:
                break
        forks = [ForkSnapshot(branches, True, _at(mark)) for mark, branches in joined]
        children.sort(key=lambda child: child.branch)
        for prefix, group in itertools.groupby(children, lambda child: child._evaluator.prefix):
            assert prefix is not None
            forks.append(ForkSnapshot(tuple(child._seen() for child in group), False, _at(prefix.mark)))
        return Snapshot(
            self.program,
            said,
            self.start,
            running,
            error,
            seen,
            tuple(forks),
            calls(),
            self.branch,
            heard[said.length :],
            called(),
        )

    async def pieces(self, until: Until) -> AsyncGenerator[str, None]:
        """The whole text as it comes; in one piece where the run does not stream. Raises what went wrong."""
        if not self.run.stream:
            yield (await self.settled(until)).text()
            return
        body = self.body
        end = body.end if body is not None and body.elsewhere else self.mark()
        async with aclosing(self.output.read(lambda: end.index, until)) as pieces:
            async for piece in pieces:
                if piece.text:
                    yield piece.text
        # What went wrong before the end, and what the body raised, whenever that was.
        end.result()
        if (error := self.body_error) is not None:
            raise again(error)

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
                    meters=(*self.meters, *(Meter(one) for one in (budget,) if one is not None)),
                    src=src,
                )
                for index in range(size)
            ]
            for child in children:
                self._children.add(child)
        return children

    async def join(self, branches: Sequence[Core], mode: str, src: Source | None, until: Until) -> None:
        """Wait for the branches and take over what they have. Raises the first branch's failure, in order."""
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
                for node in replayed(branch.start, end):
                    self.submit(node, src)
            return
        for name, value in taken_over(mode, [_set_by(one) for one in members], self.variables).items():
            self.set(name, value)

    async def adopt(self, branch: Core, src: Source | None, until: Until) -> None:
        assert isinstance(branch, Executor)
        mark = branch.mark()
        await mark.reached(until)
        for node in replayed(branch.start, mark.result()):
            self.submit(node, src)
        with self._lock:
            self._offer = branch._offer
            self.variables.update(
                {n: v for n, v in branch.variables.items() if branch.inherited.get(n) is not v}
            )
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
        """Stop what is under way, here and in the branches; readers get ProgramCancelled. Without effect when
        idle, but for a stream whose function has not returned: what that goes on to add is not done."""
        body = self.body
        if body is not None and body.elsewhere and not body.stop.stopped:
            body.stop.cancel()  # this executor too
            return
        with self._lock:
            children = self._children.live()
        for child in children:
            child.cancel()
        self._cancel_queued()


def _at(mark: Mark) -> Transcript | None:
    """What had been said where `mark` stands, where that is known by now."""
    return mark.transcript if mark.done else None


def _set_by(branch: Executor) -> dict[str, Any]:
    """name -> value of every variable that a branch set itself. All are there already."""
    own = branch.variables.items()
    return {name: found.result() for name, found in own if branch.inherited.get(name) is not found}

"""Evaluator: the text of one state so far, and how one more node is evaluated, by a backend if it needs one.

Used by one coroutine at a time, on the language's loop; constant text also by any thread that holds the
state's lock while nothing runs. Knows no queue, no readers and no particular backend.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from runtime.protocol.messages import ToolCall
from sglang_dsl.backends.base import Backend
from sglang_dsl.choices import METHODS, report
from sglang_dsl.concurrency.streams import Stream
from sglang_dsl.conversation.requests import Call, ChoiceCall, ChoiceScores, Completion
from sglang_dsl.conversation.transcript import Generation, Transcript
from sglang_dsl.errors import (
    BackendError,
    BadProgram,
    InvalidValue,
    NoBackend,
    ProgramError,
    Unsupported,
    warn,
)
from sglang_dsl.errors.tracebacks import forget_frames
from sglang_dsl.interpreter.calls import Before, CallContext, about
from sglang_dsl.interpreter.lower import lower, of_sample, typed_value, was_cut
from sglang_dsl.interpreter.metering import Meter
from sglang_dsl.interpreter.replies.texts import ReasoningStream, Split, corrected
from sglang_dsl.interpreter.replies.tool_loop import answer, may_call
from sglang_dsl.interpreter.run import (
    Item,
    Prefix,
    RunInfo,
    Variable,
    located,
)
from sglang_dsl.interpreter.speculation import Speculation
from sglang_dsl.ir import (
    Calls,
    Gen,
    LoopBegin,
    LoopEnd,
    Media,
    Node,
    RoleBegin,
    RoleEnd,
    Sampling,
    ScopeBegin,
    ScopeEnd,
    Select,
    Source,
    Text,
    Tools,
)
from sglang_dsl.ir.syntax import KEPT, marked
from sglang_dsl.tool_use.offers import NOTHING, Offer

SETTERS = frozenset({Gen, Select, ScopeEnd})
_OTHERS = frozenset({ScopeBegin, Media})
_LOWERED: dict[tuple[int, int], tuple[Gen, Sampling, Call]] = {}
_MOST_LOWERED = 4096


def turn_after(leaves: Sequence[Node], role: str | None) -> tuple[str | None, bool] | None:
    """The turn that is open after `leaves`, and whether one of them sets a variable. None unless they are as
    most are: text that needs no merging, turns that begin and end in order."""
    before: type[Node] | None = None
    setter = False
    for leaf in leaves:
        kind: Any = type(leaf)
        if kind is Text:
            if before is Text or not leaf.text:  # type: ignore[attr-defined]
                return None
        elif kind is RoleBegin:
            if role is not None:
                return None
            role = leaf.role  # type: ignore[attr-defined]
        elif kind is RoleEnd:
            if leaf.role != role:  # type: ignore[attr-defined]
                return None
            role = None
        elif kind in SETTERS:
            setter = True
        elif kind not in _OTHERS:
            return None
        before = kind
    return role, setter


def with_node(at: Transcript, node: Any) -> Transcript:
    """`at` with the text of a node that needs no backend. Raises BadProgram for other nodes."""
    kind = type(node)
    if kind is Text:
        return at.say(node.text)
    if kind is RoleBegin:
        return at.open(node.role)
    if kind is RoleEnd:
        return at.close()
    if kind is Media:
        return at.show(json.loads(node.part))
    if kind is Tools:
        return at.offer(tuple(map(json.loads, node.tools)))
    if kind is Calls:
        return at.call(tuple(ToolCall(name, arguments, id) for id, name, arguments in node.calls))
    raise BadProgram(f"{node.label()} cannot be run")


def item_of(leaf: Node, src: Source | None, run: RunInfo, step: int, offer: Offer) -> Item:
    """The queue's entry for a node that sets a variable. Raises BadProgram, NoBackend."""
    if not isinstance(leaf, ScopeEnd) and run.backend is None and run.record is None:
        raise NoBackend(
            f"program {run.program!r} generates but has no backend: pass backend=..., "
            "or call set_default_backend(...)"
        )
    if not isinstance(leaf, Gen):
        assert isinstance(leaf, Select | ScopeEnd)
        return Item(leaf, src, Variable(leaf.name), step=step)
    reasoning = None
    if leaf.reasoning is not None and leaf.name is not None:
        reasoning = Variable(f"{leaf.name}_reasoning_content")
    # A program's lines give the same nodes each time; hashing their 40 fields for lower() takes a tenth of a
    # gen.
    key = (id(leaf), id(run.defaults))  # unique, as both are kept
    known = _LOWERED.get(key)
    if known is None or known[0] is not leaf or known[1] is not run.defaults:
        if len(_LOWERED) >= _MOST_LOWERED:
            _LOWERED.clear()
        known = _LOWERED[key] = (leaf, run.defaults, lower(leaf, run.defaults))
    call, variable = known[2], Variable(leaf.name, leaf.typed)
    may_call = offer is not NOTHING and (offer.runners or offer.loop is not None)
    return Item(leaf, src, variable, None, None, reasoning, call, (), step, offer if may_call else None)


class Evaluator:
    """`start`: the text at which this branch began; `begun`: whether it is known. `error`: the first failure;
    nothing is evaluated after it. `src`: where the branch was forked."""

    __slots__ = (
        "_caches", "_scopes", "_sent", "_step", "ahead", "begun", "branch", "error", "meters", "output",
        "prefix", "run", "src", "start", "transcript",
    )  # fmt: skip

    def __init__(
        self,
        run: RunInfo,
        branch: tuple[int, ...],
        meters: tuple[Meter, ...],
        prefix: Prefix | None,
        src: Source | None,
    ) -> None:
        self.run, self.branch, self.meters, self.src = run, branch, meters, src
        self.transcript = self.start = Transcript.EMPTY
        self.error: BaseException | None = None
        self.output = Stream()
        self.ahead = None if run.speculation is None else Speculation.of(run.speculation, run.backend)
        self.begun = prefix is None
        self.prefix = prefix
        # The open variable scopes and their starts, the innermost last; one name may be open twice.
        self._scopes: tuple[tuple[str, Transcript], ...] = ()
        self._step = 0
        self._caches = run.backend is not None and not run.backend.speculates
        self._sent = 0  # characters that the backend has seen

    async def begin(self) -> None:
        """Start with the parent's text at the fork. Raises the parent's failure."""
        assert self.prefix is not None
        self.begun = True
        mark = await self.prefix.reached()
        self.transcript = self.start = mark.transcript
        self._sent = self.start.length
        if self.run.stream:
            self.output.put(self.transcript.text())
        if mark.error is not None:
            raise mark.error

    def go_back(self, transcript: Transcript) -> None:
        """Forget text and errors since `transcript`."""
        self.transcript, self.error = transcript, None
        self._scopes = tuple(one for one in self._scopes if one[1].length <= transcript.length)

    def add(self, nodes: Iterable[Any]) -> None:
        """Evaluate nodes that need no backend and set no variable. A failure is kept."""
        streams = self.run.stream
        for node in nodes:
            try:
                kind, at = type(node), self.transcript
                # The two most frequent kinds are not worth another call.
                if kind is RoleBegin:
                    at = at.open(node.role)
                elif kind is RoleEnd:
                    at = at.close()
                elif kind is ScopeBegin:
                    self._scopes = (*self._scopes, (node.name, at))
                    continue
                elif kind is LoopBegin or kind is LoopEnd:
                    continue  # read by the queue
                else:
                    if kind is Text and KEPT and marked(node.text):
                        raise BadProgram(
                            "a formatted text that contains nodes was put into Text(...); add the text itself"
                        )
                    if kind is Tools:
                        self._check_tools(node)
                    at = with_node(at, node)
                self.transcript = at
            except Exception as error:  # noqa: BLE001 - raised where it is read
                self.fail(error, Item(node, getattr(node, "src", None)))
                return
            if streams:
                self.output.put(at.plain)

    def advance(self, transcript: Transcript) -> None:
        """Go on with `transcript`, which the backend knows; streams get what is new in it."""
        if self.run.stream:
            self.output.put(transcript.text(self.transcript))
        self.transcript = transcript
        self._sent = transcript.length

    def _check_tools(self, node: Tools) -> None:
        """Raises Unsupported."""
        backend = self.run.backend
        if node.tools and backend is not None and not backend.calls_tools:
            raise Unsupported(f"{backend.name} does not support tools", backend=backend.name)

    def evaluate(self, node: Node, item: Item) -> Coroutine[Any, Any, None]:
        """Evaluate any node. Raises its error."""
        if isinstance(node, Gen):
            return self._generate(node, item)
        if isinstance(node, Select):
            return self._select(node, item)
        return self._at_once(node, item)

    async def _at_once(self, node: Node, item: Item) -> None:
        if not isinstance(node, ScopeEnd):
            self.add((node,))
            return
        assert item.variable is not None
        item.variable.settle(self.transcript.text(self._end_scope(node.name)))

    def _end_scope(self, name: str) -> Transcript:
        """Close the innermost scope of this name; returns its start."""
        for at in range(len(self._scopes) - 1, -1, -1):
            if self._scopes[at][0] == name:
                begin = self._scopes[at][1]
                self._scopes = self._scopes[:at] + self._scopes[at + 1 :]
                return begin
        return self.start

    async def _generate(self, node: Gen, item: Item) -> None:
        assert item.variable is not None
        assert item.ready is not None
        ready, run = item.ready, self.run
        ahead = self.ahead
        if item.offer is not None:
            if may_call(node, ready, item.offer):
                if ahead is not None:
                    ahead.ahead.forget()
                await answer(self, node, item, ready, item.offer)
                return
            ready = replace(ready, tool_choice="none")
        if node.retries and not ready.peeks:
            await self._until_it_fits(node, item, ready)
            return
        if ahead is not None and not ready.peeks and ahead.goes_on(self.transcript):
            done = await ahead.answer(replace(ready, prompt=self.transcript.prompt()), node, item, self)
            self.settle(node, item, done, ReasoningStream.splits(node, done))
            return
        context = self.context("gen", node.name, item, node.timeout)
        call = replace(ready, prompt=self.transcript.prompt(), timeout=context.timeout)
        if not run.stream or ready.n != 1 or ready.peeks:
            done = await run.calls.generate(context, call, self.before)
            if ready.peeks:
                done = Completion(("",) * len(done.texts), done.meta)
            if len(done.texts) == 1 and node.reasoning is None:
                self._settle_one(node, item, done.texts[0], done.meta)
                return
            self.settle(node, item, done, ReasoningStream.splits(node, done))
            return
        split = ReasoningStream(node, item.variable, item.reasoning, self.output)
        done = await run.calls.generate(context, call, self.before, split.piece)
        split.end()
        self.settle(node, item, done, ReasoningStream.splits(node, done), streamed=True)

    async def _until_it_fits(self, node: Gen, item: Item, ready: Call) -> None:
        """A generation with retries: requested again, with the error, until its text is a valid value. Only
        the last text is kept, so streams get it when it is complete."""
        assert node.typed is not None
        if self.ahead is not None:
            self.ahead.ahead.forget()
        prompt, rejected = self.transcript.prompt(), []
        for left in range(node.retries or 0, -1, -1):
            context = self.context("gen", node.name, item, node.timeout)
            call = replace(ready, prompt=prompt, timeout=context.timeout)
            done = await self.run.calls.generate(context, call, self.before)
            splits = ReasoningStream.splits(node, done)
            try:
                for index, split in enumerate(splits):
                    text, sample = split.answer, of_sample(done.meta, index)
                    typed_value(node, text, sample)
            except InvalidValue as error:
                if left:
                    prompt = corrected(prompt, text, node.typed.name, str(error.__cause__), was_cut(sample))
                    rejected.append({"text": text, "error": str(error.__cause__)})
                    continue
            meta = dict(done.meta) | {"rejected": rejected}
            self.settle(node, item, Completion(done.texts, meta), splits)
            return

    def settle(
        self, node: Gen, item: Item, done: Completion, splits: Sequence[Split], streamed: bool = False
    ) -> None:
        """Add a generated text and set its variable."""
        variable = item.variable
        assert variable is not None
        first, one = splits[0], len(splits) == 1
        self.transcript = self.transcript.say(
            first.answer,
            chosen=node.name or "",
            hidden=first.head,
            reasoning=first.reasoning,
            generation=Generation(node, done.meta),
        )
        self._sent = self.transcript.length
        if self.run.stream and not streamed:
            self.output.put(first.answer)
        if item.reasoning is not None:
            reasonings = [split.reasoning for split in splits]
            item.reasoning.settle(reasonings[0] if one else reasonings)
        variable.meta = done.meta
        texts = [split.answer for split in splits]
        variable.raw = first.answer if one else texts
        try:
            values = [typed_value(node, text, of_sample(done.meta, at)) for at, text in enumerate(texts)]
        except InvalidValue as error:
            self._unfit(error, item)
            return
        variable.settle(values[0] if one else values, done.meta)

    def _settle_one(self, node: Gen, item: Item, text: str, meta: dict[str, Any]) -> None:
        """settle() of one text that was not streamed and is all answer."""
        variable = item.variable
        assert variable is not None
        self.transcript = self.transcript.say(text, chosen=node.name or "", generation=Generation(node, meta))
        self._sent = self.transcript.length
        if self.run.stream:
            self.output.put(text)
        variable.raw, variable.meta = text, meta
        if node.typed is None and "invalid" not in meta:
            variable.settle(text, meta)
            return
        try:
            value = typed_value(node, text, meta)
        except InvalidValue as error:
            self._unfit(error, item)
            return
        variable.settle(value, meta)

    def _unfit(self, cause: InvalidValue, item: Item) -> None:
        """A text that is no valid value is an error of its variable alone: it stays, and the state goes
        on."""
        assert item.variable is not None
        item.variable.fail(self._located(cause, item))
        forget_frames(cause)

    async def _select(self, node: Select, item: Item) -> None:
        assert item.variable is not None
        variable, context = item.variable, self.context("select", node.name, item, node.timeout)
        method = node.own or METHODS[node.method]
        seed = node.seed if node.seed is not None else self.run.calls.derived(context)
        call = ChoiceCall(
            self.transcript.prompt(),
            node.choices,
            method.unconditional,
            context.timeout,
            node.temperature,
            seed if node.temperature else None,
        )
        drawn = node.temperature > 0 and seed is None
        scores = await self.run.calls.score(context, call, self.before, drawn)
        fault = scores.meta.get("invalid")
        if fault is None:
            text, meta = _decided(node, scores, scores.meta["draw"] if drawn else seed)
        else:
            text, meta = scores.meta["reply"], scores.meta
        self.transcript = self.transcript.say(text, chosen=node.name or "", generation=Generation(node, meta))
        self._sent = self.transcript.length
        if self.run.stream:
            self.output.put(text)
        if fault is not None:
            variable.raw, variable.meta = text, meta
            self._unfit(InvalidValue(f"the reply is none of the choices: it is {text!r:.200}"), item)
            return
        if meta.get("temperature", 0.0) is None:
            warn("the model takes no temperature: select is a draw of its own, not its best option", item.src)
        variable.settle(text, meta)

    def context(self, kind: str, name: str | None, item: Item, timeout: float | None) -> CallContext:
        """The context of a call. Its step is its place among the queued calls: the number of calls made so
        far would depend on cancellations. A repeated call takes the next step."""
        step = max(item.step, self._step)
        self._step = step + 1
        limit = self.run.timeout if timeout is None else timeout
        if not self.meters:
            return CallContext(kind, name, self.branch, step, item.src, limit)
        # A backend with a prefix cache knows what it was sent before.
        fresh = self.transcript.length - (self._sent if self._caches else 0)
        return CallContext(kind, name, self.branch, step, item.src, limit, self.meters, about(max(0, fresh)))

    @property
    def before(self) -> Before:
        """Prepares the backend for a call; None if nothing is to be prepared."""
        return None if self.prefix is None else self.warm

    async def warm(self, backend: Backend) -> None:
        """Put the text that the branches of one fork share into the backend's cache."""
        if self.prefix is not None:
            await self.prefix.warm(backend)

    def cancelled(self, cause: asyncio.CancelledError, item: Item) -> None:
        """Remember why it was cancelled: the program's function has failed, or the program was cancelled."""
        if self.run.failure is None:
            self.fail(cause, item)
        elif self.error is None:
            self.error = self.run.failure

    def fail(self, cause: BaseException, item: Item) -> None:
        """Remember the failure, with its place in the program. The first one stays."""
        if self.error is None:
            self.error = self._located(cause, item)
            forget_frames(cause)

    def _located(self, cause: BaseException, item: Item) -> ProgramError:
        """The failure as its readers get it."""
        context: dict[str, Any] = {
            "program": self.run.program,
            "source": item.src or self.src,
            "node": f"{item.node.label():.200}" if item.node is not None else None,
            "variable": item.variable.name if item.variable is not None else None,
            "backend": self.run.backend.name if self.run.backend is not None else None,
        }
        timeout = getattr(item.node, "timeout", None)
        return located(cause, context, self.run.timeout if timeout is None else timeout)


def _decided(node: Select, scores: ChoiceScores, seed: int | None) -> tuple[str, dict[str, Any]]:
    """The option taken, and its metadata. Raises BackendError; BadProgram if the program's own method
    failed."""
    method = node.own or METHODS[node.method]
    try:
        pairs = zip(scores.scores, node.choices, strict=True)
        named = [dataclasses.replace(score, text=option) for score, option in pairs]
        decision = method.decide(named, node.temperature, seed)
    except BadProgram:
        raise
    except ValueError as error:
        raise BackendError(f"the choices cannot be compared: {error}") from error
    return node.choices[decision.index], {**scores.meta, **decision.meta, **report(method, named, decision)}

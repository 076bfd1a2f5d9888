"""Evaluator: what one state has said so far, and how one more node is done, by a backend where it takes one.

Used by one coroutine at a time, on the language's loop; constant text also by whoever holds the state's lock
while that rests. Knows no queue, no readers and no particular backend.
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
from sglang_dsl.conversation.transcript import Made, Transcript
from sglang_dsl.errors import BackendError, BadProgram, InvalidValue, ProgramError, Unsupported, warn
from sglang_dsl.interpreter.calls import Before, Where, about
from sglang_dsl.interpreter.lower import of_sample, typed_value, was_cut
from sglang_dsl.interpreter.metering import Meter
from sglang_dsl.interpreter.replies.reasoning import ReasoningStream, Split
from sglang_dsl.interpreter.replies.retries import corrected
from sglang_dsl.interpreter.replies.tool_loop import answer, may_call
from sglang_dsl.interpreter.run import (
    Item,
    Prefix,
    RunInfo,
    forget_frames,
    placed,
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
    ScopeBegin,
    ScopeEnd,
    Select,
    Source,
    Text,
    Tools,
)
from sglang_dsl.ir.syntax import KEPT, marked


class Evaluator:
    """`start`: what had been said when this branch began; `begun`: whether that is known. `error`: the first
    failure; nothing is done after it. `src`: where the branch was forked."""

    __slots__ = (
        "_caches",
        "_scopes",
        "_sent",
        "_step",
        "ahead",
        "begun",
        "branch",
        "error",
        "meters",
        "output",
        "prefix",
        "run",
        "src",
        "start",
        "transcript",
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
        # Where the variable scopes that are open began, the innermost last; one name may be open twice.
        self._scopes: tuple[tuple[str, Transcript], ...] = ()
        self._step = 0
        self._caches = run.backend is not None and not run.backend.speculates
        self._sent = 0  # characters that the backend has seen

    async def begin(self) -> None:
        """Take over what the parent had said at the fork. Raises the parent's failure."""
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
        """What was said since `transcript`, and what went wrong, is forgotten."""
        self.transcript, self.error = transcript, None
        self._scopes = tuple(one for one in self._scopes if one[1].length <= transcript.length)

    def say(self, nodes: Iterable[Any]) -> None:
        """Do what no backend is needed for and no variable comes of. What goes wrong is kept."""
        at = self.transcript
        streams = self.run.stream
        for node in nodes:
            kind = type(node)
            try:
                if kind is Text:
                    if KEPT and marked(node.text):
                        raise BadProgram(
                            "a formatted text that contains nodes was put into Text(...); add the text itself"
                        )
                    at = at.say(node.text)
                elif kind is RoleBegin:
                    at = at.open(node.role)
                elif kind is RoleEnd:
                    at = at.close()
                elif kind is Media:
                    at = at.show(json.loads(node.part))
                elif kind is Tools:
                    at = at.offer(self._offered(node))
                elif kind is Calls:
                    at = at.call(tuple(ToolCall(name, said, id) for id, name, said in node.calls))
                elif kind is LoopBegin or kind is LoopEnd:
                    continue  # of the queue, where it stands by what is added behind it
                elif kind is ScopeBegin:
                    self._scopes = (*self._scopes, (node.name, at))
                    continue
                else:
                    raise BadProgram(f"{node.label()} cannot be run")
            except Exception as error:  # noqa: BLE001 - told to whoever reads
                self.fail(error, Item(node, getattr(node, "src", None)))
                return
            self.transcript = at
            if streams:
                self.output.put(at.plain)

    def said(self, transcript: Transcript) -> None:
        """What was said by now, as the backend knows it; streams are told what is new in it."""
        if self.run.stream:
            self.output.put(transcript.text(self.transcript))
        self.transcript = transcript
        self._sent = transcript.length

    def _offered(self, node: Tools) -> tuple[dict[str, Any], ...]:
        """Raises Unsupported."""
        backend = self.run.backend
        if node.tools and backend is not None and not backend.calls_tools:
            raise Unsupported(f"{backend.name} does not support tools", backend=backend.name)
        return tuple(map(json.loads, node.tools))

    def do(self, node: Node, item: Item) -> Coroutine[Any, Any, None]:
        """Do any node. Raises what goes wrong."""
        if isinstance(node, Gen):
            return self._generate(node, item)
        if isinstance(node, Select):
            return self._select(node, item)
        return self._at_once(node, item)

    async def _at_once(self, node: Node, item: Item) -> None:
        if not isinstance(node, ScopeEnd):
            self.say((node,))
            return
        assert item.variable is not None
        item.variable.settle(self.transcript.text(self._end_scope(node.name)))

    def _end_scope(self, name: str) -> Transcript:
        """Where the innermost scope of this name began; it is closed."""
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
        where = self.where("gen", node.name, item, node.timeout)
        call = replace(ready, prompt=self.transcript.prompt(), timeout=where.timeout)
        if not run.stream or ready.n != 1 or ready.peeks:
            done = await run.calls.generate(where, call, self.before)
            if ready.peeks:
                done = Completion(("",) * len(done.texts), done.meta)
            if len(done.texts) == 1 and node.reasoning is None:
                self._settle_one(node, item, done.texts[0], done.meta)
                return
            self.settle(node, item, done, ReasoningStream.splits(node, done))
            return
        split = ReasoningStream(node, item.variable, item.reasoning, self.output)
        done = await run.calls.generate(where, call, self.before, split.piece)
        split.end()
        self.settle(node, item, done, ReasoningStream.splits(node, done), streamed=True)

    async def _until_it_fits(self, node: Gen, item: Item, ready: Call) -> None:
        """A generation with retries: asked for again, the error shown, until its text is read as a value. Of
        what was tried only the last text is said; so it is told to streams when it is whole."""
        assert node.typed is not None
        if self.ahead is not None:
            self.ahead.ahead.forget()
        prompt, rejected = self.transcript.prompt(), []
        for left in range(node.retries or 0, -1, -1):
            where = self.where("gen", node.name, item, node.timeout)
            call = replace(ready, prompt=prompt, timeout=where.timeout)
            done = await self.run.calls.generate(where, call, self.before)
            splits = ReasoningStream.splits(node, done)
            try:
                for index, split in enumerate(splits):
                    at, told = split.answer, of_sample(done.meta, index)
                    typed_value(node, at, told)
            except InvalidValue as error:
                if left:
                    prompt = corrected(prompt, at, node.typed.name, str(error.__cause__), was_cut(told))
                    rejected.append({"text": at, "error": str(error.__cause__)})
                    continue
            meta = dict(done.meta) | {"rejected": rejected}
            self.settle(node, item, Completion(done.texts, meta), splits)
            return

    def settle(
        self, node: Gen, item: Item, done: Completion, splits: Sequence[Split], streamed: bool = False
    ) -> None:
        """Say what was generated, and tell it to the readers."""
        variable = item.variable
        assert variable is not None
        first, one = splits[0], len(splits) == 1
        self.transcript = self.transcript.say(
            first.answer,
            chosen=node.name or "",
            hidden=first.head,
            reasoning=first.reasoning,
            made=Made(node, done.meta),
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
        self.transcript = self.transcript.say(text, chosen=node.name or "", made=Made(node, meta))
        self._sent = self.transcript.length
        if self.run.stream:
            self.output.put(text)
        variable.raw, variable.meta = text, meta
        try:
            value = typed_value(node, text, meta)
        except InvalidValue as error:
            self._unfit(error, item)
            return
        variable.settle(value, meta)

    def _unfit(self, cause: InvalidValue, item: Item) -> None:
        """A text that is no value is an error of its variable alone: it was said, and the state goes on."""
        assert item.variable is not None
        item.variable.fail(self._placed(cause, item))
        forget_frames(cause)

    async def _select(self, node: Select, item: Item) -> None:
        assert item.variable is not None
        variable, where = item.variable, self.where("select", node.name, item, node.timeout)
        method = node.own or METHODS[node.method]
        seed = node.seed if node.seed is not None else self.run.calls.derived(where)
        call = ChoiceCall(
            self.transcript.prompt(),
            node.choices,
            method.unconditional,
            where.timeout,
            node.temperature,
            seed if node.temperature else None,
        )
        drawn = node.temperature > 0 and seed is None
        found = await self.run.calls.score(where, call, self.before, drawn)
        fault = found.meta.get("invalid")
        if fault is None:
            text, meta = _decided(node, found, found.meta["draw"] if drawn else seed)
        else:
            text, meta = found.meta["reply"], found.meta
        self.transcript = self.transcript.say(text, chosen=node.name or "", made=Made(node, meta))
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

    def where(self, kind: str, name: str | None, item: Item, timeout: float | None) -> Where:
        """This call. Its step is when it was asked for, not how many were made before it, which depends on
        when something was cancelled. One that is made again takes the next."""
        step = max(item.step, self._step)
        self._step = step + 1
        limit = self.run.timeout if timeout is None else timeout
        if not self.meters:
            return Where(kind, name, self.branch, step, item.src, limit)
        # What a backend with a prefix cache was sent before, it knows.
        fresh = self.transcript.length - (self._sent if self._caches else 0)
        return Where(kind, name, self.branch, step, item.src, limit, self.meters, about(max(0, fresh)))

    @property
    def before(self) -> Before:
        """What prepares the backend for a call."""
        return None if self.prefix is None else self.warm

    async def warm(self, backend: Backend) -> None:
        """Prepare the backend for what the branches of one fork share."""
        if self.prefix is not None:
            await self.prefix.warm(backend)

    def cancelled(self, cause: asyncio.CancelledError, item: Item) -> None:
        """Remember why it was cancelled: the program's function has failed, or somebody wanted it."""
        if self.run.failure is None:
            self.fail(cause, item)
        elif self.error is None:
            self.error = self.run.failure

    def fail(self, cause: BaseException, item: Item) -> None:
        """Remember the failure, with its place. The first one stays."""
        if self.error is None:
            self.error = self._placed(cause, item)
            forget_frames(cause)

    def _placed(self, cause: BaseException, item: Item) -> ProgramError:
        """The failure as its readers get it."""
        place: dict[str, Any] = {
            "program": self.run.program,
            "source": item.src or self.src,
            "node": f"{item.node.label():.200}" if item.node is not None else None,
            "variable": item.variable.name if item.variable is not None else None,
            "backend": self.run.backend.name if self.run.backend is not None else None,
        }
        timeout = getattr(item.node, "timeout", None)
        return placed(cause, place, self.run.timeout if timeout is None else timeout)


def _decided(node: Select, found: ChoiceScores, seed: int | None) -> tuple[str, dict[str, Any]]:
    """The option taken, and its metadata. Raises BackendError; BadProgram where the program's own method
    failed."""
    method = node.own or METHODS[node.method]
    try:
        pairs = zip(found.scores, node.choices, strict=True)
        scores = [dataclasses.replace(score, text=option) for score, option in pairs]
        decision = method.decide(scores, node.temperature, seed)
    except BadProgram:
        raise
    except ValueError as error:
        raise BackendError(f"the choices cannot be compared: {error}") from error
    return node.choices[decision.index], {**found.meta, **decision.meta, **report(method, scores, decision)}

"""num_api_spec_tokens: fewer calls of an API that is paid by the call and by the prompt's tokens. One call
asks for more than its generation needs; what comes after is kept, and constant text and generations that
follow are served from it.

    Ahead        where the backend goes on from any text: the rest of a reply, taken piece by piece
    match()      where it only replies from a turn's begin: one reply against the whole turn
    Speculation  which of the two, for one state; holds a turn's nodes back until one of them is needed

What the model did not say is never taken from a rest: text that differs discards it, and a turn that a reply
does not follow is asked for again, at last an error. Knows no transport; backends that have a prefix cache of
their own do not speculate.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from runtime.protocol.sampling import SamplingParams
from sglang_dsl.backends.base import Backend
from sglang_dsl.conversation.requests import Call, Completion
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.errors import BackendError, BadProgram
from sglang_dsl.interpreter.lower import lower
from sglang_dsl.interpreter.replies.reasoning import Split
from sglang_dsl.interpreter.run import EvaluatorState, Item
from sglang_dsl.ir import Gen, ScopeBegin, ScopeEnd, Text

TRIES = 3
"""How often a turn is asked for whose replies do not follow it."""
_SHOWN = 60


# -- the rest of a reply -------------------------------------------------------------------------------------


def why_not(call: Call) -> str | None:
    """What of a call keeps it from being served from a longer reply; None where nothing does."""
    sampling = call.sampling
    reasons = {
        "n": call.n != 1,
        "a constraint": call.constraint is not None,
        "return_logprob": call.return_logprob or call.logprob_start_len >= 0 or call.top_logprobs > 0,
        "stop_regex": bool(sampling.stop_regex),
        "stop_token_ids": bool(sampling.stop_token_ids),
        "min_tokens": sampling.min_new_tokens > 0,
        "max_tokens=0": not sampling.max_new_tokens,
        ", ".join(call.options): bool(call.options),
    }
    return next((name for name, holds in reasons.items() if holds), None)


def _kind(sampling: SamplingParams) -> SamplingParams:
    """What a reply's text depends on, apart from where it ends."""
    return msgspec.structs.replace(sampling, stop=(), max_new_tokens=1)


def first_stop(
    text: str, stops: Sequence[str], start: int = 0, end: int | None = None
) -> tuple[int, str] | None:
    """Where the first of `stops` that lies wholly in text[start:end] begins, and which it is; of those that
    begin there the longest is told."""
    limit = len(text) if end is None else end
    matches = [(at, -len(one), one) for one in stops if one and (at := text.find(one, start, limit)) >= 0]
    return (min(matches)[0], min(matches)[2]) if matches else None


@dataclass(slots=True)
class _Rest:
    """A reply from `at` on. `ends`: where each token ends, None where the API does not tell; `total`: how
    many tokens the whole has, None where that is not known."""

    text: str
    kind: SamplingParams
    ends: list[int] | None
    total: int | None
    complete: bool
    id: object = None
    at: int = 0

    def skip(self, text: str) -> bool:
        """Go over constant text. False where the reply says something else."""
        if not self.text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def take(self, stops: Sequence[str], limit: int) -> tuple[str, dict[str, Any]] | None:
        """The next value, of at most `room` tokens, and its finish; None where the reply does not tell."""
        end, sure = self._within(limit)
        stop = first_stop(self.text, stops, self.at, end)
        if stop is not None:
            begin, self.at = self.at, stop[0]
            return self.text[begin : stop[0]], {"type": "stop", "matched": stop[1]}
        if not sure:
            return None
        begin, whole = self.at, end == len(self.text)
        if whole and self.complete:
            finish = {"type": "stop"}
        elif not whole or self._count(begin) == limit:
            finish = {"type": "length"}
        else:
            return None  # the reply ended before its value did
        self.at = end
        return self.text[begin:end], finish

    def _within(self, limit: int) -> tuple[int, bool]:
        """How far `room` tokens reach from here, and whether that is certain; else they reach at least so
        far: a token is at least one byte."""
        if self.ends is not None:
            index = bisect.bisect_right(self.ends, self.at) + limit - 1
            return (self.ends[index] if index < len(self.ends) else len(self.text)), True
        if self.total is not None and self.total <= limit:
            return len(self.text), True
        return self.at + len(self.text[self.at :].encode()[:limit].decode(errors="ignore")), False

    def _count(self, begin: int) -> int | None:
        """Tokens from `begin` to the end."""
        if self.ends is not None:
            return len(self.ends) - bisect.bisect_right(self.ends, begin)
        return self.total if begin == 0 else None


class Ahead:
    """What the model has said already beyond the state's text."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._rest: _Rest | None = None

    def skip(self, text: str) -> None:
        """Text was added that the model did not generate: what was kept stays where it goes on just so."""
        if self._rest is not None and not self._rest.skip(text):
            self._rest = None

    def forget(self) -> None:
        self._rest = None

    async def answered(
        self, call: Call, make: Callable[[Call], Awaitable[Completion]], *, reports_tokens: bool
    ) -> Completion:
        """The call's answer, from what is there or by `make`."""
        if why_not(call) is not None:
            self._rest = None
            return await make(call)
        if (served := self._served(call)) is not None:
            return served
        self._rest = None
        limit = max(self._tokens, call.sampling.max_new_tokens)
        longer = limit > call.sampling.max_new_tokens
        wide = msgspec.structs.replace(
            call,
            sampling=msgspec.structs.replace(call.sampling, stop=(), max_new_tokens=limit),
            return_logprob=longer and reports_tokens,
        )
        done = await make(wide)
        meta = {key: value for key, value in done.meta.items() if not key.endswith("_logprobs")}
        self._rest = _Rest(
            done.texts[0],
            _kind(call.sampling),
            _ends(done),
            _number(meta.get("completion_tokens")),
            (meta.get("finish_reason") or {}).get("type") == "stop",
            meta.get("id"),
        )
        taken = self._rest.take(call.sampling.stop, call.sampling.max_new_tokens)
        if taken is None:
            self._rest = None
            return await make(call)
        return Completion((taken[0],), meta | {"finish_reason": taken[1]})

    def _served(self, call: Call) -> Completion | None:
        rest = self._rest
        if rest is None or rest.at >= len(rest.text) or rest.kind != _kind(call.sampling):
            return None
        taken = rest.take(call.sampling.stop, call.sampling.max_new_tokens)
        return None if taken is None else Completion((taken[0],), served_meta(taken[1], rest.id))


def served_meta(finish: dict[str, Any], request: object) -> dict[str, Any]:
    """Of a value for which nothing was asked."""
    meta = {"finish_reason": finish, "prompt_tokens": 0, "completion_tokens": 0, "speculated": True}
    return meta if request is None else {"id": request, **meta}


def _ends(done: Completion) -> list[int] | None:
    """Where each token of a completion ends; None where its tokens are not told, or are not its text."""
    logprobs = done.meta.get("output_token_logprobs")
    if not logprobs:
        return None
    text, ends, at = done.texts[0], [], 0
    for _, _, token in logprobs:
        # Control tokens are told and do not stand in the text.
        if isinstance(token, str) and text.startswith(token, at):
            at += len(token)
        ends.append(at)
    return ends if at == len(text) else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


# -- one reply for a whole turn ------------------------------------------------------------------------------


def match(
    pieces: Sequence[str | tuple[str, ...]], text: str, *, complete: bool
) -> list[tuple[str, dict[str, Any]]] | str:
    """A reply against a turn: constant texts, and for each generation its stop strings. Gives each
    generation's value and finish, or in words what does not match.

    Constant text stands there letter by letter; a generation ends at its first stop string, the last of all
    also where the reply does. `complete`: whether the reply is whole, or was cut at its token limit.
    """
    values: list[tuple[str, dict[str, Any]]] = []
    at, last = 0, len(pieces) - 1
    for index, piece in enumerate(pieces):
        if isinstance(piece, str):
            if not text.startswith(piece, at):
                actual = text[at : at + max(_SHOWN, len(piece))]
                cut = "" if complete or len(text) - at >= len(piece) else ", where its token limit ended it"
                return f"{piece[:200]!r} was to come after {text[:at][-_SHOWN:]!r}, it says {actual!r}{cut}"
            at += len(piece)
            continue
        stop = first_stop(text, piece, at)
        if stop is not None:
            values.append((text[at : stop[0]], {"type": "stop", "matched": stop[1]}))
            at = stop[0]
        elif index == last:
            values.append((text[at:], {"type": "stop" if complete else "length"}))
            at = len(text)
        else:
            ended = "ends" if complete else "was cut at its token limit"
            stops, before = " or ".join(map(repr, piece)), text[:at][-_SHOWN:]
            return f"the generation after {before!r} was to end at {stops}, the reply {ended} before"
    return values


@dataclass
class Speculation:
    """For one state. Its coroutine alone calls this; others look at `held` while that rests."""

    tokens: int
    prefills: bool
    reports_tokens: bool
    held: list[Item] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ahead = Ahead(self.tokens)

    @classmethod
    def of(cls, tokens: int | None, backend: Backend | None) -> Speculation | None:
        """None where nothing is to be speculated about, or the backend's own cache makes it needless."""
        if tokens is None or backend is None or not backend.speculates:
            return None
        return cls(tokens, backend.prefills, backend.reports_tokens)

    def goes_on(self, transcript: Transcript) -> bool:
        """Whether a reply's rest can be gone on with here."""
        return self.prefills or transcript.role is None

    async def evaluate(self, item: Item, state: EvaluatorState) -> None:
        """Do one thing of the queue, or hold it back. Raises what goes wrong."""
        node = item.node
        waits = isinstance(node, Text | Gen | ScopeBegin | ScopeEnd) and item.offer is None
        if waits and state.transcript.role == "assistant" and not self.goes_on(state.transcript):
            self.held.append(item)
            return
        # One that cannot wait lets those before it go: a turn's end, or a mark that somebody waits for.
        await self._release(state)
        if node is None:
            return
        if isinstance(node, Text):
            self.ahead.skip(node.text)
        elif not waits:
            self.ahead.forget()
        await state.evaluate(node, item)

    async def answer(self, call: Call, node: Gen, item: Item, state: EvaluatorState) -> Completion:
        """A generation's answer: what the model has said already, or a new call's."""
        if node.reasoning is not None:
            self.ahead.forget()
            return await self._make(node, item, state, call)
        make = functools.partial(self._make, node, item, state)
        return await self.ahead.answered(call, make, reports_tokens=self.reports_tokens)

    async def _make(self, node: Gen, item: Item, state: EvaluatorState, call: Call) -> Completion:
        context = state.context("gen", node.name, item, node.timeout)
        call = msgspec.structs.replace(call, timeout=context.timeout)
        return await state.run.calls.generate(context, call, state.warm, None)

    async def _release(self, state: EvaluatorState) -> None:
        """Do what was held back: somebody needs it, or the turn is over. Raises what goes wrong, after all
        who wait have been told so."""
        items, self.held = self.held, []
        if not items:
            return
        first = next((item for item in items if isinstance(item.node, Gen)), items[0])
        try:
            await self._do(items, state)
        except (Exception, asyncio.CancelledError) as error:
            state.fail(error, first)
            self.held = items  # drop() tells those who wait for them
            raise

    def drop(self, error: BaseException) -> None:
        """The state has failed: nothing of what waits will be done."""
        items, self.held = self.held, []
        self.ahead.forget()
        for item in items:
            for variable in (item.variable, item.reasoning):
                if variable is not None and not variable.done:
                    variable.fail(error)

    async def _do(self, items: list[Item], state: EvaluatorState) -> None:
        parts = [item for item in items if isinstance(item.node, Text | Gen)]
        gens = [item for item in parts if isinstance(item.node, Gen)]
        # A turn that has begun cannot be asked for from its begin; the backend says what it thinks of that.
        if not gens or len(parts) == 1 or state.transcript.kind != "open":
            for item in items:
                assert item.node is not None
                await state.evaluate(item.node, item)
            return
        values = iter(await self._requested(parts, gens, state))
        for item in items:
            if isinstance(item.node, Gen):
                done = next(values)
                state.settle(item.node, item, done, [Split("", "", done.texts[0])])
            else:
                assert item.node is not None
                await state.evaluate(item.node, item)

    async def _requested(
        self, parts: list[Item], gens: list[Item], state: EvaluatorState
    ) -> list[Completion]:
        """One value for each of `gens`."""
        nodes = [item.node for item in gens if isinstance(item.node, Gen)]
        prompt = state.transcript.prompt()
        calls = [msgspec.structs.replace(lower(node, state.run.defaults), prompt=prompt) for node in nodes]
        self._check(nodes, calls, ends_with_gen=parts[-1] is gens[-1])
        limit = max(self.tokens, *(call.sampling.max_new_tokens for call in calls))
        sampling = msgspec.structs.replace(calls[0].sampling, stop=(), max_new_tokens=limit)
        stops = iter([call.sampling.stop for call in calls])
        pieces = [item.node.text if isinstance(item.node, Text) else next(stops) for item in parts]
        timeout = max((node.timeout for node in nodes if node.timeout is not None), default=None)
        problem = ""
        for _ in range(TRIES):
            context = state.context("gen", nodes[0].name, gens[0], timeout)
            call = msgspec.structs.replace(calls[0], sampling=sampling, timeout=context.timeout)
            done = await state.run.calls.generate(context, call, state.warm, None)
            complete = (done.meta.get("finish_reason") or {}).get("type") != "length"
            values = match(pieces, done.texts[0], complete=complete)
            if isinstance(values, str):
                problem = values
                continue
            metas = [served_meta(finish, done.meta.get("id")) for _, finish in values]
            metas[0] = dict(done.meta) | {"finish_reason": values[0][1]}
            return [Completion((value,), meta) for (value, _), meta in zip(values, metas, strict=True)]
        raise BackendError(
            f"{TRIES} replies did not follow the assistant's turn: {problem}",
            retryable=True,
            hint="show the format in the prompt, increase num_api_spec_tokens if replies are cut off, or "
            "leave num_api_spec_tokens out",
        )

    @staticmethod
    def _check(nodes: Sequence[Gen], calls: Sequence[Call], *, ends_with_gen: bool) -> None:
        """Raises BadProgram for a turn that no one reply can be taken apart into."""
        for node, call in zip(nodes, calls, strict=True):
            shown = f"gen({node.name!r})" if node.name else "gen()"
            reason = "separate_reasoning" if node.reasoning is not None else why_not(call)
            if reason is not None:
                raise BadProgram(
                    f"{shown} has {reason}, which one reply for a whole turn cannot respect; put it into "
                    "a turn of its own, or leave num_api_spec_tokens out"
                )
            if _kind(call.sampling) != _kind(calls[0].sampling):
                raise BadProgram(
                    f"{shown} has other sampling parameters than the turn's first generation; with "
                    "num_api_spec_tokens one reply contains them all"
                )
            if not call.sampling.stop and not (ends_with_gen and node is nodes[-1]):
                raise BadProgram(
                    f"{shown} needs a stop string, because more text follows in its turn; with "
                    "num_api_spec_tokens it marks where the value ends in the reply"
                )

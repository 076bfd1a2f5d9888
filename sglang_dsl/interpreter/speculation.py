"""num_api_spec_tokens: fewer calls of an API that is paid by the call and by the prompt's tokens. One call
requests more tokens than its generation needs; the constant text and generations that follow are served from
the rest.

    Ahead        for backends that continue any text: the rest of a reply, used piece by piece
    match()      for backends that only reply from a turn's begin: one reply against the whole turn
    Speculation  chooses between them, for one state; holds a turn's nodes back until one of them is needed

A rest is used only as far as it agrees with the program's text; otherwise it is discarded, and a turn that
the reply does not follow is requested again, and finally an error. Knows no transport; backends with a prefix
cache do not speculate.
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
from sglang_dsl.interpreter.replies.texts import Split
from sglang_dsl.interpreter.run import EvaluatorState, Item
from sglang_dsl.ir import Gen, ScopeBegin, ScopeEnd, Text

TRIES = 3
"""How often a turn is requested if its replies do not follow it."""
_SHOWN = 60


# -- the rest of a reply -------------------------------------------------------------------------------------


def why_not(call: Call) -> str | None:
    """The reason why a call cannot be served from a longer reply; None if it can."""
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
    """The sampling parameters without those about the end of the text."""
    return msgspec.structs.replace(sampling, stop=(), max_new_tokens=1)


def first_stop(
    text: str, stops: Sequence[str], start: int = 0, end: int | None = None
) -> tuple[int, str] | None:
    """Position and text of the first of `stops` in text[start:end]; the longest of those that begin there."""
    limit = len(text) if end is None else end
    matches = [(at, -len(one), one) for one in stops if one and (at := text.find(one, start, limit)) >= 0]
    return (min(matches)[0], min(matches)[2]) if matches else None


@dataclass(slots=True)
class _Rest:
    """A reply from `at` on. `ends`: the end of each token, None if the API does not report it; `total`: the
    tokens of the whole reply, if known."""

    text: str
    kind: SamplingParams
    ends: list[int] | None
    total: int | None
    complete: bool
    id: object = None
    at: int = 0

    def skip(self, text: str) -> bool:
        """Skip constant text. False if the reply differs."""
        if not self.text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def take(self, stops: Sequence[str], limit: int) -> tuple[str, dict[str, Any]] | None:
        """The next value, of at most `limit` tokens, and its finish reason; None if the reply is too
        short."""
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
            return None  # the reply ended before the value
        self.at = end
        return self.text[begin:end], finish

    def _within(self, limit: int) -> tuple[int, bool]:
        """The end of `limit` tokens from here, and whether it is exact; else it is a lower bound, as a token
        has at least one byte."""
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
    """What the model has generated beyond the state's text."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._rest: _Rest | None = None

    def skip(self, text: str) -> None:
        """Constant text was added: the rest is kept if it continues with it."""
        if self._rest is not None and not self._rest.skip(text):
            self._rest = None

    def forget(self) -> None:
        self._rest = None

    async def answered(
        self, call: Call, make: Callable[[Call], Awaitable[Completion]], *, reports_tokens: bool
    ) -> Completion:
        """The answer of the call, from the rest or by `make`."""
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
    """Metadata of a value without a call."""
    meta = {"finish_reason": finish, "prompt_tokens": 0, "completion_tokens": 0, "speculated": True}
    return meta if request is None else {"id": request, **meta}


def _ends(done: Completion) -> list[int] | None:
    """The end of each token of a completion; None if its tokens are not reported, or do not add up to it."""
    logprobs = done.meta.get("output_token_logprobs")
    if not logprobs:
        return None
    text, ends, at = done.texts[0], [], 0
    for _, _, token in logprobs:
        # Control tokens are reported and are not in the text.
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
    """Match a reply against a turn: constant texts, and for each generation its stop strings. Returns the
    value and finish reason of each generation, or a message about what does not match.

    Constant text must match exactly; a generation ends at its first stop string, the last one also at the end
    of the reply. `complete`: whether the reply is whole, or was cut at its token limit.
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
    """For one state; used by its coroutine. Other threads read `held` while that is idle."""

    tokens: int
    prefills: bool
    reports_tokens: bool
    held: list[Item] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ahead = Ahead(self.tokens)

    @classmethod
    def of(cls, tokens: int | None, backend: Backend | None) -> Speculation | None:
        """None without num_api_spec_tokens, and for a backend with a prefix cache."""
        if tokens is None or backend is None or not backend.speculates:
            return None
        return cls(tokens, backend.prefills, backend.reports_tokens)

    def goes_on(self, transcript: Transcript) -> bool:
        """Whether the rest of a reply can be used here."""
        return self.prefills or transcript.role is None

    async def evaluate(self, item: Item, state: EvaluatorState) -> None:
        """Evaluate one entry of the queue, or hold it back. Raises its error."""
        node = item.node
        waits = isinstance(node, Text | Gen | ScopeBegin | ScopeEnd) and item.offer is None
        if waits and state.transcript.role == "assistant" and not self.goes_on(state.transcript):
            self.held.append(item)
            return
        # An entry that cannot wait releases those before it: a turn's end, or a mark with a reader.
        await self._release(state)
        if node is None:
            return
        if isinstance(node, Text):
            self.ahead.skip(node.text)
        elif not waits:
            self.ahead.forget()
        await state.evaluate(node, item)

    async def answer(self, call: Call, node: Gen, item: Item, state: EvaluatorState) -> Completion:
        """A generation's answer, from the rest or by a new call."""
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
        """Evaluate what was held back: it is read, or its turn has ended. Raises its error, after its
        variables have failed."""
        items, self.held = self.held, []
        if not items:
            return
        first = next((item for item in items if isinstance(item.node, Gen)), items[0])
        try:
            await self._do(items, state)
        except (Exception, asyncio.CancelledError) as error:
            state.fail(error, first)
            self.held = items  # drop() fails their variables
            raise

    def drop(self, error: BaseException) -> None:
        """The state has failed: fail everything that is held back."""
        items, self.held = self.held, []
        self.ahead.forget()
        for item in items:
            for variable in (item.variable, item.reasoning):
                if variable is not None and not variable.done:
                    variable.fail(error)

    async def _do(self, items: list[Item], state: EvaluatorState) -> None:
        parts = [item for item in items if isinstance(item.node, Text | Gen)]
        gens = [item for item in parts if isinstance(item.node, Gen)]
        # A turn that already has text cannot be requested from its begin; the backend decides about it.
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
        """Raises BadProgram for a turn whose generations cannot share one reply."""
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

"""MockBackend: a deterministic backend in this process, for tests of programs. Stop strings, max_tokens, n
and usage work as in every backend; other parameters raise Unsupported.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import itertools
import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.formats.reasoning.splitter import split_reasoning
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint
from runtime.protocol.messages import RAW_ROLE
from runtime.protocol.registry import MissingExtra, Registry
from sglang_dsl.backends import base
from sglang_dsl.backends.common.example_text import example
from sglang_dsl.backends.common.remote import Misfit, fitted
from sglang_dsl.conversation.transcript import CLOSING, opening
from sglang_dsl.errors import BackendError, Unsupported
from sglang_dsl.ir.schema_regex import build_regex_from_object

Reply = str | Sequence[str] | base.Completion
Script = Iterable[Reply] | Mapping[str, Reply] | Callable[[base.Call], Reply | Awaitable[Reply]]
Scores = Mapping[str, float | Sequence[float]] | Callable[[base.ChoiceCall, str], Sequence[float]]
Split = int | Sequence[int] | Callable[[str], Iterable[str]]

# By name, like the engine: the runtime's examples of a schema, and the packages that they need.
_PARTS: Registry[Any] = Registry(
    "part of the mock",
    {"values of schemas": "runtime:values_of"},
    extras={"values of schemas": "mock"},
)
_VOCABULARY = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jade", "kelp",
)  # fmt: skip
_OPTIONS = frozenset({"require_reasoning", "return_text_in_logprobs"})
_WORD = re.compile(r"\s*\S+|\s+$")


@dataclass
class MockUsage:
    """Totals over all calls of the backend."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def reset(self) -> None:
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0


@dataclass(eq=False)
class MockBackend(base.Backend):
    """A backend for tests, with scripted or made-up answers and without a model.

    replies        None: made up from the constraint, or from the prompt; a list: one reply for each
                   generation, in order; a mapping: the first regex that is found in the prompt gives the
                   reply; a function of the Call, ordinary or async
    scores         for select: option -> log-probability, or one for each token; or a function of (call,
                   option)
    split          how streams break the text: the number of characters in each piece, a list of cut
                   positions, or a function of the text
    tokens         what counts as one token: "words" (with the whitespace before them) or "bytes"
    delay_s        seconds before an answer
    chunk_delay_s  seconds between the pieces of a stream
    errors         number of the call (generations and selects, from 0) -> the exception it raises
    fail_after     with an error in a stream: how many pieces come first

    A reply is a text, a list of n texts, or a Completion, whose metadata may have tool_calls. A list that is
    used up is an error. Made-up replies for any JSON schema need the extra `mock`; those without a constraint
    are not shorter than min_tokens. Options without a score get one computed from the prompt and the option.

    For asserts it records: calls, choice_calls, commits, usage, in_flight, most_in_flight.
    """

    replies: Script | None = None
    scores: Scores | None = None
    split: Split = 5
    tokens: str = "words"
    delay_s: float = 0.0
    chunk_delay_s: float = 0.0
    errors: Mapping[int, BaseException] = field(default_factory=dict)
    fail_after: int = 0
    name: str = "mock"
    calls_tools = True
    calls: list[base.Call] = field(default_factory=list, init=False)
    choice_calls: list[base.ChoiceCall] = field(default_factory=list, init=False)
    commits: list[base.Prompt] = field(default_factory=list, init=False)
    usage: MockUsage = field(default_factory=MockUsage, init=False)
    in_flight: int = field(default=0, init=False)
    most_in_flight: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.tokens not in ("words", "bytes"):
            raise ValueError(f'tokens must be "words" or "bytes", got {self.tokens!r}')
        if isinstance(self.replies, str):
            raise TypeError(
                "replies takes a list, a mapping or a function; for a single reply pass a list of one"
            )
        self._count = itertools.count()
        scripted = not isinstance(self.replies, Mapping) and isinstance(self.replies, Iterable)
        self._script: Iterator[Reply] | None = iter(self.replies) if scripted else None  # type: ignore[arg-type]
        self._seen: set[str] = set()
        self._pauses: dict[tuple[int, float], list[asyncio.Future[None]]] = {}

    @property
    def token_usage(self) -> MockUsage:
        """`usage`, under its name in other backends."""
        return self.usage

    # -- the verbs -------------------------------------------------------------------------------------------

    async def generate(self, call: base.Call) -> base.Completion:
        self._enter()
        try:
            number = self._begin(call)
            await self._pause()
            if self.errors and (error := self.errors.get(number)):
                raise error
            reply = self._reply(call)
            if type(reply) is str and call.n == 1 and call.constraint is None and not call.return_logprob:
                # One unconstrained text, as most are.
                text, size, finish = self._cut(reply, call)
                return base.Completion((text,), self._meta(number, call.prompt, size, finish))
            return await self._complete(call, number, reply)
        finally:
            self.in_flight -= 1

    async def stream(self, call: base.Call) -> AsyncIterator[base.Delta]:
        if call.n != 1:
            raise Unsupported("a stream holds one text", hint="use n=1, or run without stream")
        self._enter()
        try:
            number = self._begin(call)
            await self._pause()
            error = self.errors.get(number)
            if error and not self.fail_after:
                raise error
            done = await self._complete(call, number, self._reply(call))
            for index, piece in enumerate(self._pieces(done.texts[0])):
                if error and index == self.fail_after:
                    raise error
                yield base.Delta(piece)
                await asyncio.sleep(self.chunk_delay_s)
            if error:
                raise error
            yield base.Delta("", done.meta)
        finally:
            self.in_flight -= 1

    async def score(self, call: base.ChoiceCall) -> base.ChoiceScores:
        self._enter()
        try:
            number = next(self._count)
            self.choice_calls.append(call)
            await self._pause()
            if error := self.errors.get(number):
                raise error
            prompt = _flat(call.prompt)
            scores = []
            for option in call.choices:
                logprobs = self._score(call, prompt, option)
                prior = tuple(self._logprobs_of("", option, len(logprobs))) if call.unconditional else None
                scores.append(base.ChoiceScore(logprobs, unconditional=prior))
            used = sum(self._size(option) for option in call.choices)
            return base.ChoiceScores(tuple(scores), self._meta(number, call.prompt, used, {"type": "stop"}))
        finally:
            self.in_flight -= 1

    async def commit(self, prompt: base.Prompt) -> None:
        self.commits.append(prompt)
        self._seen.add(_flat(prompt))

    async def aflush_cache(self) -> bool:
        self._seen.clear()
        return True

    async def info(self) -> dict[str, Any]:
        return {"backend": self.name, "calls": len(self.calls) + len(self.choice_calls)}

    # -- replies ---------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        self.in_flight += 1
        if self.in_flight > self.most_in_flight:
            self.most_in_flight = self.in_flight

    def _pause(self) -> Awaitable[None]:
        """Wait for delay_s, or up to an eighth more: answers that are due close together share one timer."""
        if self.delay_s <= 0:
            return asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        grain = self.delay_s / 8
        due = (id(loop), math.ceil((loop.time() + self.delay_s) / grain) * grain)
        waiting = self._pauses.get(due)
        if waiting is None:
            waiting = self._pauses[due] = []
            loop.call_at(due[1], self._wake, due)
        done = loop.create_future()
        waiting.append(done)
        return done

    def _wake(self, due: tuple[int, float]) -> None:
        for done in self._pauses.pop(due):
            if not done.done():  # it may have been cancelled
                done.set_result(None)

    def _begin(self, call: base.Call) -> int:
        if call.options and (unknown := sorted(set(call.options) - _OPTIONS)):
            raise Unsupported(f"the mock backend does not know {', '.join(unknown)}")
        if call.logprob_start_len >= 0 or call.top_logprobs:
            raise Unsupported(
                "the mock backend has no log-probabilities of prompts and no top log-probabilities"
            )
        sampling = call.sampling
        if sampling.stop_regex:
            raise Unsupported("the mock backend does not know stop_regex", hint="use stop strings")
        if sampling.logit_bias:
            raise Unsupported("the mock backend has no token ids", hint="leave logit_bias out")
        if sampling.stop_token_ids:
            raise Unsupported("the mock backend has no token ids", hint="use stop strings")
        self.calls.append(call)
        return next(self._count)

    async def _complete(self, call: base.Call, number: int, reply: Any) -> base.Completion:
        if not isinstance(reply, str) and inspect.isawaitable(reply):
            reply = await reply
        extra = reply.meta if isinstance(reply, base.Completion) else {}
        if isinstance(reply, base.Completion):
            reply = reply.texts
        replies = [reply] * call.n if isinstance(reply, str) else list(reply)
        if len(replies) != call.n:
            raise BackendError(f"the script has {len(replies)} texts for a call that requests {call.n}")
        texts, used, finish = [], 0, {"type": "stop"}
        faults: list[dict[str, Any]] = []
        for text in replies:
            cut, size, finish = self._cut(text, call)
            fault = None
            if call.constraint is not None and finish["type"] != "length":
                cut, fault = _held(call.constraint, text, cut, bool(call.options.get("require_reasoning")))
            texts.append(cut)
            faults.append({} if fault is None else {"invalid": fault})
            used += size
        meta = self._meta(number, call.prompt, used, finish) | faults[0]
        if any(faults[1:]):
            meta["samples"] = [{**meta, **one} for one in faults]
        if call.return_logprob:
            logprobs = self._logprobs_of(_flat(call.prompt), texts[0], self._size(texts[0]))
            # As an engine reports them, (logprob, id, text); there are no ids here.
            tokens = self._tokens(texts[0]) if call.options.get("return_text_in_logprobs") else None
            meta["output_token_logprobs"] = [
                [value, None, tokens[at] if tokens else None] for at, value in enumerate(logprobs)
            ]
        return base.Completion(tuple(texts), meta | extra)

    def _reply(self, call: base.Call) -> Reply | Awaitable[Reply]:
        if self._script is not None:
            scripted = next(self._script, None)
            if scripted is None:
                raise BackendError("the mock backend has no replies left; pass more in replies")
            return scripted
        if callable(self.replies):
            return self.replies(call)
        prompt = _flat(call.prompt)
        if isinstance(self.replies, Mapping):
            replies: Mapping[str, Reply] = self.replies
            for pattern, text in replies.items():
                if re.search(pattern, prompt):
                    return text
            raise BackendError(f"none of the mock's patterns matches the prompt ...{prompt[-60:]!r}")
        return [self._invent(call, f"{prompt}\0{index}" if index else prompt) for index in range(call.n)]

    def _invent(self, call: base.Call, key: str) -> str:
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        constraint = call.constraint
        if constraint is None:
            bytes_of = itertools.cycle(digest)
            parts = [_VOCABULARY[next(bytes_of) % len(_VOCABULARY)] for _ in range(2 + digest[0] % 3)]
            while self._size(" ".join(parts)) < call.sampling.min_new_tokens:
                parts.append(_VOCABULARY[next(bytes_of) % len(_VOCABULARY)])
            return " ".join(parts)
        match constraint.kind:
            case "regex":
                try:
                    return _example(constraint.spec, digest)
                except (ValueError, LookupError) as error:
                    raise _beyond("regex", error) from error
            case "json_schema":
                try:
                    return _example(build_regex_from_object(constraint.spec), digest)
                except (ValueError, LookupError):  # BadProgram is a ValueError
                    return _value(constraint, digest)
            case "choices":
                options = json.loads(constraint.spec)
                return str(options[digest[0] % len(options)])
            case kind:
                raise Unsupported(f"the mock backend cannot make up text for {kind}", hint="script the reply")

    def _cut(self, text: str, call: base.Call) -> tuple[str, int, dict[str, Any]]:
        """The text up to the first stop string and the token limit, its tokens, and why it ended."""
        finish: dict[str, Any] = {"type": "stop"}
        sampling = call.sampling
        if sampling.stop:
            starts = [(at, stop) for stop in sampling.stop if (at := text.find(stop)) >= 0]
            if starts:
                at, stop = min(starts)
                text = text[: at + len(stop)] if sampling.no_stop_trim else text[:at]
                finish = {"type": "stop", "matched": stop}
        size = self._size(text)
        if size > sampling.max_new_tokens:
            limit = sampling.max_new_tokens
            if self.tokens == "bytes":
                first = text.encode()[:limit].decode("utf-8", "ignore")
            else:
                first = "".join(_WORD.findall(text)[:limit])
            return first, self._size(first), {"type": "length"}
        return text, size, finish

    def _size(self, text: str) -> int:
        if self.tokens == "bytes":
            return len(text.encode("utf-8", "surrogatepass"))
        # As many as _WORD finds: trailing whitespace counts as one more.
        return len(text.split()) + text[-1:].isspace()

    def _tokens(self, text: str) -> list[str]:
        """Its tokens; a byte that is no character by itself as the replacement character."""
        if self.tokens == "bytes":
            raw = text.encode("utf-8", "surrogatepass")
            return [bytes((byte,)).decode("utf-8", "replace") for byte in raw]
        return _WORD.findall(text)

    def _pieces(self, text: str) -> Iterator[str]:
        if callable(self.split):
            yield from self.split(text)
            return
        cuts = range(self.split, len(text), self.split) if isinstance(self.split, int) else sorted(self.split)
        begin = 0
        for cut in cuts:
            if begin < cut < len(text):
                yield text[begin:cut]
                begin = cut
        if text[begin:]:
            yield text[begin:]

    def _prompt_size(self, prompt: base.Prompt) -> int:
        """Tokens of the prompt as _flat() writes it. The words of a turn are counted once."""
        if self.tokens == "bytes":
            return self._size(_flat(prompt))
        size = 0
        for turn in prompt.messages:
            if turn.role == RAW_ROLE or type(turn.content) is not str:
                return self._size(_flat(prompt))
            size += _word_count(turn.role, turn.content, turn.open)
        return size

    def _meta(
        self, number: int, prompt: base.Prompt, completion: int, finish: dict[str, Any]
    ) -> dict[str, Any]:
        cached = 0
        if self._seen:
            flat = _flat(prompt)
            cached = max((self._size(seen) for seen in self._seen if flat.startswith(seen)), default=0)
        size, usage = self._prompt_size(prompt), self.usage
        usage.prompt_tokens += size
        usage.completion_tokens += completion
        usage.cached_tokens += cached
        return {
            "id": f"{self.name}-{number}",
            "finish_reason": finish,
            "prompt_tokens": size,
            "completion_tokens": completion,
            "cached_tokens": cached,
            "jumped_tokens": 0,
        }

    # -- scores ----------------------------------------------------------------------------------------------

    def _score(self, call: base.ChoiceCall, prompt: str, option: str) -> tuple[float, ...]:
        if callable(self.scores):
            return tuple(self.scores(call, option))
        score = self.scores.get(option) if self.scores is not None else None
        match score:
            case None:
                return tuple(self._logprobs_of(prompt, option, max(1, self._size(option))))
            case int() | float():
                return (float(score),)
            case _:
                return tuple(score)

    @staticmethod
    def _logprobs_of(prompt: str, text: str, count: int) -> Iterator[float]:
        for index in range(count):
            key = f"{prompt}\0{text}\0{index}".encode("utf-8", "surrogatepass")
            yield math.log((hashlib.blake2b(key, digest_size=1).digest()[0] + 1) / 257)


def _example(regex: str, digest: bytes) -> str:
    """Raises ValueError, LookupError."""
    numbers = itertools.cycle(digest)
    return example(regex, lambda size: next(numbers) % size)


def _value(constraint: Constraint, digest: bytes) -> str:
    """JSON that matches a schema of any kind. Raises Unsupported."""
    try:
        values = _PARTS.load("values of schemas")(constraint)
    except (MissingExtra, BadConstraint) as error:
        raise _beyond("json_schema", error) from error
    if not values:
        raise _beyond("json_schema", "no value of it was found")
    separators = (",", ":") if constraint.whitespace == "compact" else None
    return json.dumps(values[digest[0] % len(values)], ensure_ascii=False, separators=separators)


def _beyond(kind: str, why: object) -> Unsupported:
    return Unsupported(
        f"the mock backend cannot make up text for this {kind}: {why}", hint="script the reply"
    )


@functools.lru_cache(maxsize=4096)
def _word_count(role: str, content: str, is_open: bool) -> int:
    """Words of a turn, and one for trailing whitespace."""
    text = f"{opening(role)}{content}"
    return len(text.split()) + (is_open and text[-1].isspace())


def _flat(prompt: base.Prompt) -> str:
    parts: list[str] = []
    for message in prompt.messages:
        role, content = message.role, message.content
        if not isinstance(content, str):
            content = json.dumps(content)
        if role == RAW_ROLE:
            parts.append(content)
        elif message.open:
            parts += opening(role), content
        else:
            parts += opening(role), content, CLOSING
    return "".join(parts)


def _held(constraint: Constraint, text: str, cut: str, reasons: bool) -> tuple[str, str | None]:
    """A reply, whole or up to its stop string, whichever fits the constraint, and why neither fits.
    `reasons`: the constraint applies to the answer after the reasoning."""
    if constraint.kind not in ("regex", "choices", "json_schema"):
        raise Unsupported(f"the mock backend cannot check a {constraint.kind} constraint")
    answers = (cut, text)
    if reasons:
        answers = (split_reasoning(cut, None).answer, split_reasoning(text, None).answer)
    fault = None
    for answer in answers:
        try:
            value = fitted(constraint, answer)
        except Misfit as error:
            fault = fault or str(error)
        else:
            return cut if value == answer else value, None
    return cut, fault

"""FaultyBackend: another backend with injected faults, for tests of programs and of what runs them.

Which call meets which fault depends on the seed and on the content of the call, never on its time. The same
program meets the same faults each time, however its branches interleave. A fault is an error, a late answer,
a cut one, one in odd pieces, or none at all. An answer that arrives whole is that of the other backend.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Final

import msgspec

from sglang_dsl.backends.base import Backend, Call, ChoiceCall, ChoiceScores, Completion, Delta, Prompt
from sglang_dsl.errors import BackendError, BadProgram

FAULTS: Final[dict[str, str]] = {
    "error": "raises an error at once, of one kind or another",
    "error_midway": "raises an error after some pieces of a stream; without a stream, after the delay",
    "never": "never ends, until it is cancelled; in a stream, after some pieces",
    "stubborn": "never ends, and continues for the delay after it was cancelled",
    "late": "answers after the delay",
    "truncated": "a stream ends without its last piece; without a stream, a BackendError",
    "texts": "a wrong number of texts, or of scores",
    "nan": "scores that are not numbers; for a generation, a BackendError",
    "impossible": "scores of minus infinity for all options; for a generation, an answer as usual",
    "burst": "a stream's pieces one character each, without a pause",
    "blank": "a stream with empty pieces between its own",
    "paused": "a stream that waits for the delay between its pieces",
}
"""Each fault, and what it does."""
HARMLESS: Final = frozenset({"late", "burst", "blank", "paused", "impossible"})
"""Faults under which a call still answers."""


class LineCut(Exception):
    """An error of a kind that the language does not know, made in a way that it cannot make again."""

    def __init__(self, *, number: int) -> None:
        super().__init__(f"line {number} was cut")


class FaultyBackend(Backend):
    """`backend` with injected faults.

    rate     the fraction of calls that meet a fault, 0 to 1
    kinds    which of FAULTS to use
    delay_s  how long late answers take, in seconds
    commits  whether warming the cache meets faults, too

    For asserts it records: met (how often each fault was met), calls, in_flight. Raises BadProgram for
    unknown faults.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        seed: int = 0,
        rate: float = 0.3,
        kinds: Collection[str] = tuple(FAULTS),
        delay_s: float = 0.01,
        commits: bool = True,
    ) -> None:
        if unknown := sorted(set(kinds) - set(FAULTS)):
            raise BadProgram(f"unknown faults: {', '.join(unknown)}; known: {', '.join(FAULTS)}")
        if not 0 <= rate <= 1:
            raise BadProgram(f"rate must be between 0 and 1, got {rate!r}")
        self.backend, self.seed, self.rate = backend, seed, rate
        self.kinds, self.delay_s, self.commits = tuple(sorted(kinds)), delay_s, commits
        self.name = f"faulty {backend.name}"
        self.calls_tools = backend.calls_tools
        self.met: Counter[str] = Counter()
        self.calls = self.in_flight = 0
        self._seen: Counter[bytes] = Counter()

    # -- the verbs -------------------------------------------------------------------------------------------

    async def generate(self, call: Call) -> Completion:
        with self._flight():
            fault, chance = self._fault("generate", call)
            await self._before(fault, chance)
            if fault in ("error_midway", "truncated", "nan"):
                await asyncio.sleep(self.delay_s)
                self._fail(chance)
            done = await self.backend.generate(call)
            if fault == "texts":
                return Completion((*done.texts, "more") if chance % 2 else done.texts[1:], done.meta)
            return done

    async def stream(self, call: Call) -> AsyncIterator[Delta]:
        with self._flight():
            fault, chance = self._fault("stream", call)
            after = chance % 4
            if fault not in ("never", "stubborn") or not after:
                await self._before(fault, chance)
            if fault in ("nan", "texts"):
                self._fail(chance)
            deltas: Any = self.backend.stream(call)
            async with aclosing(deltas):
                count = 0
                async for delta in deltas:
                    if fault in ("error_midway", "truncated", "never", "stubborn") and (
                        count == after or delta.meta is not None
                    ):
                        if fault == "truncated":
                            return
                        if fault == "error_midway":
                            self._fail(chance)
                        await self._before(fault, chance)
                    count += 1
                    for piece in self._pieces(fault, delta):
                        yield piece
                    if fault == "paused":
                        await asyncio.sleep(self.delay_s)

    async def score(self, call: ChoiceCall) -> ChoiceScores:
        with self._flight():
            fault, chance = self._fault("score", call)
            await self._before(fault, chance)
            if fault in ("error_midway", "truncated"):
                await asyncio.sleep(self.delay_s)
                self._fail(chance)
            result = await self.backend.score(call)
            if fault == "texts":
                scores = result.scores[1:] if chance % 2 else (*result.scores, *result.scores)
                return ChoiceScores(scores, result.meta)
            if fault in ("nan", "impossible"):
                value = math.nan if fault == "nan" else -math.inf
                worst = (
                    dataclasses.replace(one, logprobs=(value,) * len(one.logprobs)) for one in result.scores
                )
                return ChoiceScores(tuple(worst), result.meta)
            return result

    async def commit(self, prompt: Prompt) -> None:
        with self._flight():
            if self.commits:
                fault, chance = self._fault("commit", prompt)
                await self._before(fault, chance)
                if fault in ("error_midway", "truncated"):
                    self._fail(chance)
            await self.backend.commit(prompt)

    async def info(self) -> dict[str, Any]:
        return {**await self.backend.info(), "backend": self.name, "met": dict(self.met)}

    # -- faults ----------------------------------------------------------------------------------------------

    def _fault(self, verb: str, request: Call | ChoiceCall | Prompt) -> tuple[str | None, int]:
        """The fault that this call meets, and a number of its own."""
        self.calls += 1
        text = repr((self.seed, verb, _described(request))).encode("utf-8", "surrogatepass")
        key = hashlib.blake2b(text, digest_size=16).digest()
        self._seen[key] += 1
        # Said again, it may meet something else: a program that tries again gets on.
        digest = hashlib.blake2b(key + str(self._seen[key]).encode(), digest_size=16).digest()
        share = int.from_bytes(digest[:4], "big") / 2**32
        chance = int.from_bytes(digest[8:], "big")
        if share >= self.rate or not self.kinds:
            return None, chance
        fault = self.kinds[int.from_bytes(digest[4:8], "big") % len(self.kinds)]
        self.met[fault] += 1
        return fault, chance

    async def _before(self, fault: str | None, chance: int) -> None:
        match fault:
            case "error":
                self._fail(chance)
            case "late":
                await asyncio.sleep(self.delay_s)
            case "never":
                await asyncio.Event().wait()
            case "stubborn":
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(self.delay_s)

    @staticmethod
    def _fail(chance: int) -> None:
        kinds: tuple[BaseException, ...] = (
            OSError("the line was cut"),
            TimeoutError("the line was silent"),
            ValueError("no JSON"),
            LineCut(number=chance % 10),
            BackendError("the server is busy", status=503, retryable=True, request_id=f"r{chance % 1000}"),
            SystemExit(chance % 7),
        )
        raise kinds[chance // 7 % len(kinds)]

    @staticmethod
    def _pieces(fault: str | None, delta: Delta) -> Iterator[Delta]:
        match fault:
            case "burst":
                for character in delta.text:
                    yield Delta(character)
                if delta.meta is not None:
                    yield Delta("", delta.meta)
            case "blank":
                yield Delta("")
                yield delta
            case _:
                yield delta

    @contextmanager
    def _flight(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


def _described(request: Call | ChoiceCall | Prompt) -> Any:
    """What a call says, as plain data."""
    if isinstance(request, Prompt):
        return msgspec.to_builtins(request.messages)
    rest = [getattr(request, name) for name in request.__struct_fields__ if name not in ("prompt", "peeks")]
    return [_described(request.prompt), *(repr(one) for one in rest)]

"""Helpers of the scheduler's tests: a small vocabulary, a toy grammar under the test's control, an exact
account."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime.cache.radix import RadixCache
from runtime.config.scheduler import SchedulerConfig
from runtime.grammar.base import Matcher
from runtime.plan import TokenMask
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint
from runtime.protocol.io_struct import TokenizedGenerateReqInput, TokenOutput
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.loop import Loop, step
from runtime.scheduler.requests.adapters import AdapterRegistry
from runtime.scheduler.scheduler import Scheduler
from runtime.scheduler.stage import Stage
from tests.unit.runtime.scheduler.fake import FakeRunner

EOS = 0
LETTERS = [bytes([code]) for code in range(ord("a"), ord("z") + 1)]
PAIRS = [b"ab", b"abc", b"th", b"the", b"he", b"in", b"ing", b"er", b" a", b"st", b"xyz", b"zz"]
TOKENS = (b"", *LETTERS, b" ", b"\n", *PAIRS)
VOCABULARY = Vocabulary(TOKENS, frozenset({EOS}), frozenset({EOS}))


class ChoiceMatcher(Matcher):
    """Accepts exactly one of some texts: small enough to be right by inspection."""

    def __init__(self, texts: Iterable[bytes], vocabulary: Vocabulary) -> None:
        self.texts = frozenset(texts)
        self.vocabulary = vocabulary
        self.done: list[tuple[bytes, bool]] = []
        self.seen = b""
        self.ended = False

    def _goes_on(self, data: bytes) -> bool:
        return any(text.startswith(self.seen + data) for text in self.texts)

    def advance(self, token: int) -> bool:
        if token in self.vocabulary.eos:
            if not self.may_stop():
                return False
            self.done.append((self.seen, self.ended))
            self.ended = True
            return True
        data = self.vocabulary.tokens[token]
        return bool(data) and self.advance_bytes(data)

    def advance_bytes(self, data: bytes) -> bool:
        if self.ended or not self._goes_on(data):
            return False
        self.done.append((self.seen, self.ended))
        self.seen += data
        return True

    def mask(self) -> TokenMask:
        ids = [
            token
            for token, data in enumerate(self.vocabulary.tokens)
            if (token in self.vocabulary.eos and self.may_stop())
            or (data and not self.ended and self._goes_on(data))
        ]
        bits = np.zeros(-(-len(self.vocabulary) // 32), dtype=np.uint32)
        for token in ids:
            bits[token // 32] |= np.uint32(1 << (token % 32))
        return TokenMask(bits, np.array(ids, dtype=np.int64))

    def forced_bytes(self) -> bytes:
        here = {text for text in self.texts if text.startswith(self.seen)}
        if self.ended or self.seen in here or not here:
            return b""
        forced = min(here)[len(self.seen) :]
        for text in here:
            rest = text[len(self.seen) :]
            while not rest.startswith(forced):
                forced = forced[:-1]
        return forced

    def may_stop(self) -> bool:
        return not self.ended and self.seen in self.texts

    def is_terminated(self) -> bool:
        longer = any(text.startswith(self.seen) and text != self.seen for text in self.texts)
        return self.ended or (self.seen in self.texts and not longer)

    def rollback(self, steps: int) -> None:
        for _ in range(steps):
            self.seen, self.ended = self.done.pop()

    def copy(self) -> Matcher:
        twin = ChoiceMatcher(self.texts, self.vocabulary)
        twin.seen, twin.ended, twin.done = self.seen, self.ended, list(self.done)
        return twin


class ToyGrammars:
    """Compiles `a|b|c` when the test says so. `ready`: at once; otherwise release() is waited for."""

    def __init__(self, vocabulary: Vocabulary, *, ready: bool = True) -> None:
        self.vocabulary = vocabulary
        self.ready = ready
        self.waiting: list[tuple[Future[Matcher], Constraint]] = []

    def submit(self, constraint: Constraint) -> Future[Matcher]:
        future: Future[Matcher] = Future()
        self.waiting.append((future, constraint))
        if self.ready:
            self.release()
        return future

    def release(self, count: int = 1 << 30) -> None:
        for future, constraint in self.waiting[:count]:
            if not future.set_running_or_notify_cancel():
                continue
            if constraint.spec.startswith("!"):
                future.set_exception(BadConstraint("starts with !", where="regex"))
            else:
                texts = [text.encode() for text in constraint.spec.split("|")]
                future.set_result(ChoiceMatcher(texts, self.vocabulary))
        del self.waiting[:count]


def encode(text: str) -> list[int]:
    """Longest token first, from the left."""
    data, ids = text.encode(), []
    while data:
        size, token = max((len(b), i) for i, b in enumerate(TOKENS) if b and data.startswith(b))
        ids.append(token)
        data = data[size:]
    return ids


class Bench:
    """A scheduler on a FakeRunner, the news it gave, and an exact account of its slots."""

    def __init__(
        self,
        config: dict[str, Any],
        slots: int,
        grammar: Any,
        clock: Callable[[], float],
        stage: Any,
        adapters: dict[str, Any] | None = None,
    ) -> None:
        """adapters: numbers of an AdapterRegistry; None: there is none."""
        self.vocabulary = VOCABULARY
        self.runner = FakeRunner(slots, len(TOKENS))
        self.adapters = None if adapters is None else AdapterRegistry(self.runner, (), **adapters)
        self.scheduler = Scheduler(
            SchedulerConfig(**config),
            slots=slots,
            vocabulary=self.vocabulary,
            encode=encode,
            grammar=grammar,
            clock=clock,
            verify_params=FakeRunner(1, len(TOKENS)).verify,
            stage=stage,
            adapters=self.adapters,
        )
        self.overlapped = config.get("overlap", False)
        self._loop: Loop | None = None
        self.news: dict[str, list[TokenOutput]] = {}

    def add(self, rid: str, prompt: Sequence[int], **fields: Any) -> None:
        params = SamplingParams(
            **{name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__}
        )
        self.scheduler.add(
            TokenizedGenerateReqInput(rid=rid, input_ids=list(prompt), sampling_params=params, **fields)
        )

    def tick(self) -> list[TokenOutput]:
        if self.overlapped:
            self._loop = self._loop or Loop(self.scheduler, self.runner, overlap=True)
            outputs = self._loop.step()
        else:
            outputs = step(self.scheduler, self.runner)
        self.scheduler.check()
        for output in outputs:
            self.news.setdefault(output.rid, []).append(output)
        return outputs

    def run(self, ticks: int = 10_000) -> Bench:
        for _ in range(ticks):
            if not self.scheduler.busy:
                return self
            self.tick()
        raise AssertionError(f"not done after {ticks} ticks: {self.scheduler.state()}")

    def answer(self, rid: str) -> TokenOutput:
        """The news of `rid` put together; exactly one of them has a finish reason, the last, and at most one
        the prompt's log-probabilities."""
        parts = self.news[rid]
        assert [part.finish is not None for part in parts] == [False] * (len(parts) - 1) + [True], parts
        last = parts[-1]
        last.new_ids = [token for part in parts for token in part.new_ids]
        last.output_logprobs = [value for part in parts for value in part.output_logprobs]
        last.output_top_logprobs = [value for part in parts for value in part.output_top_logprobs]
        last.output_origins = [origin for part in parts for origin in part.output_origins]
        for part in [part for part in parts[:-1] if part.input_logprobs is not None]:
            assert last.input_logprobs is None
            last.input_logprobs, last.input_top_logprobs = part.input_logprobs, part.input_top_logprobs
            last.input_token_ids_logprobs = part.input_token_ids_logprobs
        self.news[rid] = [last]
        return last

    def text(self, rid: str) -> bytes:
        return b"".join(TOKENS[token] for token in self.answer(rid).new_ids)

    def account(self) -> None:
        """Every slot of the pool belongs to exactly one of free list, cache, leases; the cache's sums are
        right."""
        manager = self.scheduler.manager
        owners = [0] * manager.slots

        def own(runs: Iterable[Any]) -> None:
            for start, length in runs:
                for slot in range(start, start + length):
                    owners[slot] += 1

        own(manager.allocator.free_runs())
        if isinstance(manager.cache, RadixCache):
            locked = unlocked = 0
            for node in manager.cache.nodes():
                own(node.runs)
                locked += node.length * bool(node.locks)
                unlocked += node.length * (not node.locks)
                assert sum(run.length for run in node.runs) == node.length == len(node.tokens)
            assert (locked, unlocked) == (manager.cache.protected, manager.cache.evictable)
        for request in self.scheduler._batch.running:
            assert request.lease is not None
            own(request.lease.slots())
        assert owners == [1] * manager.slots

    def empty(self) -> None:
        """Nothing is held any more: all slots are free once the cache is flushed."""
        manager = self.scheduler.manager
        assert manager.cache.protected == 0
        assert manager.allocator.free + manager.cache.evictable == manager.slots
        self.account()
        assert self.scheduler.flush_cache()
        assert manager.allocator.free == manager.slots


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_given_up_for_its_time() -> Iterator[None]:
    """What a search for a completion finds, and whether a constraint is followed, may not depend on how fast
    the machine is. (A test of the limit sets one.)"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.grammar.completion.time", SimpleNamespace(thread_time=lambda: 0.0))
        patch.setattr("runtime.scheduler.guided.masks.GRAMMAR_S", float("inf"))
        yield


@pytest.fixture(scope="session")
def make_bench() -> Callable[..., Bench]:
    """For hypothesis, which wants fixtures that outlive an example."""

    def make(
        slots: int = 512,
        *,
        grammar: Any = None,
        clock: Callable[[], float] = lambda: 0.0,
        stage: Any = Stage,
        adapters: dict[str, Any] | None = None,
        **config: Any,
    ):
        return Bench(config, slots, grammar, clock, stage, adapters)

    return make


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Callable[..., Bench]:
    return make_bench


@pytest.fixture(scope="session")
def toy_grammars() -> Callable[..., ToyGrammars]:
    return lambda **how: ToyGrammars(VOCABULARY, **how)


@pytest.fixture
def vocabulary() -> Vocabulary:
    return VOCABULARY

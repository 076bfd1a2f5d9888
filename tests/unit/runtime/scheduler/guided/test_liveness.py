"""Constrained requests on the FakeRunner, a model that wants nothing and never wants to end: every output
parses, whatever has to be taken back for it, and nobody else notices."""

from __future__ import annotations

import json
import random
from concurrent.futures import Future
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from runtime.cache.radix import RadixCache
from runtime.config.scheduler import SchedulerConfig
from runtime.grammar.base import Matcher, first_completion
from runtime.grammar.completion import at_once
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint
from runtime.protocol.io_struct import TokenizedGenerateReqInput, TokenOutput
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.guided.liveness import Liveness
from runtime.scheduler.loop import Loop, step
from runtime.scheduler.requests.components import Guide
from runtime.scheduler.scheduler import Scheduler
from tests.unit.runtime.scheduler.fake import START, FakeRunner, draw, follow, logprob

PIECES = [
    b'":',
    b'": ',
    b', "',
    b'"}',
    b"]}",
    b"[]",
    b"{}",
    b"1,",
    b"10",
    b"], ",
    b"true",
    b"null",
    b'"b"',
    b'ab"',
]
TOKENS = (*(bytes([value]) for value in range(256)), *PIECES, b"")
EOS = len(TOKENS) - 1
VOCABULARY = Vocabulary(TOKENS, frozenset({EOS}), frozenset({EOS}))

SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
     "required": ["a", "b"]},
    {"type": "array", "items": {"enum": [1, 2, 3, 4]}, "uniqueItems": True, "minItems": 3},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 30}, "contains": {"const": 21}},
    {"type": "string", "not": {"enum": ["a", "b", ""]}, "maxLength": 3},
    {"if": {"type": "integer"}, "then": {"multipleOf": 3}, "else": {"type": "boolean"}},
    {"type": "object", "properties": {"a": True, "b": {"type": "null"}}, "dependentRequired": {"a": ["b"]},
     "additionalProperties": False},
    {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "integer"},
     "uniqueItems": True, "minItems": 2}, "y": {"type": "string", "minLength": 4}}, "required": ["x", "y"]},
    {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
    {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {"type": "null"},
     "minProperties": 2},
]  # fmt: skip
HOPELESS = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 4, "contains": {"const": 3}}


def encode(text: str) -> list[int]:
    data, ids = text.encode(), []
    while data:
        size, token = max(
            (len(one), -number) for number, one in enumerate(TOKENS) if one and data.startswith(one)
        )
        ids.append(-token)
        data = data[size:]
    return ids


@lru_cache(maxsize=64)
def compiled(constraint: Constraint) -> Matcher:
    return make_backend("llguidance", VOCABULARY, whitespace="single").compile(constraint)


class Compiled:
    """Compiles at once."""

    def submit(self, constraint: Constraint) -> Future[Matcher]:
        future: Future[Matcher] = Future()
        future.set_result(compiled(constraint).copy())
        return future


def schema(value: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(value))


@lru_cache(maxsize=64)
def shortest(constraint: Constraint) -> int:
    ids = first_completion(compiled(constraint).copy()).ids
    assert ids is not None
    return len(ids)


class Sim:
    """A scheduler on a FakeRunner; after every tick, every slot has exactly one owner."""

    def __init__(self, slots: int = 4000, **config: Any) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(**config), slots=slots, vocabulary=VOCABULARY, encode=encode, grammar=Compiled(),
            clock=lambda: 0.0,
        )  # fmt: skip
        self.runner = FakeRunner(slots, len(TOKENS))
        self.loop = Loop(self.scheduler, self.runner, overlap=True) if config.get("overlap") else None
        self.news: dict[str, list[TokenOutput]] = {}

    def add(self, rid: str, prompt: list[int], **fields: Any) -> None:
        names = SamplingParams.__struct_fields__
        params = SamplingParams(**{name: fields.pop(name) for name in list(fields) if name in names})
        self.scheduler.add(
            TokenizedGenerateReqInput(rid=rid, input_ids=prompt, sampling_params=params, **fields)
        )

    def tick(self) -> None:
        outputs = self.loop.step() if self.loop else step(self.scheduler, self.runner)
        self.scheduler.check()
        for output in outputs:
            self.news.setdefault(output.rid, []).append(output)

    def run(self, ticks: int = 20_000) -> Sim:
        for _ in range(ticks):
            if not self.scheduler.busy:
                return self.owned()
            self.tick()
        raise AssertionError(f"not done: {self.scheduler.state()}")

    def owned(self) -> Sim:
        manager = self.scheduler.manager
        owners = [0] * manager.slots
        runs = list(manager.allocator.free_runs())
        if isinstance(manager.cache, RadixCache):
            runs += [run for node in manager.cache.nodes() for run in node.runs]
        for request in self.scheduler._batch.running:
            assert request.lease is not None
            runs += request.lease.slots()
        for start, length in runs:
            for slot in range(start, start + length):
                owners[slot] += 1
        assert owners == [1] * manager.slots
        return self

    def ids(self, rid: str) -> list[int]:
        return [token for part in self.news[rid] for token in part.new_ids]

    def text(self, rid: str) -> bytes:
        return b"".join(TOKENS[token] for token in self.ids(rid))

    def last(self, rid: str) -> TokenOutput:
        last = self.news[rid][-1]
        assert [part.finish is None for part in self.news[rid]] == [True] * (len(self.news[rid]) - 1) + [
            False
        ]
        assert last.completion_tokens == len(self.ids(rid)) == last.decode_steps + last.jumped_tokens
        return last


def alone(prompt: list[int], count: int) -> list[int]:
    history, ids = follow(START, prompt), []
    for _ in range(count):
        ids.append(draw(history, len(TOKENS)))
        history = follow(history, ids[-1:])
    return ids


def scored(prompt: list[int], ids: list[int]) -> list[float]:
    history, values = follow(START, prompt), []
    for token in ids:
        values.append(logprob(history, token))
        history = follow(history, (token,))
    return values


CONFIGS: list[dict[str, Any]] = [
    {"chunked_prefill_size": 16, "max_running_requests": 8},
    {"slots": 400, "page_size": 4, "chunked_prefill_size": 32, "max_running_requests": 8},
    {"slots": 260, "chunked_prefill_size": 7, "max_running_requests": 12, "overlap": True},
    {"radix_cache": False, "jump_forward": False, "max_running_requests": 8},
    {"page_size": 16, "overlap": True, "max_running_requests": 16},
]


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_every_constrained_output_parses_and_free_ones_are_as_alone(number: int) -> None:
    rng = random.Random(number)
    sim = Sim(**CONFIGS[number])
    wanted: dict[str, tuple[Any, dict[str, Any]]] = {}
    for rid in map(str, range(36)):
        prompt = [rng.randrange(97, 123) for _ in range(rng.randrange(1, 30))]
        value = rng.choice(SCHEMAS)
        fields: dict[str, Any] = {"prompt": prompt, "stream": rng.random() < 0.5}
        if rng.random() < 0.25:
            fields |= {"max_new_tokens": rng.randrange(1, 40), "ignore_eos": True}
            wanted[rid] = None, fields
            sim.add(rid, **fields)
            continue
        least = shortest(schema(value))
        fields["max_new_tokens"] = least + rng.choice([0, 0, 1, 3, 10, 40])
        fields["return_logprob"] = rng.random() < 0.3
        fields["ignore_eos"] = rng.random() < 0.3
        if rng.random() < 0.2:
            fields["return_hidden_states"] = True
        if rng.random() < 0.2:
            fields["min_new_tokens"] = rng.randrange(least + 1)
        wanted[rid] = value, fields
        sim.add(rid, constraint=schema(value), **fields)
        for _ in range(rng.randrange(3)):
            sim.tick()
    sim.run()
    closed = 0
    for rid, (value, fields) in wanted.items():
        last = sim.last(rid)
        assert last.finish is not None
        if value is None:
            assert sim.ids(rid) == alone(fields["prompt"], fields["max_new_tokens"])
            continue
        closes = last.grammar is not None and last.grammar.closed_by_budget
        full = len(sim.ids(rid)) == fields["max_new_tokens"] and sim.ids(rid)[-1] != EOS
        assert last.finish.type == ("length" if closes or full else "stop"), (value, fields, last.finish)
        assert len(sim.ids(rid)) <= fields["max_new_tokens"]
        jsonschema.validate(json.loads(sim.text(rid)), value)
        scores = [score for part in sim.news[rid] for score in part.output_logprobs]
        assert len(scores) == len(sim.ids(rid)) * fields["return_logprob"]
        assert None not in scores
        if fields["return_logprob"]:
            assert scores == scored(fields["prompt"], sim.ids(rid))
        closed += closes
    assert closed > 3
    assert sim.scheduler.flush_cache()
    assert sim.scheduler.manager.allocator.free == sim.scheduler.manager.slots


def test_what_a_search_found_is_not_searched_for_again_where_it_is_too_long() -> None:
    matcher = compiled(schema(SCHEMAS[0])).copy()
    assert matcher.advance_bytes(b'{"a": "some')
    held = matcher.closing(64)
    assert held
    request: Any = SimpleNamespace(guide=Guide(matcher))
    for room, found, expected, searches in (
        (len(held), True, held, 0),
        (len(held) - 1, True, None, 0),
        (len(held) - 1, False, None, 1),
    ):
        ids = at_once(Liveness._searched(request, matcher, held, room, later=found))
        assert (ids, request.guide.searches) == (expected, searches)


def test_without_a_budget_problem_output_is_taken_back_and_goes_on() -> None:
    """Rejections alone: the search for completions is off, so the only way is back."""
    seen = 0
    for number, config in enumerate(({}, {"page_size": 4}, {"overlap": True}, {"radix_cache": False})):
        sim = Sim(liveness=False, max_rejections=500, max_taken_back=4000, **config)
        value = {
            "type": "array",
            "items": {"enum": [[1], [10], [2]]},
            "uniqueItems": True,
            "minItems": 3,
            "maxItems": 3,
        }
        for rid in range(12):
            stem = [97] * 20
            sim.add(
                f"{rid}", [*stem, 98 + rid + 12 * number], constraint=schema(value), max_new_tokens=60,
                stream=rid % 2 == 0, return_logprob=rid % 3 == 0,
            )  # fmt: skip
        sim.run()
        for rid in range(12):
            last = sim.last(str(rid))
            assert last.finish is not None
            assert last.finish.type == "stop", last.finish
            jsonschema.validate(json.loads(sim.text(str(rid))), value)
            assert last.grammar is not None
            seen += last.grammar.rollbacks
            if rid % 3 == 0:
                scores = [score for part in sim.news[str(rid)] for score in part.output_logprobs]
                assert scores == scored([*[97] * 20, 98 + rid + 12 * number], sim.ids(str(rid)))
    assert seen > 0


@pytest.mark.parametrize("stream", [False, True])
def test_tries_end_with_an_error_that_says_what_and_where(stream: bool) -> None:
    sim = Sim(max_rejections=5)
    sim.add("a", [1, 2], constraint=schema(HOPELESS), max_new_tokens=80, stream=stream)
    sim.add("b", [3, 4], max_new_tokens=12, ignore_eos=True)
    sim.run()
    fault = sim.last("a").finish
    assert fault is not None
    assert fault.error is not None
    assert fault.error["code"] == "bad_constraint"
    assert "#/contains" in fault.error["message"]
    assert "taken back 5 times" in fault.error["message"]
    assert sim.ids("b") == alone([3, 4], 12)


def test_a_dead_end_of_an_exact_grammar_is_gone_back_from() -> None:
    """Tokens for `ab`, `a`, `c` but none for `b` alone: after `a` nothing follows in (abc|ab|ca)."""
    tokens = (b"a", b"ab", b"c", b"")
    vocabulary = Vocabulary(tokens, frozenset({3}), frozenset({3}))
    backend = make_backend("llguidance", vocabulary)

    class Gap(Compiled):
        def submit(self, constraint: Constraint) -> Future[Matcher]:
            future: Future[Matcher] = Future()
            future.set_result(backend.compile(constraint))
            return future

    for liveness in (False, True):
        scheduler = Scheduler(
            SchedulerConfig(liveness=liveness), slots=64, vocabulary=vocabulary, encode=lambda text: [0],
            grammar=Gap(), clock=lambda: 0.0,
        )  # fmt: skip
        runner = FakeRunner(64, len(tokens))
        texts = set()
        for number in range(12):
            scheduler.add(
                TokenizedGenerateReqInput(
                    rid=str(number),
                    input_ids=[number % 4, number % 3, number % 2],
                    sampling_params=SamplingParams(max_new_tokens=6),
                    constraint=Constraint("regex", "abc|ab|ca"),
                )
            )
        while scheduler.busy:
            for output in step(scheduler, runner):
                assert output.finish is not None
                closed = output.grammar is not None and output.grammar.closed_by_budget
                assert output.finish.type == ("length" if closed else "stop"), output.finish
                assert liveness or not closed
                texts.add(b"".join(tokens[token] for token in output.new_ids))
            scheduler.check()
        assert texts <= {b"abc", b"ab", b"ca"}


def test_what_is_told_is_never_taken_back() -> None:
    """Streams of every schema under a tight and a wide budget, token by token: news only grow and end as the
    whole text."""
    for number, value in enumerate(SCHEMAS[:6]):
        sim = Sim()
        for room in (0, 2, 30):
            sim.add(
                f"{room}", [number + 1], constraint=schema(value), stream=True,
                max_new_tokens=shortest(schema(value)) + room,
            )  # fmt: skip
        sim.run()
        for room in (0, 2, 30):
            last = sim.last(f"{room}")
            assert last.finish is not None
            assert last.finish.type in ("stop", "length")
            jsonschema.validate(json.loads(sim.text(f"{room}")), value)

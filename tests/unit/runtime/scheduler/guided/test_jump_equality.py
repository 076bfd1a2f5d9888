"""With jump-forward and without it a request gives the same tokens, and where text is forced they are the
tokenizer's own."""

from __future__ import annotations

import random
import re
from concurrent.futures import Future
from typing import Any

import pytest

from runtime.config.scheduler import SchedulerConfig
from runtime.grammar.backends.outlines_backend import OutlinesGrammarBackend
from runtime.grammar.base import Matcher
from runtime.grammar.jump_plan import JumpPlanner
from runtime.plan import Row, RowResult, Sample, StepPlan, TokenMask
from runtime.protocol.constraint import Constraint
from runtime.protocol.io_struct import TokenizedGenerateReqInput, TokenOutput
from runtime.protocol.sampling import SamplingParams
from runtime.scheduler.loop import step
from runtime.scheduler.scheduler import Scheduler
from tests.unit.runtime.grammar.conftest import MAKERS, Trained
from tests.unit.runtime.scheduler.fake import FakeRunner

LITERALS = [
    '{"name": "', '", "age": ', ', "alive": ', '"}', "The answer is ", ". It's ", " don't ", "\n\n", "  \n",
    "東京 ", "안녕하세요", " 😊 ", "é", ": [", "]]", "x1 = ", " 2026-", "'re ", "house", " Harry Potter, ",
    "\n  ", "?!", " - ", "I'll ", "\t", "e.g. ", "()", '\\"',
]  # fmt: skip
CHOICES = {
    "[a-z]{1,6}": ["a", "the", "name", "xqz", "housed"],
    r"\d{1,3}": ["7", "42", "202"],
    "(true|false|null)": ["true", "false", "null"],
    "(the|then|them) ": ["the ", "then ", "them "],
    "(Paris|Pavia|Rome)": ["Paris", "Pavia", "Rome"],
    "[A-Z][a-z]*": ["X", "Harry", "Yes"],
    "(안녕|안경|가나)": ["안녕", "안경", "가나"],
    "(😊|😋|☃)": ["😊", "😋", "☃"],
    "[a-z ]{0,8}": ["", "a", "the fox", " "],
    "('s|'re|x)": ["'s", "'re", "x"],
    "( yes|, no|\n+x)": [" yes", ", no", "\nx", "\n\nx"],
    "(ab|abc|abcd)": ["ab", "abc", "abcd"],
    '[^"]{1,4}': ["quic", "a b", "é", " - ", "{}"],
    "": [""],
}
PROMPTS = ("Say: ", "A", '{"x": 1, "y"', "東", "house 12", "\n", "it")


class Ready:
    """Compiles at once."""

    def __init__(self, backend: OutlinesGrammarBackend) -> None:
        self.backend = backend

    def submit(self, constraint: Constraint) -> Future[Matcher]:
        future: Future[Matcher] = Future()
        future.set_result(self.backend.compile(constraint))
        return future


def grammar_of(pick: random.Random) -> tuple[str, str]:
    """A regular expression and a text that it matches."""
    spec = text = pick.choice(("", pick.choice(LITERALS)))
    spec = re.escape(spec)
    for last in [False] * pick.randint(1, 4) + [True]:
        choice = pick.choice(list(CHOICES))
        literal = "" if last else "".join(pick.choice(LITERALS) for _ in range(pick.randint(1, 3)))
        spec, text = spec + choice + re.escape(literal), text + pick.choice(CHOICES[choice]) + literal
    return spec, text


def run(
    made: Trained,
    backend: OutlinesGrammarBackend,
    requests: list[TokenizedGenerateReqInput],
    runner: FakeRunner,
    **config: Any,
) -> dict[str, TokenOutput]:
    scheduler = Scheduler(
        SchedulerConfig(**config), slots=runner.slots, vocabulary=made.vocabulary, encode=made.encode,
        grammar=Ready(backend), clock=lambda: 0.0,
    )  # fmt: skip
    for request in requests:
        scheduler.add(request)
    answers = {}
    for _ in range(5000):
        if not scheduler.busy:
            break
        for output in step(scheduler, runner):
            answers[output.rid] = output
    assert not scheduler.busy
    scheduler.check()
    return answers


def check_equal(made: Trained, backend: OutlinesGrammarBackend, seed: int, count: int) -> tuple[int, int]:
    """`count` random requests with jumps and without; (tokens, of them jumped)."""
    pick = random.Random(seed)
    requests = []
    for number in range(count):
        params = SamplingParams(
            max_new_tokens=pick.choice((3, 9, 20, 150)), temperature=0.0, stop=pick.choice(((), ("o",)))
        )
        requests.append(
            TokenizedGenerateReqInput(
                rid=str(number),
                input_ids=made.encode(pick.choice(PROMPTS)),
                sampling_params=params,
                constraint=Constraint("regex", grammar_of(pick)[0]),
                return_logprob=pick.random() < 0.3,
            )
        )
    runners = [FakeRunner(4000, len(made.vocabulary)) for _ in range(2)]
    fast = run(made, backend, requests, runners[0])
    slow = run(made, backend, requests, runners[1], jump_forward=False)
    tokens = jumped = 0
    for request in requests:
        one, other = fast[request.rid], slow[request.rid]
        assert one.new_ids == other.new_ids, request
        assert one.finish == other.finish, request
        assert one.output_logprobs == pytest.approx(other.output_logprobs)
        closed = other.grammar is not None and other.grammar.closed_by_budget
        assert other.jumped_tokens == 0 or closed
        for answer in (one, other):
            assert len(answer.new_ids) == answer.decode_steps + answer.jumped_tokens
        tokens, jumped = tokens + len(one.new_ids), jumped + one.jumped_tokens
        assert one.finish is not None
        assert request.constraint is not None
        if one.finish.type == "stop" and not request.sampling_params.stop:
            text = b"".join(made.vocabulary.tokens[token] for token in one.new_ids).decode()
            assert re.fullmatch(request.constraint.spec, text)
    return tokens, jumped


class Reciting(FakeRunner):
    """A model with a text in mind: it always takes the tokenizer's own next token of the whole text.
    `wanted`: by sequence its prompt and that text as ids, `eos` last."""

    def __init__(self, slots: int, vocab_size: int, wanted: list[list[int]]) -> None:
        super().__init__(slots, vocab_size)
        self.wanted = wanted
        self.read: dict[int, list[int]] = {}

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        for row in plan.rows:
            known = self.read.setdefault(row.seq, self.wanted[row.seq - 1][: row.position])  # cached
            known[row.position :] = row.tokens

    def _answer(self, row: Row, seen: list[int], mask: TokenMask | None) -> RowResult:
        if not row.sample:
            return RowResult()
        known, whole = self.read[row.seq], self.wanted[row.seq - 1]
        assert known == whole[: len(known)], "the sequence is not the tokenizer's own any more"
        token = whole[len(known)]
        assert mask is not None
        assert int(mask.bits[token >> 5]) >> (token & 31) & 1
        return RowResult((Sample(token),))


def check_canonical(made: Trained, backend: OutlinesGrammarBackend, seed: int, count: int) -> tuple[int, int]:
    """Random texts of random grammars by a model that knows the tokenizer's ids of them; (tokens, decode
    steps)."""
    pick, planner = random.Random(seed), JumpPlanner(made.vocabulary, made.encode)
    eos = min(made.vocabulary.eos)
    requests, wanted = [], []
    while len(requests) < count:
        (spec, text), prompt = grammar_of(pick), pick.choice(PROMPTS)
        whole, ids = planner.encode_exactly(prompt + text), planner.encode_exactly(prompt)
        if whole is None or ids is None or whole[: len(ids)] != ids:
            continue  # the seam itself is another token
        wanted.append([*whole, eos])
        requests.append(
            TokenizedGenerateReqInput(
                rid=str(len(requests)), input_ids=ids, constraint=Constraint("regex", spec),
                sampling_params=SamplingParams(max_new_tokens=600, temperature=0.0),
            )
        )  # fmt: skip
    tokens = steps = 0
    for jumping in (True, False):
        runner = Reciting(12000, len(made.vocabulary), wanted)
        answers = run(made, backend, requests, runner, jump_forward=jumping)
        for request, whole in zip(requests, wanted):
            answer = answers[request.rid]
            assert answer.finish is not None
            assert answer.finish.type == "stop", (request.constraint, answer)
            ids = [*request.input_ids, *answer.new_ids]
            assert ids in (whole, whole[:-1]), request
            if jumping:
                tokens, steps = tokens + len(answer.new_ids), steps + answer.decode_steps
    return tokens, steps


@pytest.fixture(scope="module")
def made() -> dict[str, Trained]:
    return {name: MAKERS[name]() for name in ("gpt2", "contractions", "sentencepiece")}


@pytest.mark.parametrize("name", ["gpt2", "contractions", "sentencepiece"])
def test_the_same_tokens_with_jumps_and_without(made: dict[str, Trained], name: str) -> None:
    backend = OutlinesGrammarBackend(made[name].vocabulary)
    tokens, jumped = check_equal(made[name], backend, seed=len(name), count=16)
    assert jumped > tokens // 10


@pytest.mark.parametrize(("name", "seed"), [("gpt2", 6), ("contractions", 10), ("contractions", 35)])
def test_a_stop_string_among_what_is_forced_goes_before_the_budget(
    made: dict[str, Trained], name: str, seed: int
) -> None:
    """A stop string within the forced text ends the output there, with jumps and without, also where the
    whole of that text leaves no room for a completion."""
    check_equal(made[name], OutlinesGrammarBackend(made[name].vocabulary), seed, 25)


@pytest.mark.parametrize("name", ["gpt2", "contractions", "sentencepiece"])
def test_tokens_are_the_tokenizer_s_own(made: dict[str, Trained], name: str) -> None:
    backend = OutlinesGrammarBackend(made[name].vocabulary)
    tokens, steps = check_canonical(made[name], backend, seed=len(name), count=16)
    assert steps * 2 < tokens


@pytest.mark.parametrize("name", ["gpt2", "contractions", "sentencepiece"])
def test_wholly_forced_text_is_the_tokenizer_s_own(made: dict[str, Trained], name: str) -> None:
    one = made[name]
    backend, pick = OutlinesGrammarBackend(one.vocabulary), random.Random(5)
    planner = JumpPlanner(one.vocabulary, one.encode)
    texts = ["".join(pick.choice(LITERALS) for _ in range(pick.randint(1, 6))) for _ in range(30)]
    requests = [
        TokenizedGenerateReqInput(
            rid=str(number), input_ids=one.encode("\n"), constraint=Constraint("regex", re.escape(text)),
            sampling_params=SamplingParams(max_new_tokens=200),
        )
        for number, text in enumerate(texts)
    ]  # fmt: skip
    for jumping in (True, False):
        runner = FakeRunner(4000, len(one.vocabulary))
        answers = run(one, backend, requests, runner, jump_forward=jumping)
        for number, text in enumerate(texts):
            ids = planner.encode_exactly("\n" + text)
            assert ids is not None
            start = len(one.encode("\n"))
            if ids[:start] == one.encode("\n"):  # else the seam itself is another token
                assert answers[str(number)].new_ids == ids[start:], text

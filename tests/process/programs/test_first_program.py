"""Whole programs on the bundled checkpoint: what a user sees."""

from __future__ import annotations

import inspect
import json
import re
import threading

import pytest

import sglang_dsl as sgl
from runtime.api import Engine
from runtime.protocol.sampling import SamplingParams
from sglang_dsl.console import demo
from sglang_dsl.errors import BackendError, MissingVariable, ProgramError
from tests.process.patience import in_pieces, until

CARD = r'\{"name": "[A-Z][a-z]{1,11}", "age": [0-9]{1,2}, "city": "[A-Z][a-z]{1,11}", "job": "[a-z]{1,11}"\}'
PEOPLE = [
    ("Mobi", 42, "Caturn", "potter"),
    ("Sturu", 27, "Zabo", "judge"),
    ("Gralt", 61, "Relo", "baker"),
]


@sgl.function
def extract(s, name, age, city, job, pattern):
    s += sgl.user(f"Extract name, age, city and job as JSON: {name}, {age}, is a {job} from {city}.")
    s += sgl.assistant(sgl.gen("card", regex=pattern, max_tokens=96, temperature=0))


def test_the_demo_program_answers_sensibly(engine):
    state = demo.tour.run(land="Ostrel", backend=engine)
    assert "Sarn" in state["river"]
    assert "Queen Ilva" in state["ruler"]
    dish, capital, neighbour = state["answers"]
    assert "plum soup" in dish
    assert "Belmar" in capital
    assert "Velmora" in neighbour
    assert state["sum"].endswith(" = 85")
    assert re.fullmatch(demo.SUM, state["sum"])
    assert state["mood"] == "positive"
    assert re.fullmatch(demo.CARD, state["card"])
    assert set(json.loads(state["card"])) == {"name", "age", "city", "job"}


def test_a_second_run_reuses_the_prefix(engine):
    until(engine.flush_cache)  # not while an earlier test's last request comes to its end
    prefix = "You answer questions.\n" + demo.FEW_SHOT

    @sgl.function
    def ask(s, question):
        s += sgl.system(prefix)
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))

    first = ask.run(question="Who rules Karsk?", backend=engine).get_meta_info("answer")
    second = ask.run(question="Which river runs through Zembla?", backend=engine).get_meta_info("answer")
    again = ask.run(question="Who rules Karsk?", backend=engine).get_meta_info("answer")
    shared = len(engine.encode(prefix))
    assert first["cached_tokens"] < shared // 4
    assert second["cached_tokens"] >= shared
    assert again["cached_tokens"] >= again["prompt_tokens"] - 2


@pytest.mark.parametrize(("name", "age", "city", "job"), PEOPLE)
def test_fixed_json_keys_are_jumped_not_decoded(engine, name, age, city, job):
    state = extract.run(name=name, age=age, city=city, job=job, pattern=CARD, backend=engine)
    assert re.fullmatch(CARD, state["card"])
    meta = state.get_meta_info("card")
    fixed = '{"name": "", "age": , "city": "", "job": ""}'
    values = "".join(str(v) for v in json.loads(state["card"]).values())
    assert len(state["card"]) == len(fixed) + len(values)
    assert meta["jumped_tokens"] > meta["completion_tokens"] // 3
    # What was decoded one by one is the values and a token at each border; the fixed part was jumped.
    decoded_for_fixed = meta["completion_tokens"] - meta["jumped_tokens"] - len(engine.encode(values))
    assert meta["jumped_tokens"] > max(0, decoded_for_fixed)
    assert meta["decode_steps"] < meta["completion_tokens"]


@pytest.mark.parametrize(("name", "age", "city", "job"), PEOPLE)
def test_jump_forward_changes_no_text(engine, plain_engine, name, age, city, job):
    texts = {
        extract.run(name=name, age=age, city=city, job=job, pattern=CARD, backend=which)["card"]
        for which in (engine, plain_engine)
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    "pattern",
    [
        r"(yes|no|maybe)",
        r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
        r"The answer is (A|B|C)\.",
        r'\{"ok": (true|false), "list": \[([0-9],){2}[0-9]\]\}',
        r"(é|è|한|😀)+x",
        r"\w{3,8}( \w{3,8}){2}",
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_always_matches_its_regex(engine, pattern, temperature):
    @sgl.function
    def free(s):
        s += sgl.user("Say something.")
        s += sgl.assistant(sgl.gen("x", regex=pattern, max_tokens=200, temperature=temperature))

    state = free.run(backend=engine)
    finish = state.get_meta_info("x")["finish_reason"]
    if finish["type"] == "length":  # an unbounded pattern may use up its budget
        assert pattern.endswith("x")
    else:
        assert re.fullmatch(pattern, state["x"])


def test_select_knows_what_the_model_knows(engine):
    @sgl.function
    def mood(s, review):
        s += sgl.user(f"Is this positive or negative? {review}")
        s += sgl.assistant(sgl.select("mood", choices=["positive", "negative"]))

    reviews = {"The film was awful.": "negative", "What a lovely garden!": "positive"}
    states = mood.run_batch([{"review": review} for review in reviews], backend=engine)
    assert [state["mood"] for state in states] == list(reviews.values())


def test_streaming_gives_the_same_text(engine):
    @sgl.function
    def ask(s):
        s += sgl.user("Who rules Hesper?")
        s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))

    whole = ask.run(backend=engine)["answer"]
    pieces = in_pieces(lambda: list(ask.run(backend=engine, stream=True).text_iter("answer")))
    assert "".join(pieces) == whole


def test_threads_do_not_grow_with_forks(engine):
    @sgl.function
    def wide(s):
        s += sgl.user("What is 21 + 34?")
        branches = s.fork(40)
        branches += sgl.assistant(sgl.gen("x", max_tokens=8, temperature=0))
        branches.join()

    before = threading.active_count()
    state = wide.run(backend=engine)
    assert len(state["x"]) == 40
    assert len(set(state["x"])) == 1
    assert threading.active_count() <= before + 2


def test_errors_name_the_place_and_the_engine_goes_on(engine):
    @sgl.function
    def too_long(s):
        s += sgl.user("word " * 5000)
        s += sgl.assistant(sgl.gen("answer"))  # the line that fails

    with pytest.raises(BackendError) as caught:
        too_long.run(backend=engine)["answer"]
    error = caught.value
    line = inspect.unwrap(too_long).__code__.co_firstlineno + 3
    assert error.program is not None
    assert "too_long" in error.program
    assert error.variable == "answer"
    assert error.source is not None
    assert (error.source.file, error.source.line) == (__file__, line)
    assert error.status == 400
    assert "2048" in str(error)

    @sgl.function
    def fine(s):
        s += sgl.user("Who rules Karsk?")
        s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))

    state = fine.run(backend=engine)
    assert "Queen Sabeth" in state["answer"]
    with pytest.raises(MissingVariable, match="nothing"):
        state["nothing"]

    @sgl.function
    def broken(s):
        s += sgl.user("Hello")
        raise ZeroDivisionError("the user's own mistake")

    with pytest.raises((ProgramError, ZeroDivisionError), match="own mistake"):
        broken.run(backend=engine).sync()
    assert isinstance(engine, Engine)


def test_sampling_with_a_seed_repeats(engine):
    params = SamplingParams(max_new_tokens=24, temperature=1.0, seed=7)
    alone = engine.generate("Q: Who rules Skarra?\nA:", params)
    crowd = engine.generate(
        ["Q: Who rules Skarra?\nA:"] + [f"Q: What is {i} + 2?\nA:" for i in range(20, 30)], params
    )
    assert crowd[0].output_ids == alone.output_ids

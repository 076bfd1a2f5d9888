"""What everybody writes wrongly in the first hour is an error that says the line to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl import BadProgram, MockBackend, gen, select


def discards_a_turn(s: Any) -> None:
    s += sgl.user("Hi")
    sgl.assistant(gen("a"))


def discards_a_gen(s: Any) -> None:
    gen("a", max_tokens=3)


def discards_in_a_fork(s: Any) -> None:
    s.map(lambda fork, x: discards_a_gen(fork), [1])


async def discards_in_async(s: Any) -> None:
    gen("a", stop=["."])


def discards_a_select(s: Any) -> None:
    select("a", ["x", "y"])


def discards_an_end(s: Any) -> None:
    s += sgl.user_begin() + "Hi"
    sgl.user_end()


def compares(s: Any) -> None:
    assert (gen("a") == "yes") is False


def compares_from_the_right(s: Any) -> None:
    assert select("a", ["yes", "no"]) != "yes"


def compares_a_number(s: Any) -> None:
    assert gen("a", int) == 3


def orders(s: Any) -> None:
    assert gen("a", int) > 3


def matches(s: Any) -> None:
    match gen("a"):
        case "yes":
            s += "agreed"


def looks_in_a_list(s: Any) -> None:
    assert gen("a") in ("yes", "no")


def looks_in_it(s: Any) -> None:
    assert "yes" in gen("a")


def branches(s: Any) -> None:
    if gen("a"):
        s += "b"


def loops(s: Any) -> None:
    for _ in gen("a"):
        s += "b"


def calls_a_method(s: Any) -> None:
    s += gen("a").strip()


def converts(s: Any) -> None:
    s += str(int(gen("a")))


def sets_a_node(s: Any) -> None:
    s["a"] = gen("a")


def sets_a_text_with_a_node(s: Any) -> None:
    s["a"] = f"I am {gen('a')}"


def adds_to_the_right(s: Any) -> None:
    s = s + sgl.user("Hi")


def adds_to_the_left(s: Any) -> None:
    s = sgl.user("Hi") + s


async def adds_in_async(s: Any) -> None:
    s = s + "Hi"


def adds_to_forks(s: Any) -> None:
    forks = s.fork(2)
    forks = forks + "Hi"


def adds_a_list(s: Any) -> None:
    s += [sgl.user("Hi"), gen("a")]


def adds_a_message(s: Any) -> None:
    s += {"role": "user", "content": "Hi"}


def adds_a_function(s: Any) -> None:
    s += sgl.user


def adds_a_number(s: Any) -> None:
    s += 3


def opens_a_node(s: Any) -> None:
    with sgl.user():
        s += "Hi"


def generates_on_the_state(s: Any) -> None:
    s.gen("a")


def reads_an_attribute(s: Any) -> None:
    s += gen("answer")
    s.answer.strip()


def reads_a_slip(s: Any) -> None:
    s += gen("answer")
    assert s["anser"]


def reads_nothing(s: Any) -> None:
    assert s["a"]


def reads_forks(s: Any) -> None:
    forks = s.fork(2)
    forks += gen("a")
    assert forks["a"]


def gives_options_as_text(s: Any) -> None:
    s += gen("a", choices="yes")


def gives_options_second(s: Any) -> None:
    s += gen("a", ["yes", "no"])  # type: ignore[call-overload]


def misspells(s: Any) -> None:
    s += gen("a", max_token=3)  # type: ignore[call-overload]


def misspells_a_typed_one(s: Any) -> None:
    s += gen("a", int, temprature=0)  # type: ignore[call-overload]


MISTAKES: dict[Callable[[Any], Any], str] = {
    discards_a_turn: r"s \+= assistant\(",
    discards_a_gen: r"s \+= gen\(",
    discards_in_a_fork: r"s \+= gen\(",
    discards_in_async: r"s \+= gen\(",
    discards_a_select: r"s \+= select\(",
    discards_an_end: r"s \+= user_end\(",
    **dict.fromkeys(
        (compares, compares_from_the_right, compares_a_number, orders, matches, looks_in_a_list, looks_in_it,
         branches, loops, calls_a_method, converts),
        r"s \+= (gen|select)\('a'\), then use s\['a'\]",
    ),
    sets_a_node: r"s \+= gen\('a'\)",
    sets_a_text_with_a_node: r"s \+= gen\('a'\)",
    **dict.fromkeys(
        (adds_to_the_right, adds_to_the_left, adds_in_async, adds_to_forks), r"s \+= \.\.\., not s = "
    ),
    adds_a_list: r"s \+= a \+ b",
    adds_a_message: r's \+= user\("',
    adds_a_function: r"s \+= user\(",
    adds_a_number: r"s \+= str\(",
    opens_a_node: r"with s\.user\(",
    generates_on_the_state: r"s \+= gen\(",
    reads_an_attribute: r"s\['answer'\]",
    reads_a_slip: "did you mean 'answer'",
    reads_nothing: r"s \+= gen\('a'\)",
    reads_forks: r"\[fork\[name\] for fork in forks\]",
    gives_options_as_text: r"choices=\['yes', ...\]",
    gives_options_second: r"choices=\[",
    misspells: "did you mean 'max_tokens'",
    misspells_a_typed_one: "did you mean 'temperature'",
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_first_mistake_says_the_line_to_write(mistake: Any) -> None:
    with pytest.raises((sgl.SglError, TypeError), match=MISTAKES[mistake]):
        sgl.function(mistake).run(backend=MockBackend()).sync()


def test_what_is_no_mistake_is_left_alone() -> None:
    node = gen("a")
    assert node == gen("a")
    assert node != select("a", ["yes", "no"])
    assert node is not None
    assert node not in (None, sgl.user("yes"))
    assert not hasattr(node, "strip")
    gen("a")  # not in a program: nothing is lost

    @sgl.function
    def program(s: Any) -> None:
        s.user("Hi")  # adds its turn by itself
        made = [gen("a"), gen("b")]
        s.assistant(made[0] + made[1])
        s["c"] = "a [[0:0:0]]"

    state = program.run(backend=MockBackend())
    assert state["a"]
    assert state["b"]


@pytest.mark.parametrize(
    ("run", "line"),
    [
        (lambda p: p.run("Hi"), r"def stateless\(s, question\)"),
        (lambda p: p(question="Hi"), r"def stateless\(s, question\)"),
        (lambda p: p.run_batch([("Hi",)]), r"def stateless\(s, question\)"),
        (lambda p: p.run(temprature=0), "did you mean 'temperature'"),
        (lambda p: p.run_batch([()], num_thread=3), "did you mean 'num_threads'"),
        (lambda p: p.run_batch(["a"]), r"write \('a',\)"),
        (lambda p: p.run(backend="pocket"), r"Engine\('pocket'\)"),
        (lambda p: p.run(backend="some/model"), r"Engine\('some/model'\)"),
        (lambda p: p.run(backend="gpt-9"), r"OpenAI\('gpt-9'\)"),
        (lambda p: p.run(backend="anthropic"), r"Anthropic\(MODEL\)"),
        (lambda p: p.run(backend="localhost:30000"), "http://localhost:30000"),
        (lambda p: p.run(backend=MockBackend), r"write MockBackend\("),
    ],
)
def test_a_wrong_call_says_the_line_to_write(run: Any, line: str) -> None:
    @sgl.function
    def stateless(question: Any) -> None: ...

    with pytest.raises((sgl.SglError, TypeError, KeyError), match=line):
        run(stateless)


OPTIONS = {"temperature": 0.2, "max_tokens": 40, "stop": ["."], "timeout": 3}


def sets_on_a_state(s: Any, name: str, value: Any) -> None:
    setattr(s, name, value)


async def sets_on_an_async_state(s: Any, name: str, value: Any) -> None:
    setattr(s, name, value)


def sets_on_a_branch(s: Any, name: str, value: Any) -> None:
    setattr(s.fork(2)[1], name, value)


def sets_on_a_copy(s: Any, name: str, value: Any) -> None:
    with s.copy() as branch:
        setattr(branch, name, value)


def sets_on_forks(s: Any, name: str, value: Any) -> None:
    setattr(s.fork(2), name, value)


async def sets_on_async_forks(s: Any, name: str, value: Any) -> None:
    setattr(s.fork(2), name, value)


@pytest.mark.parametrize(
    "sets",
    [
        sets_on_a_state,
        sets_on_an_async_state,
        sets_on_a_branch,
        sets_on_a_copy,
        sets_on_forks,
        sets_on_async_forks,
    ],
)
def test_an_attribute_set_on_a_state_is_refused(sets: Any) -> None:
    program = sgl.function(sets)
    for name, value in OPTIONS.items():
        with pytest.raises(AttributeError, match=rf"gen\(\.\.\., {name}=.*@function\({name}=") as caught:
            program.run(name, value, backend=MockBackend())
        assert isinstance(caught.value, BadProgram)
    for name, line in {"backend": "program.run", "topic": r"\['topic'\] = ", "fork": "cannot|has no"}.items():
        with pytest.raises(AttributeError, match=line):
            program.run(name, 3, backend=MockBackend())

"""What compiling tells of a program: its constant begin, its forks, what can be asked for at once, and what a
run would cost; and the passes by themselves."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from runtime.protocol.messages import Message
from sglang_dsl import MockBackend, NoBackend, Program, gen, select
from sglang_dsl.backends.base import Prompt
from sglang_dsl.budgets import price_per_million
from sglang_dsl.ir import Fork, Gen, Join, ScopeEnd, Seq, Text
from sglang_dsl.ir.passes import common, hoist, merge_text, plan_forks, sets, tidy, variables, waves


@sgl.function
def tip(s: Any, topic: str) -> None:
    s += sgl.user("Expand: " + topic)
    s += sgl.assistant(gen("more", max_tokens=20))


@sgl.function
def tree(s: Any, topic: str, n: int = 3) -> None:
    s += sgl.user(f"About {topic}: say it.")
    s += sgl.assistant(gen("a", max_tokens=16))
    s += sgl.user("Parts.")
    forks = s.fork(n)
    for i, f in enumerate(forks):
        f += f"Part {i}, given {s['a']}?" if i else "Part 0"
        f += gen("p", max_tokens=8) + select("ok", ["yes", "no"])
    forks.join()
    called: Any = tip
    tips = [called(s["a"]), called("b")]
    s += sgl.user("Sum " + " ".join(s["p"]) + "".join(t["more"] for t in tips))
    s += sgl.assistant(gen("sum", max_tokens=32))


def text_of(prompt: Prompt) -> str:
    return "".join(str(message.content) for message in prompt.messages)


# -- cache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("say", "begin"),
    [
        (lambda x: f"Rules. {x} said", "Rules. "),
        (lambda x: "Rules. {x} " + x, "Rules. {x} "),
        (lambda x: f"Rules. {x!r}", "Rules. '"),
        (lambda x: "Rules. " + json.dumps(x), 'Rules. "'),
        (lambda x: "Rules. {}".format(x), "Rules. "),  # noqa: UP032
        (lambda x: "Rules. " + x.upper().strip()[2:5], "Rules. "),
        (lambda x: "Rules. " + x["deep"].title + x.get("a"), "Rules. "),
        (lambda x: f"Rules. {x:>10} and {x:.2f}", "Rules. "),
        (lambda x: f"Rules. {x}" if x else "None.", ""),
        (lambda x: f"Rules. {x}" if x == "a" else "None.", ""),
        (lambda x: "Rules. " * int(x), ""),
        (lambda x: "Rules. ".join(x), ""),
        (lambda x: f"Rules. {len(x)}", ""),
        (lambda x: {}[x], ""),
        (lambda x: 1 / 0, ""),
    ],
)
def test_the_begin_is_cut_exactly_at_the_first_argument(say: Any, begin: str) -> None:
    @sgl.function
    def program(s: Any, x: Any) -> None:
        s += say(x)
        s += gen("y")

    backend = MockBackend()
    assert program.cache(backend) is bool(begin)
    assert [text_of(prompt) for prompt in backend.commits] == ([begin] if begin else [])
    assert backend.calls == []


def test_the_begin_ends_at_generations_forks_and_values_and_keeps_turns() -> None:
    done: list[str] = []

    @sgl.function
    def program(s: Any, question: str) -> None:
        s += sgl.system("Be brief.")
        with s.user():
            s += "Now: "
            with s.var_scope("q"):
                s += question
        done.append("too far")

    backend = MockBackend()
    sgl.set_default_backend(backend)
    assert program.cache()
    (prompt,) = backend.commits
    assert [(one.role, one.content, one.open) for one in prompt.messages] == [
        ("system", "Be brief.", False),
        ("user", "Now: ", True),
    ]
    assert done == []
    # What is given, or bound, is constant.
    assert program.cache(backend, question="why?")
    assert program.bind(question="why?").cache(backend)
    assert text_of(backend.commits[1]) == text_of(backend.commits[2]) == "Be brief.Now: why?"
    assert done == ["too far"] * 2

    for stop in (
        lambda s: s.__iadd__(gen("y")),
        lambda s: s.fork(2),
        lambda s: s.text() + 1,
    ):

        @sgl.function
        def begins(s: Any, stop: Any = stop) -> None:
            s += "Begin."
            stop(s)
            s += "more"

        assert begins.cache(backend)
        assert text_of(backend.commits[-1]) == "Begin."


def test_async_programs_have_a_begin_too_and_without_a_backend_it_is_told() -> None:
    @sgl.function
    async def program(s: Any, x: str) -> None:
        s += "Begin." + x
        await s["y"]

    backend = MockBackend()
    assert program.cache(backend)
    assert text_of(backend.commits[0]) == "Begin."
    with pytest.raises(NoBackend):
        program.cache()


# -- tracing -------------------------------------------------------------------------------------------------


def test_a_batch_runs_each_body_once_and_traces_nothing() -> None:
    seen: list[Any] = []

    @sgl.function
    def program(s: Any, item: Any) -> None:
        seen.append(item)
        s += {"a": "1", "b": "2"}[item] + gen("x")

    backend = MockBackend()
    program.run_batch([{"item": "a"}, {"item": "b"}], backend=backend)
    assert sorted(seen) == ["a", "b"]
    assert backend.commits == []


def test_pictures_print_draw_and_go_to_json() -> None:
    @sgl.function
    def program(s: Any) -> None:
        with s.user():
            s += "See " + sgl.image(b"\x89PNG\r\n\x1a\n")
        with s.var_scope("all"):
            s.assistant(gen("x"))
        assert s.text()

    made = program.trace()
    assert "Media(image" in made.tree()
    assert "image" in made.mermaid()
    assert "image" in made.dot()
    assert Program.from_json(made.to_json()) == made
    assert made.variables == ("x", "all")


def test_following_is_of_one_context_alone() -> None:
    inside, go_on = threading.Event(), threading.Event()

    @sgl.function
    def slow(s: Any, x: str) -> None:
        s += "Begin."
        inside.set()
        go_on.wait(300)

    @sgl.function
    def quick(s: Any) -> None:
        s += gen("x")

    thread = threading.Thread(target=slow.cache, args=(MockBackend(),))
    thread.start()
    assert inside.wait(300)
    assert quick.run(backend=MockBackend(["real"]))["x"] == "real"
    go_on.set()
    thread.join(300)
    assert not thread.is_alive()


def test_programs_that_are_called_stand_beside_the_caller() -> None:
    made = tree.trace()
    assert [one.name for one in made.called] == ["tip", "tip"]
    assert "calls tip" in made.tree()
    assert made.mermaid().count('(["calls tip"])') == made.dot().count('"calls tip"') == 2
    assert Program.from_json(made.to_json()) == made
    assert "called" not in tip.trace().to_dict()


# -- passes --------------------------------------------------------------------------------------------------


def test_forks_are_told_with_what_they_need() -> None:
    (fork,) = tree.trace("cats").forks()
    assert (fork.branch, fork.branches, fork.generations, fork.join) == ((), 3, (2, 2, 2), "gather_variable")
    assert fork.needs == ("a",)
    assert fork.prefix == len("About cats: say it.") + len("Parts.")
    assert fork.src is not None
    below = Fork((Seq((Text("x{v}"), Gen("w"))), Seq(())))
    body = Seq((Gen("v"), Fork((Seq((Text("ab"), below)),)), Fork((Seq(()),)), Join("concate_and_append")))
    first, inner, second = plan_forks(body)
    assert (first.join, inner.branch, inner.needs, inner.generations) == (None, (0,), ("v",), (1, 0))
    assert (first.prefix, inner.prefix) == (0, 2)
    assert (second.branch, second.join) == ((), "concate_and_append")


def test_waves_are_what_can_be_asked_for_at_once() -> None:
    shown = [
        [(step.program, step.branch, step.node.name) for step in wave] for wave in tree.trace("x").waves()
    ]
    parts = [("tree", (index,), "p") for index in range(3)]
    oks = [("tree", (index,), "ok") for index in range(3)]
    assert shown[0] == [("tree", (), "a"), ("tip", (), "more")]
    assert shown[1] == [*parts, ("tip", (), "more")]
    assert shown[2:] == [oks, [("tree", (), "sum")]]
    assert waves([]) == ()
    assert waves([("empty", Seq(()))]) == ()


def test_a_value_read_in_another_branch_is_waited_for() -> None:
    body = Seq((Fork((Seq((Gen("a"), Gen("b"))), Seq((Text("{b}"), Gen("c"))), Seq((Gen("d"),)))), Gen("e")))
    names = [[step.node.name for step in wave] for wave in waves([("p", body)])]
    assert names == [["a", "d", "e"], ["b"], ["c"]]


NODES = st.recursive(
    st.sampled_from([Text("a"), Text("{x}"), Gen("x"), Gen("y"), Gen(), Join(), ScopeEnd("z")]),
    lambda below: st.lists(st.lists(below, max_size=3).map(lambda nodes: Seq(tuple(nodes))), max_size=3).map(
        lambda branches: Fork(tuple(branches))
    ),
    max_leaves=12,
)


@given(st.lists(NODES, max_size=8))
def test_every_generation_is_in_one_wave_after_those_before_it(nodes: list[Any]) -> None:
    body = Seq(tuple(nodes))
    found = waves([("p", body)])
    assert all(found)
    steps = [(at, step) for at, wave in enumerate(found) for step in wave]
    assert len(steps) == sum(isinstance(node, Gen) for node in body.walk())
    order: dict[tuple[int, ...], list[int]] = {}
    for at, step in steps:
        order.setdefault(step.branch, []).append(at)
    assert all(len(set(ats)) == len(ats) for ats in order.values())
    # The other passes keep to their laws too.
    assert tidy(tidy(body)) == tidy(body)
    assert set(variables(tidy(body))) == {name for node in body.walk() if (name := sets(node))}
    assert sum(1 for _ in plan_forks(body)) == sum(isinstance(node, Fork) for node in body.walk())


@given(st.lists(st.text("ab", max_size=5), min_size=1, max_size=5))
def test_what_prompts_have_in_common(texts: list[str]) -> None:
    shared = common(texts)
    assert all(text.startswith(texts[0][:shared]) for text in texts)
    assert len({text[: shared + 1] for text in texts}) > 1 or any(len(text) == shared for text in texts)
    system = Message(role="system", content="s")
    found = hoist([(system, Message(role="user", content=text, open=True)) for text in texts])
    assert found[0] == system
    assert found[1].content == texts[0][:shared]
    assert found[1].open


def test_nothing_is_hoisted_from_other_turns_and_media() -> None:
    assert hoist([]) == ()
    one, two = Message(role="user", content="a"), Message(role="system", content="a")
    assert hoist([(one,), (two,)]) == ()
    picture = Message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}])
    assert hoist([(two, picture), (two, one)]) == (two,)
    assert [node.text for node in merge_text([Text("a"), Text(""), Text("b")]) if isinstance(node, Text)] == [
        "ab"
    ]


# -- plans ---------------------------------------------------------------------------------------------------


def test_a_plan_counts_without_asking() -> None:
    backend = MockBackend()
    plan = tree.plan("cats", backend=backend, price=price_per_million(1.0, 2.0))
    assert (backend.calls, backend.commits) == ([], [])
    assert (plan.calls, plan.waves) == (10, 4)
    assert plan.completion_tokens == 16 + 3 * 8 + 2 * 20 + 32
    assert plan.cost == pytest.approx((plan.prompt_tokens + 2 * plan.completion_tokens) / 1e6)
    assert 0 < plan.cached_tokens < plan.prompt_tokens
    assert "estimated" in plan.counted
    assert "10 calls in 4 waves" in str(plan)
    assert tree.plan("cats").cost is None


def test_a_plan_says_what_a_run_then_reads() -> None:
    """With the backend's own count, where nothing generated stands in a prompt, to the token."""

    class Counting(MockBackend):
        async def count_tokens(self, prompt: Prompt) -> int:
            return self._size(text_of(prompt))

    @sgl.function
    def program(s: Any, n: int) -> None:
        s += "Some words to begin with. "
        forks = s.fork(n)
        for index, fork in enumerate(forks):
            fork += f"Branch {index} says" + gen("x", max_tokens=4)
        forks.join()

    backend = Counting()
    plan = program.plan(3, backend=backend)
    assert "counted by mock's tokenizer" in plan.counted
    state = program.run(3, backend=backend)
    usage = state.usage()
    called = sum(step.prompt_tokens for step in plan.steps if step.wave is not None)
    assert (plan.calls, called) == (usage["calls"], usage["prompt_tokens"])
    assert usage["completion_tokens"] <= plan.completion_tokens

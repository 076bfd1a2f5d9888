"""Programs, plans, choices and batches in notebooks: HTML that is safe, diagrams, tables."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from runtime.protocol.registry import MissingExtra
from sglang_dsl import MockBackend, gen, select
from sglang_dsl.choices import Choice
from tests.unit.sglang_dsl.views.seen_html import Seen

HOSTILE = "</div></style><script>alert(1)</script><img src=x onerror=y>&\"'"
MERMAID = "text/vnd.mermaid"


@sgl.function
def asks(s: Any, topic: str) -> None:
    """Two questions."""
    s += sgl.system(HOSTILE)
    s += sgl.user("About " + topic) + sgl.assistant(gen("answer", regex="[<b>]+", max_tokens=8))
    forks = s.fork(2)
    for fork in forks:
        fork += sgl.user("more") + sgl.assistant(gen("more", int))
    forks.join()
    s += select("mood", ["glad", HOSTILE])


def test_a_program_shows_its_source_and_what_it_was_traced_as() -> None:
    plain = Seen(asks._repr_html_())
    assert "asks(topic: 'str')" in plain.shown
    assert "Two questions." in plain.shown
    assert 's += sgl.user("About " + topic)' in plain.shown
    assert plain.marked == []
    assert MERMAID not in asks._repr_mimebundle_()
    traced = asks.trace()
    assert Seen(asks._repr_html_()).marked == ["{answer}", "{more}", "{more}", "{mood}"]
    assert asks._repr_mimebundle_()[MERMAID] == traced.mermaid()
    seen = Seen(traced._repr_html_())
    assert seen.marked == ["{answer}", "{more}", "{more}", "{mood}"]
    assert seen.shown.count(HOSTILE) == 1
    for said in (
        "About {topic}",
        "regex [<b>]+",
        "int",
        "branch 1",
        "join: gather_variable",
        "select glad |",
    ):
        assert said in seen.shown
    assert traced._repr_mimebundle_()[MERMAID] == traced.mermaid()
    assert any(HOSTILE in told for told in seen.told)


def test_a_program_without_its_source() -> None:
    made: dict[str, Any] = {}
    exec("def typed(s): s += 'x'", made)
    assert "typed()" in Seen(sgl.function(made["typed"])._repr_html_()).shown


def test_a_plan_is_a_table_of_calls_in_waves() -> None:
    plan = asks.plan(HOSTILE)
    seen = Seen(plan._repr_html_())
    assert "4 calls in" in seen.shown
    assert seen.shown.count("gen more") == 2
    drawn = plan._repr_mimebundle_()[MERMAID]
    assert drawn.count("gen more") == 2
    assert "n0 --> n1" in drawn


def test_a_choice_shows_all_options() -> None:
    state = asks.run("x", backend=MockBackend(scores={"glad": -0.1, HOSTILE: -3.0}))
    choice = state.choice("mood")
    seen = Seen(choice._repr_html_())
    assert seen.marked == ["glad"]
    assert HOSTILE in seen.shown
    assert f"{100 * choice.probability:.1f}%" in seen.shown
    assert "token_length_normalized" in seen.shown
    assert "script>" not in choice._repr_mimebundle_()[MERMAID]


@given(st.lists(st.text(max_size=30), min_size=1, max_size=5), st.data())
def test_any_options_are_shown_as_they_are(options: list[str], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(options) - 1))
    shares = tuple(1 / len(options) for _ in options)
    choice = Choice(options[index], index, tuple(options), ((),) * len(options), shares, shares, "m")
    html = choice._repr_html_().replace("\0", "").replace("\r", "")
    assert Seen(html).marked == [options[index].replace("\0", "").replace("\r", "")]


@sgl.function
def tells(s: Any, topic: str, answer: str = "none") -> None:
    s += sgl.user(topic) + sgl.assistant(gen("answer"))


def fails_at_two(call: Any) -> str:
    if "two" in str(call.prompt):
        raise RuntimeError("<down>")
    return HOSTILE


def test_a_batch_is_a_list_that_is_shown_as_a_table() -> None:
    items = [{"topic": "one"}, ("two", "given"), {"topic": HOSTILE}]
    batch = tells.run_batch(items, backend=MockBackend(fails_at_two), on_error="return")
    assert isinstance(batch, list)
    assert repr(batch) == "Batch(3 results, 1 failed)"
    first, second, third = batch.rows()
    assert first["topic"] == "one"
    assert first["answer"] == HOSTILE
    assert (first["calls"], first["error"]) == (1, None)
    assert first["completion_tokens"] > 0
    assert second["topic"] == "two"
    assert "<down>" in second["error"]
    assert second["answer (argument)"] == "given"  # the variable has the name
    assert third["topic"] == HOSTILE
    seen = Seen(batch._repr_html_())
    assert seen.shown.count(HOSTILE) == 3
    assert "<down>" in seen.shown
    assert "item 1: BackendError" in batch._repr_mimebundle_()[MERMAID]


def test_results_that_come_as_they_end_have_their_own_arguments() -> None:
    items = [{"topic": str(number)} for number in range(20)]
    batch = tells.run_batch(
        (item for item in items), backend=MockBackend(lambda call: call.prompt.messages[0].content),
        ordered=False,
    )  # fmt: skip
    assert sorted(row["topic"] for row in batch.rows()) == sorted(item["topic"] for item in items)
    assert all(row["topic"] == row["answer"] for row in batch.rows())


def test_a_long_batch_is_cut() -> None:
    batch = tells.run_batch([{"topic": "x"}] * 60, backend=MockBackend())
    assert "and 10 more items" in Seen(batch._repr_html_()).shown
    assert "and 28 more" in batch._repr_mimebundle_()[MERMAID]


def test_a_batch_becomes_a_data_frame() -> None:
    pytest.importorskip("pandas", reason="needs sglang-dsl[notebook]")
    frame = tells.run_batch([("one",), ("two",)], backend=MockBackend(["a", "b"]), num_threads=1).to_pandas()
    assert list(frame["topic"]) == ["one", "two"]
    assert list(frame["answer"]) == ["a", "b"]
    assert frame["calls"].sum() == 2
    assert tells.run_batch([], backend=MockBackend()).to_pandas().empty


def test_without_pandas_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    batch = tells.run_batch([("one",)], backend=MockBackend(["a"]))
    with pytest.raises(MissingExtra, match=r"sglang-dsl\[notebook\]"):
        batch.to_pandas()


def test_bars_are_a_notebooks_own_in_a_notebook() -> None:
    from tqdm.auto import tqdm

    from sglang_dsl.execution.batch import bar_of

    bar = bar_of(0)
    assert isinstance(bar, tqdm)
    bar.close()

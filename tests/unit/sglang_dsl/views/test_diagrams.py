"""Programs as diagrams: every node is drawn once, arrows follow the order, nothing breaks the notation."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from sglang_dsl.ir import Fork, Gen, Join, Node, Select, Seq, Text
from sglang_dsl.views.diagrams import calls_graph, dot, mermaid, program_graph


@sgl.function
def tips(s: Any, topic: str) -> None:
    s += sgl.system("Be brief.")
    s += sgl.user(f'Tips on "{topic}"?')
    forks = s.fork(2)
    forks += sgl.assistant(sgl.gen("tip", max_tokens=8))
    forks.join()
    s += sgl.assistant(sgl.gen("sum", regex="[a-z]+") + sgl.select("mood", ["good", "bad"]))


def test_forks_meet_again_at_their_join() -> None:
    graph = program_graph("tips", tips.trace().body)
    kinds = [box.kind for box in graph.boxes]
    fork, join = kinds.index("fork"), kinds.index("join")
    branches = [after for before, after in graph.arrows if before == fork]
    assert len(branches) == 2
    assert len([before for before, after in graph.arrows if after == join]) == 2
    assert [box.label for box in graph.boxes if box.kind == "gen"][-1] == "gen sum ~ [a-z]+"
    assert "select mood: good | bad" in [box.label for box in graph.boxes]
    text = tips.trace().mermaid()
    assert text.startswith('---\ntitle: "tips"\n---\nflowchart TD\n')
    assert "#34;" in text  # the quotes
    assert 'label="select mood: good | bad", shape=diamond' in tips.trace().dot()


def test_calls_of_a_run() -> None:
    state = tips.run("tea", backend=sgl.MockBackend())
    state.sync()
    graph = calls_graph("run", state.core.run.ledger.records())  # type: ignore[attr-defined]
    assert [box.kind for box in graph.boxes].count("gen") == 3
    assert re.search(r"gen tip: \d+ tokens, \d\.\d{3} s", graph.boxes[0].label)


LEAVES = st.one_of(
    st.builds(Text, st.text(max_size=20)),
    st.builds(Gen, st.text(min_size=1, max_size=5)),
    st.builds(Select, st.text(min_size=1, max_size=5), st.tuples(st.text(min_size=1, max_size=5))),
    st.builds(Join),
)
TREES: st.SearchStrategy[Node] = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda branches: Fork(tuple(Seq(tuple(b)) for b in branches)),
        st.lists(st.lists(inner, max_size=3), min_size=1, max_size=3),
    ),
    max_leaves=12,
)


@given(st.lists(TREES, max_size=5), st.text(max_size=10))
def test_any_program_can_be_drawn(nodes: list[Node], title: str) -> None:
    body = Seq(tuple(nodes))
    graph = program_graph(title, body)
    assert len(graph.boxes) == sum(not isinstance(node, Seq) for node in body.walk())
    assert all(before < after < len(graph.boxes) for before, after in graph.arrows)
    drawn = mermaid(graph).split("flowchart TD\n")[1]
    for line in drawn.rstrip().split("\n") if drawn else []:
        assert re.fullmatch(r'    n\d+(\S*"[^"\[\]{}<>|]*"\S*| --> n\d+)', line), line
    # In DOT every label is one string: quotes and backslashes inside are escaped.
    for line in dot(graph).rstrip().split("\n")[2:-1]:
        assert re.fullmatch(r'    n\d+( \[label="([^"\\]|\\.)*", shape=\w+\];| -> n\d+;)', line), line

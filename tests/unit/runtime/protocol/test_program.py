"""The nodes of programs as plain data: what is written down is read back as an equal node."""

from __future__ import annotations

import json

import pytest

from runtime.protocol.program import (
    KINDS,
    Calls,
    Fork,
    Gen,
    Node,
    Sampling,
    Select,
    Seq,
    Source,
    Text,
    Tools,
    concat,
    flatten,
    from_dict,
    to_dict,
)
from runtime.protocol.typed import Typed

SOURCE = Source("program.py", 3, "main")
GEN = Gen(
    "answer",
    Sampling(max_tokens=4, stop=("a", "b"), logit_bias=((1, 0.5),)),
    choices=("x", "y"),
    typed=Typed("int", "int"),
    src=SOURCE,
)
NODES: list[Node] = [
    *(kind() for kind in KINDS.values()),
    GEN,
    Select("which", ("one", "two"), temperature=0.5, seed=3),
    Tools(('{"name": "f"}',)),
    Calls((("1", "f", "{}"), (None, "g", "[]"))),
    Seq((Text("a"), Fork((Seq((GEN,)), Seq((Text("b"),)))), Seq((Text("c"),)))),
]


@pytest.mark.parametrize("node", NODES, ids=lambda node: type(node).__name__)
def test_nodes_survive_json(node: Node) -> None:
    back = from_dict(json.loads(json.dumps(to_dict(node))))
    assert back == node
    assert type(back) is type(node)


def test_where_it_was_written_is_kept() -> None:
    back = from_dict(json.loads(json.dumps(to_dict(GEN))))
    assert isinstance(back, Gen)
    assert back.src == SOURCE
    assert str(back.src) == "program.py:3"


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown node kind 'nonsense'; known: text, "):
        from_dict({"kind": "nonsense"})


def test_nodes_in_order_are_flat() -> None:
    made = concat("a", Seq((Text("b"), GEN)), "c")
    assert made == Seq((Text("a"), Text("b"), GEN, Text("c")))
    assert flatten(Seq((made, Text("d")))) == (Text("a"), Text("b"), GEN, Text("c"), Text("d"))
    with pytest.raises(TypeError, match="expected text or a node, got int"):
        concat(3)  # type: ignore[arg-type]


def test_what_is_set_goes_before_the_base() -> None:
    base = Sampling(max_tokens=1, seed=2)
    assert Sampling(max_tokens=4).over(base) == Sampling(max_tokens=4, seed=2)
    assert Sampling().over(base) is base
    assert base.over(Sampling()) is base

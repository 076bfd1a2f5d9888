"""Typed values, constraint words, and objects shown while they are written."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
import enum
import json
import threading
import uuid
from collections.abc import Callable
from types import UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import pydantic
import pytest
import typing_extensions
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.protocol.constraint import Constraint
from runtime.protocol.registry import MissingExtra
from sglang_dsl import (
    BadProgram,
    InvalidValue,
    MockBackend,
    ProgramError,
    ProgramState,
    function,
    gen,
)
from sglang_dsl.interpreter.lower import lower
from sglang_dsl.ir import Gen, Sampling, from_dict, to_dict, typed
from tests.exploring import tries
from tests.partial_json import is_prefix


class Weapon(pydantic.BaseModel):
    name: str
    damage: int = pydantic.Field(ge=0, le=20)


class Hero(pydantic.BaseModel):
    name: str
    born: datetime.date | None = None
    weapons: list[Weapon]
    by_name: dict[str, Weapon] = {}


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    label: str


@dataclasses.dataclass(slots=True)
class Line:
    start: Point
    others: list[Point] = dataclasses.field(default_factory=list)


class Pair(TypedDict):
    left: int
    right: NotRequired[str]


class Color(enum.Enum):
    RED = "red"
    BLUE = "light blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@function
def ask(s: ProgramState, node: Any) -> None:
    s += "Tell me: "
    s += node


HERO = {"name": "Wenna", "weapons": [{"name": "bow", "damage": 7}], "born": "1201-02-03"}
CASES: list[tuple[Any, str, Any]] = [
    (int, "42", 42),
    (int, "-7", -7),
    (float, "2.5", 2.5),
    (bool, "True", True),
    (bool, "False", False),
    (str, " a text", " a text"),
    (Color, "light blue", Color.BLUE),
    (Literal["yes", "no"], "no", "no"),
    (Level, "2", Level.HIGH),
    (Literal[1, "one"], '"one"', "one"),
    (list[int], "[1, 2]", [1, 2]),
    (int | None, "null", None),
    (dict[str, bool], '{"a": true}', {"a": True}),
    (tuple[int, str], '[1, "b"]', (1, "b")),
    (Annotated[int, pydantic.Field(ge=3)], "4", 4),
    (Annotated[list[int], ["no hash"]], "[4]", [4]),
    (Point, '{"x": 1, "label": "a"}', Point(1, "a")),
    (Line, '{"start": {"x": 1, "label": "a"}}', Line(Point(1, "a"))),
    (Pair, '{"left": 3}', {"left": 3}),
    (list[Pair], '[{"left": 3, "right": "b"}]', [{"left": 3, "right": "b"}]),
    (Hero, json.dumps(HERO), Hero.model_validate(HERO)),
    (Hero | Weapon, '{"name": "bow", "damage": 7}', Weapon(name="bow", damage=7)),
    (list[Hero], json.dumps([HERO]), [Hero.model_validate(HERO)]),
    (Any, '{"a": [1]}', {"a": [1]}),
]


@pytest.mark.parametrize(("kind", "text", "value"), CASES, ids=lambda case: str(case)[:40])
def test_a_value_of_the_type_and_its_text(kind: Any, text: str, value: Any) -> None:
    state = ask.run(gen("x", kind, 64), backend=MockBackend([text]))
    assert state["x"] == value
    assert type(state["x"]) is type(value)
    assert state.raw("x") == text
    assert state.text() == "Tell me: " + text
    assert list(ask.run(gen("x", kind), backend=MockBackend([text])).text_iter("x")) == [text]
    streamed = ask.run(gen("x", kind), backend=MockBackend([text], split=2), stream=True)
    assert "".join(streamed.text_iter("x")) == text
    assert streamed["x"] == value


@pytest.mark.parametrize(("kind", "text", "value"), CASES, ids=lambda case: str(case)[:40])
def test_a_typed_node_survives_json_and_prints_its_type(kind: Any, text: str, value: Any) -> None:
    node = gen("x", kind, 64)
    assert isinstance(node, Gen)
    again = from_dict(json.loads(json.dumps(to_dict(node))))
    assert again == node
    assert "typed=" in node.label()
    assert "$defs" not in node.label()
    # The type itself does not travel: plain data comes of it.
    plain = ask.run(again, backend=MockBackend([text]))["x"]
    assert json.dumps(plain) == json.dumps(json.loads(text) if node.json_schema is not None else plain)


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        (int, "regex"),
        (str, None),
        (Color, "choices"),
        (Literal["a", "b"], "choices"),
        (Level, "json_schema"),
        (Hero, "json_schema"),
    ],
)
def test_what_a_type_is_kept_by(kind: Any, kept: str | None) -> None:
    constraint = lower(gen("x", kind), Sampling()).constraint
    assert (None if constraint is None else constraint.kind) == kept


def test_several_samples_give_a_list() -> None:
    state = ask.run(gen("x", int, n=3), backend=MockBackend([["1", "2", "3"]]))
    assert state["x"] == [1, 2, 3]
    assert state.raw("x") == ["1", "2", "3"]
    assert list(state.object_iter("x")) == [[1, 2, 3]]


def test_an_object_takes_no_other_members_unless_its_type_says_so() -> None:
    class Open(pydantic.BaseModel, extra="allow"):
        inner: Weapon

    made = typed.schema(Open)
    assert made["additionalProperties"] is True
    assert made["$defs"]["Weapon"]["additionalProperties"] is False
    assert Hero.model_json_schema().get("additionalProperties") is None, "the class's own is not changed"


def test_the_words_may_stand_beside_the_type() -> None:
    assert lower(gen("x", Hero, max_tokens=5), Sampling()).sampling.max_new_tokens == 5
    assert lower(gen("x", Hero, 5, temperature=0), Sampling()).sampling.max_new_tokens == 5
    assert gen("x", typed=Hero) == gen("x", Hero)
    assert gen("x", 5) == gen("x", max_tokens=5)
    assert gen(name="x", max_tokens=5) == gen("x", 5)


def test_a_text_that_is_no_value_is_told_where_it_is_read() -> None:
    backend = MockBackend(['{"name": "bow", "damage": 99}', "4"])
    state = ask.run(gen("x", Weapon) + gen("y", int), backend=backend)
    with pytest.raises(InvalidValue, match="damage: Input should be less than or equal to 20") as caught:
        state["x"]
    error = caught.value
    assert error.variable == "x"
    assert error.program == "ask"
    assert error.source is not None
    assert error.source.file == __file__
    assert "https://" not in str(error)
    assert state.raw("x") == '{"name": "bow", "damage": 99}'
    assert state["y"] == 4
    assert isinstance(state.error(), InvalidValue)


def test_a_text_that_was_cut_says_so() -> None:
    state = ask.run(gen("x", Weapon, 2), backend=MockBackend(['{"name": "bow", "damage": 9}']))
    with pytest.raises(InvalidValue, match="max_tokens"):
        state["x"]


def test_without_pydantic_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.protocol.registry import Registry

    lines = {"JSON": "no_such_package:TypeAdapter"}
    monkeypatch.setattr(typed, "_TYPES", Registry[Any]("reader of types", lines, extras={"JSON": "typed"}))
    with pytest.raises(MissingExtra, match=r"^list\[frozenset\[int\]\]: .*sglang-dsl\[typed\]"):
        gen("x", list[frozenset[int]])
    assert isinstance(gen("x", int), Gen)

    class Described:
        @classmethod
        def model_json_schema(cls) -> dict[str, object]:
            return {"type": "object"}

    assert isinstance(gen("x", json_schema=Described), Gen)


# -- words ---------------------------------------------------------------------------------------------------

TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


@pytest.mark.parametrize(
    ("words", "constraint"),
    [
        ({"ebnf": 'root ::= "a"'}, Constraint("ebnf", 'root ::= "a"')),
        ({"structural_tag": TAG}, Constraint("structural_tag", json.dumps(TAG))),
        ({"structural_tag": json.dumps(TAG)}, Constraint("structural_tag", json.dumps(TAG))),
        (
            {"json_schema": {"type": "null"}, "whitespace": "single"},
            Constraint("json_schema", '{"type": "null"}', "single"),
        ),
        (
            {"json_schema": {"format": "date"}, "schema_format": "annotation"},
            Constraint("json_schema", '{"format": "date"}', schema_format="annotation"),
        ),
        ({"json_schema": True}, Constraint("json_schema", "true")),
        ({"json_schema": Pair}, Constraint("json_schema", json.dumps(typed.schema(Pair)))),
        ({"typed": Literal["a", "é"]}, Constraint("choices", '["a", "é"]')),
    ],
)
def test_a_word_becomes_one_constraint(words: dict[str, Any], constraint: Constraint) -> None:
    node = gen("x", **words)
    assert isinstance(node, Gen)
    assert lower(node, Sampling()).constraint == constraint
    again = from_dict(json.loads(json.dumps(to_dict(node))))
    assert again == node
    assert isinstance(again, Gen)
    assert lower(again, Sampling()).constraint == constraint


def test_types_may_stand_inside_of_a_structural_tag() -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": Weapon}}
    node = gen("x", structural_tag=tag)
    assert isinstance(node, Gen)
    assert node.structural_tag is not None
    assert json.loads(node.structural_tag)["format"]["json_schema"] == typed.schema(Weapon)


def test_whitespace_is_a_default_of_a_program_too() -> None:
    backend = MockBackend(["{}", "12", "{}"])

    @function(whitespace="single")
    def both(s: ProgramState) -> None:
        s += (
            gen("a", json_schema={})
            + gen("b", regex="[0-9]+")
            + gen("c", json_schema={}, whitespace="compact")
        )

    both.run(backend=backend).sync()
    seen = [call.constraint.whitespace for call in backend.calls if call.constraint is not None]
    assert seen == ["single", None, "compact"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"regex": "a", "ebnf": "b"}, "got regex and ebnf"),
        ({"typed": int, "json_schema": {}}, "got a type and json_schema"),
        ({"structural_tag": TAG, "choices": ["a"]}, "got structural_tag and choices"),
        ({"ebnf": " "}, "a grammar as text"),
        ({"ebnf": 3}, "a grammar as text"),
        ({"structural_tag": "[]"}, "JSON object"),
        ({"structural_tag": True}, "takes JSON text"),
        ({"structural_tag": {"a": {1}}}, "not JSON"),
        ({"json_schema": {"a": float("nan")}}, "not JSON"),
        ({"json_schema": 3}, "a mapping or a type"),
        ({"json_schema": print}, "json_schema takes"),
        ({"json_schema": threading.Thread}, r"^json_schema: Thread is not a type that can be read.*\.$"),
        ({"whitespace": "compact"}, "requires json_schema"),
        ({"whitespace": "compact", "regex": "a"}, "requires json_schema"),
        ({"whitespace": "wide", "json_schema": {}}, "compact, single, flexible"),
        ({"schema_format": "annotation", "ebnf": "a"}, "schema_format requires json_schema"),
        ({"schema_format": "off", "json_schema": {}}, "assertion, annotation"),
        ({"typed": "Hero"}, "expected a type"),
        ({"typed": threading.Thread}, "not a type that can be read from JSON"),
        ({"typed": Callable[[int], int]}, "Callable"),
    ],
)
def test_wrong_words_are_refused_where_they_are_written(words: dict[str, Any], said: str) -> None:
    with pytest.raises(BadProgram, match=said):
        gen("x", **words)


def test_a_long_form_is_shown_by_its_beginning_and_written_whole() -> None:
    node = gen("x", json_schema={"enum": [f"value {number}" for number in range(100)]})
    assert isinstance(node, Gen)
    assert len(node.label()) < 150
    assert "..." in node.label()
    assert len(str(to_dict(node)["json_schema"])) > 1000


@pytest.mark.parametrize("second", ["int", {"type": "object"}, Weapon(name="bow", damage=1), 2.5, [int]])
def test_a_second_argument_that_is_neither_type_nor_number_is_told(second: Any) -> None:
    with pytest.raises(
        BadProgram, match=r"second argument must be a type, or a whole number \(max_tokens\); got"
    ):
        gen("x", second)


def test_an_unknown_word_is_told_with_gens_own_name() -> None:
    with pytest.raises(TypeError, match=r"^gen\(\)"):
        gen("x", regx="a")  # type: ignore[call-overload]


def test_tracing_a_typed_program() -> None:
    @function
    def program(s: ProgramState) -> None:
        s += gen("hero", Hero)
        s += f"And {s['hero']}."
        assert len(list(s.object_iter("hero"))) == 1

    traced = program.trace()
    assert "typed=Hero" in traced.tree()
    assert type(traced).from_json(traced.to_json()).body == traced.body


Code = NewType("Code", str)
UserId = NewType("UserId", int)
AdminId = NewType("AdminId", UserId)
Mood = NewType("Mood", Literal["calm", "cross"])  # type: ignore[valid-newtype]


@dataclasses.dataclass
class Account:
    owner: UserId
    others: dict[Code, AdminId | None]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (UserId, "7", 7),
        (AdminId, "7", 7),
        (Code, "free text", "free text"),
        (Mood, "calm", "calm"),
        (NewType("Tint", Color), "light blue", Color.BLUE),
        (NewType("Place", Point), '{"x": 1, "label": "a"}', Point(1, "a")),
        (NewType("Both", Pair), '{"left": 1}', {"left": 1}),
        (UserId | None, "null", None),
        (UserId | list[Code], '["a"]', ["a"]),
        (dict[Code, UserId], '{"a": 7}', {"a": 7}),
        (Annotated[UserId, pydantic.Field(ge=3)], "7", 7),
        (Account, '{"owner": 1, "others": {"a": 2}}', Account(UserId(1), {Code("a"): AdminId(UserId(2))})),
    ],
)
def test_a_new_type_is_read_as_its_supertype(kind: Any, text: str, value: Any) -> None:
    state = ask.run(gen("x", kind), backend=MockBackend([text]))
    assert state["x"] == value
    assert state.value("x", kind) == value
    assert state.get_meta_info("x")["finish_reason"] == {"type": "stop"}


def test_a_new_type_takes_no_other_values() -> None:
    node = gen("x", AdminId)
    assert (typed.describe(AdminId).name, lower(node, Sampling()).constraint) == (
        "AdminId",
        lower(gen("x", int), Sampling()).constraint,
    )
    state = ask.run(gen("x", AdminId, max_tokens=1), backend=MockBackend(["7.5"], tokens="bytes"))
    assert state["x"] == 7
    with pytest.raises(InvalidValue, match="is not of the type Mood"):
        state.value("x", Mood)
    with pytest.raises(BadProgram, match="is not a type that can be read"):
        gen("x", NewType)


# -- while it is written -------------------------------------------------------------------------------------


def test_a_model_grows() -> None:
    text = json.dumps(HERO)
    state = ask.run(gen("x", Hero), backend=MockBackend([text], split=3), stream=True)
    seen = list(state.object_iter("x"))
    assert seen[-1] == state["x"] == Hero.model_validate(HERO)
    assert all(isinstance(one, Hero) for one in seen)
    assert seen[0].name is None or "Wenna".startswith(seen[0].name)
    halfway = next(one for one in seen if one.weapons)
    assert isinstance(halfway.weapons[0], Weapon)
    assert halfway.born is None


def test_dataclasses_and_unions_grow() -> None:
    text = '{"start": {"x": 10, "label": "ab"}, "others": [{"x": 2, "label": "c"}]}'
    state = ask.run(gen("x", Line), backend=MockBackend([text], split=1), stream=True)
    seen = list(state.object_iter("x", strings=False))
    line: Any = Line  # None stands for what is not there yet
    assert seen[0] == line(None, None)
    point: Any = Point
    assert line(point(10, None), None) in seen
    assert seen[-1] == Line(Point(10, "ab"), [Point(2, "c")])
    either = ask.run(gen("x", Hero | Weapon), backend=MockBackend([json.dumps(HERO)], split=4), stream=True)
    *growing, last = either.object_iter("x")
    assert growing
    assert all(isinstance(one, Hero) for one in growing)  # from the member on that only a hero has
    assert last == Hero.model_validate(HERO)


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    born: datetime.date


class Spot(NamedTuple):
    x: int
    day: datetime.date


class Badge(typing_extensions.TypedDict):  # pydantic takes no other before Python 3.12
    color: Color
    given: datetime.date


T = TypeVar("T")


@dataclasses.dataclass
class Box(Generic[T]):
    inside: T
    label: str


Pets = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
# Type -> values of it, as JSON.
FIELDS: dict[Any, list[Any]] = {
    str: ["", "some words"],
    Code: ["ab"],
    int: [3, -20],
    float: [2, 0.5],
    bool: [True],
    Color: ["red", "light blue"],
    Level: [1, 2],
    Literal["calm", "calmer", 3]: ["calm", "calmer", 3],
    datetime.date: ["2031-05-06"],
    datetime.datetime: ["2031-05-06T07:08:09Z"],
    uuid.UUID: ["12345678-1234-5678-1234-567812345678"],
    decimal.Decimal: ["1.50", 2],
    bytes: ["abc"],
    datetime.date | int: ["2031-05-06", 7],
    datetime.date | None: ["2031-05-06", None],
    str | None: ["ab", None],
    Literal["yes"] | bool: ["yes", False],
    Cat | Dog: [{"kind": "cat", "lives": 9}, {"kind": "dog", "born": "2020-01-02"}],
    Pets: [{"kind": "dog", "born": "2020-01-02"}],
    Cat | list[int] | str: [{"kind": "cat", "lives": 9}, [1, 2], "text"],
    list[Color]: [[], ["red", "light blue"]],
    list[Dog]: [[{"kind": "dog", "born": "2020-01-02"}, {"born": "2021-01-02", "kind": "dog"}]],
    set[int]: [[1, 2]],
    frozenset[Color]: [["red"]],
    tuple[int, datetime.date]: [[1, "2031-05-06"]],
    tuple[Color, ...]: [["red", "red"]],
    dict[str, datetime.date]: [{"a": "2031-05-06", "b": "2031-05-07"}],
    dict[int, Color]: [{"1": "red"}],
    Spot: [[1, "2031-05-06"]],
    Badge: [{"color": "red", "given": "2031-05-06"}],
    Point: [{"x": 1, "label": "ab"}],
    Box[datetime.date]: [{"inside": "2031-05-06", "label": "ab"}],
    Box[list[Cat | None]]: [{"inside": [None, {"kind": "cat", "lives": 1}], "label": ""}],
    Any: ["ab", {"a": [1]}],
}


def wrong_parts(kind: Any, value: Any) -> list[Any]:
    """Parts of a value that are neither of their type nor None."""
    if value is None:
        return []
    if kind in (Cat, Dog, Point):
        hints = get_type_hints(kind)
        own = {name: getattr(value, name) for name in hints if hasattr(value, name)}
        parts = [part for name in own for part in wrong_parts(hints[name], own[name])]
        return parts if type(value) is kind else [value]
    match kind, get_origin(kind), get_args(kind):
        case _, origin, (inner,) if origin is Box:
            label = wrong_parts(str, value.label)
            return [*wrong_parts(inner, value.inside), *label] if type(value) is Box else [value]
        case _, origin, given if origin is list:
            return (
                [p for one in value for p in wrong_parts(given[0], one)] if type(value) is list else [value]
            )
        case _, origin, given if origin in (UnionType, Union):
            others = [wrong_parts(one, value) for one in given if one is not type(None)]
            return [] if [] in others else others[0]
        case _, origin, given if origin is Annotated:
            return wrong_parts(given[0], value)
        case _, origin, given if origin is tuple and len(value) < len(given):
            kind = tuple[given[: len(value)]] if value else tuple[()]  # type: ignore[assignment]
    if kind is Spot:
        parts = [*wrong_parts(int, value.x), *wrong_parts(datetime.date, value.day)]
        return parts if type(value) is Spot else [value]
    if kind is Badge:
        known = {"color": Color, "given": datetime.date}
        return [part for name, one in value.items() for part in wrong_parts(known[name], one)]
    try:
        pydantic.TypeAdapter(kind).validate_python(value, strict=True)
    except pydantic.ValidationError:
        return [value]
    return []


@settings(max_examples=tries(60))
@given(st.data())
def test_whatever_is_shown_is_of_its_type_or_not_there_yet(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(list(FIELDS)), min_size=1, max_size=5))
    whole = {f"f{at}": data.draw(st.sampled_from(FIELDS[kind])) for at, kind in enumerate(kinds)}
    names = data.draw(st.permutations(list(whole)))
    of = {f"f{at}": kind for at, kind in enumerate(kinds)}
    made: Any = data.draw(
        st.sampled_from(
            [
                pydantic.create_model("Model", **{name: (kind, ...) for name, kind in of.items()}),
                dataclasses.make_dataclass("Data", list(of.items())),
            ]
        )
    )
    text = json.dumps({name: whole[name] for name in names})
    backend = MockBackend([text], split=data.draw(st.integers(1, 9)))
    state = ask.run(gen("x", made, max_tokens=10**6), backend=backend, stream=True)
    *growing, last = state.object_iter("x", strings=data.draw(st.booleans()))
    assert last == state["x"]
    before: dict[str, Any] = {}
    for one in growing:
        assert type(one) is made
        shown = {name: getattr(one, name) for name in of}
        assert [part for name in of for part in wrong_parts(of[name], shown[name])] == []
        gone = [name for name in before if before[name] is not None and shown[name] is None]
        assert gone == []  # nothing is taken back
        before = shown
    assert before == {name: getattr(last, name) for name in of}


def test_roots_of_other_kinds_grow() -> None:
    def seen(kind: Any, value: Any, **words: Any) -> list[Any]:
        backend = MockBackend([json.dumps(value)], split=1)
        return list(ask.run(gen("x", kind), backend=backend, stream=True).object_iter("x", **words))

    day = datetime.date(2031, 5, 6)
    assert set(map(tuple, seen(list[datetime.date], ["2031-05-06"]))) == {(), (day,)}
    assert {type(one) for one in seen(Pets, {"kind": "dog", "born": "2031-05-06"})} == {Dog}
    assert seen(Pets, {"kind": "dog", "born": "2031-05-06"})[0] == Dog.model_construct(kind="dog", born=None)
    assert seen(datetime.date, "2031-05-06") == [day, day]
    ended = {"inside": {"kind": "cat", "lives": 1}, "label": "long"}
    assert Box(Cat(kind="cat", lives=1), None) in seen(Box[Cat], ended, strings=False)


def test_an_ended_part_that_is_not_valid_is_shown_as_far_as_it_is() -> None:
    weapons = '[{"name": "bow", "damage": 99}, {"name": "axe", "damage": 3}]'
    text = f'{{"name": "Ann", "weapons": {weapons}, "born": "?"}}'
    state = ask.run(gen("x", Hero), backend=MockBackend([text], split=3), stream=True)
    partial: list[Any] = []
    with pytest.raises(InvalidValue, match=r"weapons\.0\.damage"):
        partial.extend(state.object_iter("x"))
    assert partial[-1].weapons == [
        Weapon.model_construct(name="bow", damage=99),
        Weapon(name="axe", damage=3),
    ]
    assert partial[-1].born is None


def test_aliases_and_root_models_grow() -> None:
    class Named(pydantic.BaseModel):
        title: str = pydantic.Field(alias="Title")

    class Names(pydantic.RootModel[list[Named]]):
        pass

    text = '[{"Title": "abc"}]'
    state = ask.run(gen("x", Names), backend=MockBackend([text], split=1), stream=True)
    seen = list(state.object_iter("x"))
    assert all(isinstance(one, Names) for one in seen)
    assert {one.root[0].title for one in seen if one.root} == {None, "", "a", "ab", "abc"}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    st.integers(1, 7),
)
def test_every_partial_is_the_beginning_of_the_last(value: Any, split: int) -> None:
    text = json.dumps(value)
    state = ask.run(
        gen("x", json_schema={}, max_tokens=10**6), backend=MockBackend([text], split=split), stream=True
    )
    seen = list(state.object_iter("x"))
    assert seen[-1] == value
    assert all(is_prefix(one, value) for one in seen)
    assert state["x"] == text


def test_several_readers_sync_and_async_see_the_same() -> None:
    text = json.dumps(HERO)
    backend = MockBackend([text], split=2, chunk_delay_s=0.001)
    state = ask.run(gen("x", json_schema={}), backend=backend, stream=True)
    seen: list[list[Any]] = []

    async def gather() -> list[Any]:
        return [one async for one in state.object_async_iter("x")]

    readers = [threading.Thread(target=lambda: seen.append(list(state.object_iter("x")))) for _ in range(3)]
    for reader in readers:
        reader.start()
    seen.append(asyncio.run(gather()))
    for reader in readers:
        reader.join(300)
    assert len(seen) == 4
    assert all(one == seen[0] for one in seen)
    assert seen[0][-1] == HERO


def test_a_run_that_does_not_stream_shows_the_whole_at_once() -> None:
    state = ask.run(gen("x", json_schema={}), backend=MockBackend(["[1, 2]"]))
    assert list(state.object_iter("x"))[-1] == [1, 2]


def test_where_the_text_breaks_off_the_reader_is_told() -> None:
    state = ask.run(gen("x"), backend=MockBackend(['{"a": "b']), stream=True)
    seen = state.object_iter("x")
    assert next(seen) in ({}, {"a": ""})
    with pytest.raises(InvalidValue, match="ends inside a string"):
        list(seen)
    no_json = ask.run(gen("x"), backend=MockBackend(["hello"]), stream=True)
    with pytest.raises(InvalidValue, match="'h' stands where a value should be at line 1, column 1"):
        list(no_json.object_iter("x"))
    failing = ask.run(gen("x", Hero), backend=MockBackend(errors={0: OSError("gone")}), stream=True)
    with pytest.raises(ProgramError, match="gone"):
        list(failing.object_iter("x"))

"""Values that MockBackend makes up: of any schema, from the runtime's own examples."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import subprocess
import sys
import uuid
from typing import Annotated, Any, Literal, NotRequired

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import AnyUrl, BaseModel, Field, TypeAdapter
from typing_extensions import TypedDict

import sglang_dsl as sgl
from sglang_dsl.backends.mock import MockBackend
from tests.exploring import tries
from tests.unit.runtime.grammar.json_schema.wild import Unjudged, Wild, oracle


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Tree(BaseModel):
    value: Annotated[int, Field(gt=3, multiple_of=7)]
    left: Tree | None
    others: list[Tree] = Field(min_length=0, max_length=2)


class Bare(TypedDict):
    a: int
    b: NotRequired[str]


@dataclasses.dataclass
class Point:
    x: float
    when: datetime.datetime


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    names: list[str] = Field(min_length=2)


class Record(BaseModel):
    name: str = Field(pattern=r"^[A-Z][a-z]{2,8}$")
    code: str = Field(min_length=3, max_length=5)
    age: int = Field(ge=18, le=21)
    score: float = Field(gt=0, lt=1)
    colours: set[Colour] = Field(min_length=2)
    pair: tuple[int, str, bool]
    day: datetime.date
    time: datetime.time
    span: datetime.timedelta
    pet: Cat | Dog = Field(discriminator="kind")
    address: ipaddress.IPv4Address
    id: uuid.UUID
    counts: dict[str, int] = Field(min_length=1)
    url: AnyUrl
    maybe: int | None
    price: decimal.Decimal = Field(max_digits=5, decimal_places=2)
    point: Point


TYPES: list[Any] = [
    Record, Tree, Bare, Point, Cat | Dog, list[Cat], tuple[int, str], tuple[int, ...], int | None,
    dict[str, Colour], set[int], datetime.date, datetime.datetime, datetime.time, datetime.timedelta,
    uuid.UUID, pathlib.Path, bytes, Literal["x", 3, None], list[tuple[int, Colour]],
    Annotated[int, Field(ge=5, le=6)], Annotated[float, Field(gt=1.5, lt=1.6)],
    Annotated[str, Field(pattern="^a+b$", min_length=5)],
    Annotated[list[int], Field(min_length=3, max_length=3)],
    Annotated[set[Colour], Field(min_length=2)], list[int | list[str]],
]  # fmt: skip


@sgl.function
def asks(s: Any, prompt: str, kind: Any) -> None:
    s += prompt + sgl.gen("x", kind)


@sgl.function
def asks_schema(s: Any, schema: str) -> None:
    s += sgl.gen("x", json_schema=schema)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: str(kind).replace("typing.", "")[:50])
def test_a_value_of_any_type(kind: Any) -> None:
    for prompt in ("one", "two", "three", "four"):
        value = asks.run(prompt, kind, backend=MockBackend())["x"]
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        assert adapter.validate_python(adapter.dump_python(value)) == value


def test_it_depends_on_the_prompt_alone() -> None:
    texts = [asks.run(str(n % 10), Record, backend=MockBackend()).raw("x") for n in range(20)]
    assert texts[:10] == texts[10:20]


@settings(deadline=None, max_examples=tries(60))
@given(st.randoms(use_true_random=False), st.sampled_from([4, 10]))
def test_whatever_is_made_up_for_a_schema_matches_it(pick: Any, size: int) -> None:
    schema = Wild(pick, size).schema
    try:
        text = asks_schema.run(json.dumps(schema), backend=MockBackend())["x"]
    except sgl.Unsupported:
        assume(False)  # it has no values, or none that is found in a bounded time
        return
    try:
        assert oracle(schema).is_valid(json.loads(text)), (schema, text)
    except (Unjudged, RecursionError, KeyError):
        assume(False)  # the tables of the oracle do not know this text


@pytest.mark.parametrize("draft", ["draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12"])
@pytest.mark.parametrize("around", [lambda one: one, lambda one: {"anyOf": [one]}], ids=["alone", "within"])
def test_the_content_of_a_text_is_an_annotation(draft: str, around: Any) -> None:
    content = {"contentEncoding": "base64", "contentMediaType": "application/json"}
    schema = around({"type": "string", "enum": ["1.2.3"], **content})
    spec = json.dumps({"$schema": f"http://json-schema.org/{draft}/schema", **schema})
    assert asks_schema.run(spec, backend=MockBackend())["x"] == '"1.2.3"'


@pytest.mark.parametrize("name", ["default", "enum", "contentEncoding"])
def test_it_is_one_within_a_property_of_any_name(name: str) -> None:
    inner = {"type": "string", "enum": ["1.2.3"], "contentEncoding": "base64"}
    schema = {"type": "object", "properties": {name: inner}, "required": [name]}
    spec = json.dumps({"$schema": "http://json-schema.org/draft-07/schema", **schema})
    assert json.loads(asks_schema.run(spec, backend=MockBackend())["x"])[name] == "1.2.3"


def test_a_property_may_be_named_as_a_keyword_of_content() -> None:
    properties = {"contentEncoding": {"const": "x"}}
    schema = json.dumps({"type": "object", "properties": properties, "required": ["contentEncoding"]})
    text = asks_schema.run(schema, backend=MockBackend())["x"]
    assert json.loads(text)["contentEncoding"] == "x"
    with pytest.raises(sgl.InvalidValue):
        asks_schema.run(schema, backend=MockBackend(['{"contentEncoding": "y"}']))["x"]


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"format": "duration"}, "enum": [""]},
        {"oneOf": [{"type": "string"}, {"type": "string", "format": "date-time"}], "enum": [""]},
        {"format": "date-time", "enum": ["2026-11-27T10:00:00Z"]},
        {"$schema": "http://json-schema.org/draft-04/schema", "enum": [[]], "minItems": 0.0},
    ],
)
def test_a_value_that_fits_with_or_without_formats_is_taken(schema: Any) -> None:
    text = json.dumps(schema["enum"][0])
    assert asks_schema.run(json.dumps(schema), backend=MockBackend([text]))["x"] == text


@pytest.mark.parametrize("schema", [{"type": "object", "const": ""}, {"type": "string", "enum": [1, None]}])
def test_a_constant_of_another_type_is_no_value(schema: Any) -> None:
    with pytest.raises(sgl.Unsupported):
        asks_schema.run(json.dumps(schema), backend=MockBackend())["x"]


LIGHT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"jsonschema", "numpy", "referencing", "regex", "torch", "llguidance"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import sglang_dsl as sgl
asks = sgl.function(lambda s, schema: s.__iadd__(sgl.gen("x", json_schema=schema)))
plain = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
print(asks.run(plain, backend=sgl.MockBackend())["x"])
try:
    asks.run('{"type": "integer", "minimum": 7}', backend=sgl.MockBackend())["x"]
except sgl.Unsupported as error:
    print(error.message)
"""


def test_without_its_packages_plain_schemas_work_and_others_say_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    plain, refused = done.stdout.splitlines()
    assert isinstance(json.loads(plain)["a"], int)
    assert "pip install 'sglang-dsl[mock]'" in refused

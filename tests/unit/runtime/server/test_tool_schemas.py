"""Which schemas of tools are refused: those that another library refuses by draft 2020-12."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.formats.tools.types import Tool
from runtime.protocol.errors import BadRequest
from runtime.server import tool_use
from runtime.server.tool_use import schema_fault

REFERENCE = jsonschema.Draft202012Validator(
    jsonschema.Draft202012Validator.META_SCHEMA, format_checker=jsonschema.FormatChecker(["regex"])
)
KEYWORDS = (
    "type", "properties", "items", "prefixItems", "enum", "const", "required", "pattern", "minLength", "not",
    "minimum", "multipleOf", "anyOf", "$ref", "$defs", "$id", "$anchor", "additionalProperties", "mine",
    "patternProperties", "dependentRequired", "format", "description", "definitions", "dependencies",
    "uniqueItems", "title",
)  # fmt: skip
TEXTS = st.sampled_from(("string", "object", "a", "(", "#/$defs/List<a>", r"\p{L}", "1", ""))
NAMES = st.one_of(st.sampled_from(KEYWORDS), TEXTS)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(-2, 2), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=5))
def test_the_same_schemas_are_refused(schema: dict[str, Any]) -> None:
    fault = schema_fault(schema)
    assert (fault is None) == REFERENCE.is_valid(schema), fault
    assert fault is None or "\n" not in fault


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "strin"}, "(at type)"),
        ({"properties": {"a": {"items": [{}]}}}, "(at properties/a/items)"),
        ({"properties": {"a\nb": 3}}, r"(at 'properties/a\nb')"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "pattern": "("}, "(at pattern)"),
        ({"description": "\ud800", "type": 1}, ""),
    ],
)
def test_a_refusal_says_where(schema: dict[str, Any], place: str) -> None:
    fault = schema_fault(schema)
    assert fault is not None
    assert fault.endswith(place)


def test_a_sound_set_of_tools_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_use, "_checked", OrderedDict())
    monkeypatch.setattr(tool_use, "MAX_CHECKED", 3)
    looked: list[Any] = []

    def counted(schema: Any) -> str | None:
        looked.append(schema)
        return schema_fault(schema)

    monkeypatch.setattr(tool_use, "schema_fault", counted)
    for number in (1, 1, 2, 3, 4, 4, 1):
        tool_use._check([Tool("a", {"maxLength": number})])
    assert [one["maxLength"] for one in looked] == [1, 2, 3, 4, 1]
    assert len(tool_use._checked) == 3
    for _ in range(2):
        with pytest.raises(BadRequest, match=r"tools\[1\].*at type"):
            tool_use._check([Tool("a"), Tool("b", {"type": "x"})])
    assert len(looked) == 9

"""The constraints that backends.py compiles, each with a text that it accepts. Knows no engine.

R1 to J3 are the kinds of constraint that papers and users of such engines measure; L and P bound the length
of a string; G and T are recursive EBNF and a structural tag.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.unit.runtime.grammar.json_schema.spelled import in_order, named_in


class Case(NamedTuple):
    """`texts`: accepted by the constraint."""

    name: str
    kind: str
    spec: str
    texts: list[str]


CITIES = [
    "Amsterdam", "Athens", "Baghdad", "Bangkok", "Barcelona", "Beijing", "Beirut", "Belgrade", "Berlin",
    "Bogota", "Brasilia", "Brussels", "Bucharest", "Budapest", "Cairo", "Canberra", "Caracas", "Casablanca",
    "Chicago", "Copenhagen", "Dakar", "Delhi", "Dhaka", "Dubai", "Dublin", "Edinburgh", "Geneva", "Hanoi",
    "Havana", "Helsinki", "Istanbul", "Jakarta", "Jerusalem", "Johannesburg", "Kathmandu", "Khartoum",
    "Kinshasa", "Lagos", "Lima", "Lisbon", "Ljubljana", "London", "Madrid", "Manila", "Melbourne",
    "Montevideo", "Moscow", "Nairobi", "Oslo", "Ottawa",
]  # fmt: skip

OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
DATETIME = (
    r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
    r"(\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
STRING = r'"([^"\\\x00-\x1f]|\\["\\/bfnrt]){0,256}"'
CHARACTER = (
    r"\{\n"
    r'    "name": "[\w\d\s]{1,16}",\n'
    r'    "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)",\n'
    r'    "blood status": "(Pure-blood|Half-blood|Muggle-born)",\n'
    r'    "occupation": "(student|teacher|auror|ministry of magic|death eater|order of the phoenix)",\n'
    r'    "wand": \{\n'
    r'        "wood": "[\w\d\s]{1,16}",\n'
    r'        "core": "[\w\d\s]{1,16}",\n'
    r'        "length": [0-9]{1,2}\.[0-9]{0,2}\n'
    r"    \},\n"
    r'    "alive": "(Alive|Deceased)",\n'
    r'    "patronus": "[\w\d\s]{1,16}",\n'
    r'    "bogart": "[\w\d\s]{1,16}"\n'
    r"\}"
)
CHARACTER_TEXT = """{
    "name": "Luna Lovegood",
    "house": "Ravenclaw",
    "blood status": "Pure-blood",
    "occupation": "student",
    "wand": {
        "wood": "Rowan",
        "core": "Phoenix feather",
        "length": 12.5
    },
    "alive": "Alive",
    "patronus": "Hare",
    "bogart": "an empty room"
}"""

PROSE = (
    "The harbour was quiet when the first boats came in, and the light over the water had the colour of "
    "old brass. Nobody spoke; the nets were heavy, the men tired, and the gulls already knew where to land. "
)

SCALARS = {"string": {"type": "string"}, "integer": {"type": "integer"}, "number": {"type": "number"}}


def closed(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


PERSON = closed({"name": SCALARS["string"], "age": SCALARS["integer"], "email": SCALARS["string"]})
ORDER = closed(
    {
        "orderId": SCALARS["string"],
        "customer": closed({"name": SCALARS["string"], "vip": {"type": "boolean"}}),
        "items": {
            "type": "array",
            "minItems": 1,
            "items": closed(
                {
                    "sku": SCALARS["string"],
                    "quantity": SCALARS["integer"],
                    "price": SCALARS["number"],
                    "unit": {"enum": ["piece", "kilogram", "litre", "metre"]},
                }
            ),
        },
        "status": {"enum": ["new", "paid", "shipped", "delivered", "returned"]},
    }
)
ORDER_VALUE = {
    "orderId": "A-2201-77",
    "customer": {"name": "Ingrid Solberg", "vip": True},
    "items": [
        {"sku": "rope-12mm", "quantity": 40, "price": 1.25, "unit": "metre"},
        {"sku": "shackle", "quantity": 6, "price": 7.5, "unit": "piece"},
        {"sku": "paint, white", "quantity": 2, "price": 18.9, "unit": "litre"},
    ],
    "status": "paid",
}


def record() -> tuple[dict[str, Any], dict[str, Any]]:
    """J3: twenty fields of bounded strings, short arrays and alternatives, and a value of it."""
    bounded = {"type": "string", "maxLength": 64}
    kinds: list[tuple[dict[str, Any], Any]] = [
        (bounded, "a line about the harbour at dawn"),
        ({"type": "array", "items": bounded, "maxItems": 5}, ["rope", "brass lamp", "chart of the bay"]),
        ({"anyOf": [bounded, {"type": "integer"}, {"type": "null"}]}, None),
        ({"type": "integer"}, 1907),
    ]
    names = [f"{word}{number}" for number in range(1, 6) for word in ("title", "tags", "origin", "year")]
    pairs = {name: kinds[number % 4] for number, name in enumerate(names)}
    values = {name: value for name, (_, value) in pairs.items()} | {"origin2": "Bergen", "origin4": 12}
    return closed({name: schema for name, (schema, _) in pairs.items()}), values


ARITHMETIC = r"""root ::= expr
expr ::= term (ws [-+] ws term)*
term ::= factor (ws [*/] ws factor)*
factor ::= number | name | "(" ws expr ws ")" | name "(" ws expr (ws "," ws expr)* ws ")"
number ::= [0-9]+ ("." [0-9]+)?
name ::= [a-z_] [a-z0-9_]*
ws ::= " "?
"""
TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call"],
        "tags": [
            {"begin": "<call>", "content": {"type": "json_schema", "json_schema": ORDER}, "end": "</call>"}
        ],
    },
}


def _json(name: str, schema: Any, value: Any) -> Case:
    return Case(name, "json_schema", json.dumps(schema), [json.dumps(value)])


def prose(length: int) -> str:
    """`length` characters, none of which JSON escapes."""
    return (PROSE * (length // len(PROSE) + 1))[:length]


def bounded() -> list[Case]:
    """Strings of bounded length, followed to their bound (of 4,096 characters, the first 1,000)."""
    found = [
        _json(f"L{most} maxLength", {"type": "string", "maxLength": most}, prose(min(most, 1000)))
        for most in (16, 64, 256, 4096)
    ]
    letters = re.sub(r"[^a-zA-Z ]", "", prose(300))[:250]
    found.append(_json("P256 pattern", {"type": "string", "pattern": "^[a-zA-Z ]{0,256}$"}, letters))
    return found


def cases() -> list[Case]:
    return [
        Case("R1 ipv4", "regex", OCTET + rf"(\.{OCTET}){{3}}", ["192.168.107.254"]),
        Case("R2 datetime", "regex", DATETIME, ["2026-11-21T08:45:30.125+02:00"]),
        Case("R3 choice of 50", "regex", "|".join(CITIES), ["Johannesburg"]),
        Case("R4 string {0,256}", "regex", STRING, [json.dumps(prose(250))]),
        Case("R5 character", "regex", CHARACTER, [CHARACTER_TEXT]),
        _json(
            "J1 person", PERSON, {"name": "Mary Ann Lowell", "age": 41, "email": "mary.lowell@example.org"}
        ),
        _json("J2 order", ORDER, ORDER_VALUE),
        _json("J3 20 fields", *record()),
        *bounded(),
        Case(
            "G arithmetic",
            "ebnf",
            ARITHMETIC,
            ["max((alpha + 3.5) * beta, f(g(x), (y - 1) / 2)) + 40 * total"],
        ),
        Case(
            "T tool call",
            "structural_tag",
            json.dumps(TAGS),
            [f"I will order it. <call>{json.dumps(ORDER_VALUE)}</call> Done."],
        ),
    ]


def sample(folder: Path) -> Iterator[Case]:
    """The schema sample in `folder`, with its valid instances. Nothing where there is none."""
    path = folder / "maskbench_sample.jsonl.gz"
    if not path.exists():
        return
    with gzip.open(path, "rt") as lines:
        for line in lines:
            case = json.loads(line)
            named = named_in(case["schema"])
            texts = [_text(in_order(test["data"], named)) for test in case["tests"] if test["valid"]]
            yield Case(case["name"], "json_schema", json.dumps(case["schema"]), texts)


def _text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)

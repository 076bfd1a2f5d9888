"""Constraints meant to hurt, sent to a real server while others use it: each is refused with a reason or
answered, within its deadline; free requests go on; the server stays healthy and its memory bounded."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.process.patience import PATIENCE_S, until

MIB = 1 << 20
GROWTH_MIB = 700
NEW = 24
JSON = {"content-type": "application/json"}


def deep(depth: int, one: str, many: str) -> str:
    return one * depth + many


def _loop(count: int) -> dict[str, Any]:
    names = [f"n{number}" for number in range(count)]
    return {
        "$ref": "#/$defs/n0",
        "$defs": {name: {"$ref": f"#/$defs/{names[(at + 1) % count]}"} for at, name in enumerate(names)},
    }


def _nested(depth: int, keyword: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for number in range(depth):
        schema = {keyword: [schema, {"type": "object", "properties": {f"p{number}": {"type": "string"}}}]}
    return schema


def _tools(count: int) -> dict[str, Any]:
    return {
        "structures": [
            {
                "begin": f"<fn=tool{number}>",
                "end": "</fn>",
                "schema": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": [f"a{number}"],
                    "properties": {
                        f"a{number}": {"type": "string", "maxLength": 40},
                        "b": {"type": "integer"},
                    },
                },
            }
            for number in range(count)
        ],
        "triggers": ["<fn="],
    }


WIDE = {f"k{number}": {"type": "array", "items": {"enum": [number, "x", None]}} for number in range(3000)}
TREE = {
    "$ref": "#/$defs/t",
    "$defs": {
        "t": {
            "type": "object",
            "required": ["l", "r"],
            "properties": {"l": {"$ref": "#/$defs/t"}, "r": {"$ref": "#/$defs/t"}},
        }
    },
}
EXPLODING = {
    "$ref": "#/$defs/d0",
    "$defs": {
        f"d{n}": {
            "type": "array",
            "prefixItems": [{"$ref": f"#/$defs/d{n + 1}"}] * 2,
            "items": False,
            "minItems": 2,
        }
        for n in range(40)
    }
    | {"d40": {"type": "null"}},
}

# name -> (field, value); "refused": 400 alone will do, "taken": 200 alone, "either" as the limits say
HOSTILE: dict[str, tuple[str, Any, str]] = {
    "counter of a counter": ("regex", "(a{1,500}){1,500}", "either"),
    "counter of counters": ("regex", "((a{1,100}b?){1,100}c?){1,100}", "either"),
    "huge counter": ("regex", "[a-z]{1,1000000}", "either"),
    "huge exact counter": ("regex", r"\w{4000000000}", "either"),
    "plus of plus": ("regex", "((a+)+)+b", "taken"),
    "alternations": ("regex", "(a|aa|aaa|a?){50}b" * 3, "either"),
    "the n-th from the end": ("regex", "(a|b)*a(a|b){40}", "either"),
    "many tails": ("regex", "|".join(f"(a|b)*a(a|b){{{n}}}c" for n in range(10, 30)), "either"),
    "wide classes": ("regex", "".join(rf"[\w\u{n:04x}-\uffff]" for n in range(0x100, 0x900, 8)), "either"),
    "all of Unicode, often": ("regex", r"[^\d][\w\W]{1,3000}" * 8, "either"),
    "nested groups": ("regex", "(" * 20000 + "a" + ")" * 20000, "refused"),
    "long alternation": ("regex", "|".join(f"word{n}é" for n in range(9000)), "either"),
    "unclosed": ("regex", "((((", "refused"),
    "empty regex": ("regex", "", "refused"),
    "look-ahead": ("regex", "(?=(a+)+$)a*", "refused"),
    "NULs": ("regex", "\x00{1,3}\\x00", "taken"),
    "lone surrogate": ("regex", "\ud800+", "either"),
    "nothing matches": ("regex", r"[^\w\W]", "refused"),
    "loop of references": ("json_schema", _loop(1), "refused"),
    "long loop of references": ("json_schema", _loop(500), "refused"),
    "endless tree": ("json_schema", TREE, "refused"),
    "doubling references": ("json_schema", EXPLODING, "either"),
    "10 MB": ("json_schema", {"enum": ["x" * 100 + str(n) for n in range(100_000)]}, "refused"),
    "100,000 strings": ("json_schema", {"enum": [f"s{n}" for n in range(60_000)]}, "either"),
    "3,000 properties": ("json_schema", {"type": "object", "properties": WIDE}, "either"),
    "3,000 required": (
        "json_schema",
        {"type": "object", "properties": WIDE, "required": list(WIDE)},
        "either",
    ),
    "oneOf 20 deep": ("json_schema", _nested(20, "oneOf"), "either"),
    "anyOf 60 deep": ("json_schema", _nested(60, "anyOf"), "either"),
    "allOf 60 deep": ("json_schema", _nested(60, "allOf"), "either"),
    "deep text": ("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000, "refused"),
    "deep array": ("json_schema", "[" * 100_000, "refused"),
    "not JSON": ("json_schema", "{nul", "refused"),
    "empty schema text": ("json_schema", "", "refused"),
    "false": ("json_schema", "false", "refused"),
    "unsatisfiable": ("json_schema", {"type": "string", "minLength": 5, "maxLength": 2}, "refused"),
    "unsatisfiable by parts": (
        "json_schema",
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        "refused",
    ),
    "long string": ("json_schema", {"type": "string", "minLength": 100_000}, "either"),
    "hard pattern": ("json_schema", {"type": "string", "pattern": "^(a|aa|(a*b?)*)*(x+x+)+y$"}, "either"),
    "big counts": ("json_schema", {"type": "array", "minItems": 10**9, "items": {"type": "null"}}, "either"),
    "unique of many": (
        "json_schema",
        {"type": "array", "uniqueItems": True, "minItems": 400, "items": {"enum": list(range(300))}},
        "either",
    ),
    "NUL and surrogate": ("json_schema", '{"enum": ["\\u0000", "\\ud800"]}', "either"),
    "left recursion": ("ebnf", 'root ::= root root root | "a"', "taken"),
    "mutual recursion": ("ebnf", 'root ::= a\na ::= b | "x"\nb ::= c | a\nc ::= a', "either"),
    "recursion without end": ("ebnf", "root ::= a\na ::= b\nb ::= a", "refused"),
    "ambiguous": ("ebnf", 'root ::= e\ne ::= e "+" e | e e | ("a"? "a"?)* | "b"', "either"),
    "deep grammar": ("ebnf", "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000, "refused"),
    "many rules": (
        "ebnf",
        "root ::= r0\n"
        + "\n".join(f'r{n} ::= "a" r{n + 1} | r{n + 1}' for n in range(4000))
        + '\nr4000 ::= "z"',
        "either",
    ),
    "repeat of repeat": ("ebnf", 'root ::= (("a"{1,200}){1,200}){1,200}', "either"),
    "no grammar": ("ebnf", "=" * 50_000, "refused"),
    "128 tools": ("structural_tag", _tools(128), "taken"),
    "3,000 tools": ("structural_tag", _tools(3000), "either"),
    "deep format": (
        "structural_tag",
        '{"type":"structural_tag","format":' + '{"type":"optional","content":' * 3000 + "1" + "}" * 3001,
        "refused",
    ),
}


HEAVY = {
    "3,000 tools", "3,000 required", "3,000 properties", "long string", "big counts", "unique of many",
    "doubling references", "huge exact counter", "all of Unicode, often", "long alternation", "10 MB",
    "NUL and surrogate", "long loop of references", "wide classes",
}  # fmt: skip
"""Those that take a second and more."""
LIGHT = [name for name in HOSTILE if name not in HEAVY]


class Others:
    """Free requests, one after the other, while the hostile ones are served."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.failures: list[str] = []
        self.seconds: list[float] = []
        self._thread = threading.Thread(target=self._go, daemon=True)

    def __enter__(self) -> Others:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)

    def _go(self) -> None:
        body = {"text": "The", "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S) as client:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    answer = client.post("/generate", json=body)
                    if answer.status_code != 200 or answer.json()["meta_info"]["completion_tokens"] != 8:
                        self.failures.append(answer.text[:200])
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                self.seconds.append(time.monotonic() - began)


@pytest.fixture(scope="module")
def hostile_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tests.process.conftest import Served

    made = Served(tmp_path_factory.mktemp("hostile"), "--log-level", "warning")
    try:
        yield made.wait_ready()
    finally:
        made.kill()


def body_of(field: str, value: Any) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    request = {
        "text": "Say",
        "sampling_params": {"max_new_tokens": NEW, "temperature": 1.0, "seed": 3, field: text},
    }
    return json.dumps(request).encode()


def check(name: str, answer: httpx.Response, wanted: str) -> None:
    told = answer.text[:600]
    assert answer.status_code in {"refused": (400, 413), "taken": (200,)}.get(wanted, (200, 400, 504)), (
        name,
        told,
    )
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert len(error["message"]) > 10, told
        return
    reason = answer.json()["meta_info"]["finish_reason"]["type"]
    assert reason in ("stop", "length"), told


def memory(server: Any) -> float:
    return max(one.memory_info().rss for one in server.children().values()) / MIB


@pytest.mark.parametrize("names", [pytest.param(LIGHT, id="light")])
@pytest.mark.timeout(1800)
def test_all_are_refused_or_answered_while_others_go_on(hostile_server, names):
    url = hostile_server.url
    slow: dict[str, float] = {}
    with Others(url) as others, httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        until(lambda: others.seconds)
        before = memory(hostile_server)
        for name in names:
            field, value, wanted = HOSTILE[name]
            began, served = time.monotonic(), len(others.seconds)
            content = body_of(field, value)
            answer = client.post("/generate", content=content, headers=JSON)
            slow[name] = time.monotonic() - began
            check(name, answer, wanted)
            assert slow[name] < 10 or len(others.seconds) > served, (
                f"{name}: nobody else was served meanwhile"
            )
        assert client.get("/health").status_code == 200
        after = memory(hostile_server)
    print(
        f"memory {before:.0f} -> {after:.0f} MiB; free requests {len(others.seconds)},"
        f" slowest {max(others.seconds):.2f} s; slowest hostile"
        f" {sorted(((round(s, 2), n) for n, s in slow.items()), reverse=True)[:8]}"
    )
    assert not others.failures, others.failures[:3]
    assert after - before < GROWTH_MIB
    assert all(one.is_running() for one in hostile_server.children().values())
    dead = {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    assert not {psutil.Process(one.pid).status() for one in hostile_server.children().values()} & dead

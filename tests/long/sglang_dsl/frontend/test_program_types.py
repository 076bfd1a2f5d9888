"""What static checkers know of programs: mypy, strict, and pyright over the snippets below. A line's comment
says what they must reveal there, or, behind "error", that they must report one, and which it is for mypy."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import typing
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_dsl.frontend import generation
from sglang_dsl.function import RUN_OPTIONS, SglFunction
from sglang_dsl.interpreter.parameters import PARAMETERS

pytest.importorskip("mypy")

ROOT = Path(__file__).resolve().parents[4]
TYPES_S = 900.0  # with nothing remembered of the package, on a machine that does much else
PAGE = """
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NewType, Optional

import sglang_dsl as sgl
from sglang_dsl import AsyncProgramState, ProgramState, gen
from sglang_dsl.ir import Gen

Age = NewType("Age", int)


@dataclass
class Character:
    name: str
    level: int


def written(fork: ProgramState, word: str) -> None:
    fork += word


def counted(fork: ProgramState, word: str) -> int:
    return len(word)


async def awaited(fork: AsyncProgramState, word: str) -> int:
    return len(word)


@sgl.function
def tell(s: ProgramState, question: str, size: int = 2) -> str:
    age = gen("age", int)
    s += sgl.user(question) + sgl.assistant("I am " + age)
    mood = gen("mood", choices=["good", "bad"])
    s += mood
    hero = gen("hero", Character)
    s += hero
    reveal_type(s[age])  # int
    reveal_type(s[mood])  # str
    reveal_type(s[hero].level)  # int
    reveal_type(s["age"])  # Any
    reveal_type(s.value("age", int))  # int
    reveal_type(s.value("age", Age))  # Age
    reveal_type(s.value("tags", list[str]))  # list[str]
    reveal_type(s.fork(2)[0][hero])  # Character
    reveal_type(s.map(written, ["a"]))  # list[ProgramState]
    reveal_type(s.map(counted, ["a"]))  # list[int]
    reveal_type(s.map(lambda fork, word: len(word), ["a"]))  # list[int]
    s.map(counted, [1])  # error: arg-type
    s.temperature = 0.2  # error: attr-defined
    s.answer  # error: attr-defined
    age.strip()  # error: attr-defined
    s[3]  # error: call-overload
    s.value("age", 3)  # error: arg-type
    return s[mood]


@sgl.function(temperature=0)
def named(s: ProgramState, place: str) -> None:
    s += place


@sgl.function
async def later(s: AsyncProgramState, question: str) -> int:
    age = gen("age", int)
    s += age
    reveal_type(await s[age])  # int
    reveal_type(await s.value("age", int))  # int
    reveal_type(await s["age"])  # Any
    reveal_type(await s.map(awaited, ["a"]))  # list[int]
    return await s[age]


class Guide:
    @sgl.function
    def ask(self, s: ProgramState, question: str) -> float:
        s += question
        return 0.5


def nodes(maybe: list[str] | None) -> None:
    reveal_type(gen("age", int))  # Gen[int]
    reveal_type(gen("age", int, 16, temperature=0.5))  # Gen[int]
    reveal_type(gen("c", Character, max_tokens=64))  # Gen[Character]
    reveal_type(gen("c", list[Character]))  # Gen[list[Character]]
    reveal_type(gen("age", int, n=3))  # Gen[list[int]]
    reveal_type(gen("age", int, retries=2))  # Gen[int]
    reveal_type(gen("age", Literal["a", "b"]))  # Gen[Literal['a'] | Literal['b']]
    reveal_type(gen("age", Annotated[int, "a comment"]))  # Gen[int]
    reveal_type(gen("age", Optional[int]))  # Gen[int | None]
    reveal_type(gen("age", Age))  # Gen[Age]
    reveal_type(gen("ages", dict[str, Age] | None))  # Gen[dict[str, Age] | None]
    reveal_type(gen("age", Age, n=2))  # Gen[list[Age]]
    reveal_type(gen("age", int | Character))  # Gen[int | Character]
    reveal_type(gen("age", int | None, n=2))  # Gen[list[int | None]]
    reveal_type(gen("age", tuple[int, str], 16))  # Gen[tuple[int, str]]
    told: Gen[Literal["a", "b"]] = gen("age", Literal["a", "b"])
    reveal_type(told)  # Gen[Literal['a'] | Literal['b']]
    reveal_type(gen())  # Gen[str]
    reveal_type(gen("x"))  # Gen[str]
    reveal_type(gen("x", 16))  # Gen[str]
    reveal_type(gen(name="x", max_tokens=16, stop=["."], regex="[a-z]+"))  # Gen[str]
    reveal_type(gen("x", dtype=int))  # Gen[str]
    reveal_type(gen("x", json_schema=Character))  # Gen[str]
    reveal_type(gen("x", n=3))  # Gen[list[str]]
    reveal_type(gen("x", choices=["a", "b"], temperature=1.0))  # Select
    reveal_type(gen("x", choices=maybe))  # Gen[Any] | Select
    reveal_type(sgl.select("x", ["a", "b"]))  # Select
    reveal_type(sgl.gen_int("x"))  # Gen[str]
    reveal_type(sgl.image("cat.png"))  # Media
    reveal_type(sgl.user("a") + gen("x"))  # Seq
    reveal_type(sgl.lang.ir.SglSelect("x"))  # Select
    sgl.lang.nothing  # error: attr-defined
    gen("x", temprature=0)  # error: call-overload
    gen("x", temperature="hot")  # error: call-overload
    gen("x", int, regex="[0-9]+")  # error: call-overload
    reveal_type(gen("x", choices=["a"], max_tokens=3))  # Select
    gen(3)  # error: call-overload
    sgl.select("x", choices=3)  # error: arg-type
    sgl.user(3)  # error: arg-type


def runs(backend: sgl.MockBackend) -> None:
    reveal_type(tell)  # SglFunction[[question: str, size: int =], str]
    reveal_type(tell("Who?"))  # State[str]
    reveal_type(tell.run(question="Who?", size=3))  # State[str]
    reveal_type(tell.run(question="Who?", backend=backend, temperature=0))  # State[str]
    reveal_type(tell.stream("Who?"))  # State[str]
    reveal_type(tell.run("Who?").choice("mood").probability)  # float
    reveal_type(tell.run("Who?").usage()["calls"])  # int
    reveal_type(named(place="Ostrel"))  # State[None]
    reveal_type(tell.options(temperature=0))  # SglFunction[[question: str, size: int =], str]
    reveal_type(tell.bind(size=3).run("Who?"))  # State[str]
    reveal_type(Guide().ask.run("Who?"))  # State[float]
    reveal_type(tell.trace().tree())  # str
    reveal_type(tell.run("Who?").ret_value)  # str
    reveal_type(later.run("Who?").ret_value)  # int
    reveal_type(tell.run("Who?", backend=backend).ret_value)  # str
    reveal_type(Guide().ask.run("Who?").ret_value)  # float
    reveal_type(Guide().ask)  # SglFunction[[question: str], float]
    reveal_type(Guide.ask)  # SglFunction[[s: ProgramState, question: str], float]
    Guide().ask.run(3)  # error: call-overload
    Guide().ask(query="Who?")  # error: call-overload
    tell()  # error: call-overload
    tell.run(query="Who?")  # error: call-overload
    tell.run("Who?", size="3")  # error: call-overload
    tell.options(temperature=0).run("Who?", "How?")  # error: call-overload
    tell.options(temprature=0)  # error: call-arg
    tell.options(temperature="hot")  # error: arg-type
    sgl.function(temprature=0)  # error: call-overload
    sgl.function(cache="always")  # error: call-overload
    named.run(where="Ostrel")  # error: call-overload


def batches(backend: sgl.MockBackend, lazy: bool) -> None:
    items = [{"question": "Who?"}]
    reveal_type(tell.run_batch(items))  # Batch[State[str]]
    reveal_type(tell.run_batch(items)[0].ret_value)  # str
    reveal_type([state.ret_value for state in later.run_batch(items)])  # list[int]
    reveal_type(tell.run_batch(items, on_error="return"))  # Batch[State[str] | Exception]
    reveal_type(tell.run_batch(items, generator_style=True, backend=backend))  # Iterator[State[str]]
    both = tell.run_batch(items, generator_style=True, on_error="return")
    reveal_type(both)  # Iterator[State[str] | Exception]
    for state in tell.run_batch(items, generator_style=lazy):
        reveal_type(state)  # State[str] | Exception
    tell.run_batch(items, num_thread=3)  # error: call-overload
    tell.run_batch(items, on_error="ignore")  # error: call-overload
    tell.run_batch(items, temperature="hot")  # error: call-overload


async def beside(backend: sgl.MockBackend) -> None:
    reveal_type(await later("Who?"))  # AsyncState[int]
    reveal_type(await later.arun(question="Who?", backend=backend))  # AsyncState[int]
    reveal_type(await tell.arun("Who?"))  # AsyncState[str]
    reveal_type(await tell.astream("Who?"))  # AsyncState[str]
    async with later.astream("Who?") as streamed:
        reveal_type(streamed.ret_value)  # int
        async for piece in streamed.text_iter():
            reveal_type(piece)  # str
        async for pair in streamed.text_async_iter("age", return_meta_data=True):
            reveal_type(pair)  # tuple[str, dict[str, Any]]
    for piece in tell.stream("Who?").text_iter():
        reveal_type(piece)  # str
    async for piece in tell.stream("Who?").text_async_iter():
        reveal_type(piece)  # str
    reveal_type(later.run("Who?"))  # State[int]
    reveal_type(later.arun_batch([{}]))  # AsyncIterator[AsyncState[int]]
    reveal_type(later.arun_batch([{}], on_error="return"))  # AsyncIterator[AsyncState[int] | Exception]
    await later.arun(query="Who?")  # error: call-overload
"""
MARKED = re.compile(r"  # (error: )?(.+)$")
SAID = re.compile(r"^[^:]+:(\d+): (error|note): (.*)$")


def wanted(page: str = PAGE) -> dict[int, str]:
    """Line -> what mypy must say of it."""
    found = {}
    for number, line in enumerate(page.splitlines(), 1):
        if mark := MARKED.search(line):
            found[number] = ("error " if mark[1] else "") + mark[2]
    return found


def said(lines: list[str]) -> dict[int, str]:
    """Line -> what mypy said of it, module names left out."""
    found = {}
    for line in lines:
        if (match := SAID.match(line)) is None:
            continue
        number, kind, text = int(match[1]), match[2], match[3]
        if kind == "error":
            found[number] = f"error {text[text.rindex('[') + 1 : -1]}"
        elif text.startswith("Revealed type is "):
            bare = text.removeprefix("Revealed type is ").strip('"')
            found[number] = re.sub(r"\b[a-z_]+(?:\.[a-z_]+)*\.(?=[A-Z])", "", bare).replace("builtins.", "")
    return found


@pytest.mark.timeout(TYPES_S + 20)  # it reads the whole package, where nothing is remembered of it
def test_mypy_knows_the_types(tmp_path: Path) -> None:
    """And finds nothing wrong with the examples. One run for both, as most of its time is the package's."""
    file = tmp_path / "programs.py"
    file.write_text(PAGE, encoding="utf-8")
    examples = sorted(map(str, (ROOT / "examples").glob("[0-9]*.py")))
    assert len(examples) > 7
    words = ["--strict", "--follow-imports=silent", "--no-error-summary"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words, str(file), *examples],
        capture_output=True,
        text=True,
        timeout=TYPES_S,
        check=False,
        cwd=ROOT,
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert [line for line in lines if file.name not in line] == []
    found, right = said(lines), wanted()
    assert len(right) > 70
    assert found == right


def revealed_by_pyright(text: str) -> str:
    """A revealed type, as mypy writes it."""
    text = re.sub(r"\[\((.*?)\)", r"[[\1]", text)
    text = re.sub(r" = [^,\])]+", " =", text)
    return re.sub(r"Literal\[('\w+'), ('\w+')\]", r"Literal[\1] | Literal[\2]", text)


@pytest.mark.timeout(TYPES_S + 20)
def test_pyright_knows_the_same(tmp_path: Path) -> None:
    """By basedpyright, which brings its own node: pyright's package loads one when it is run."""
    pytest.importorskip("basedpyright")
    (tmp_path / "programs.py").write_text(PAGE, encoding="utf-8")
    settings = {"include": ["programs.py"], "extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "-p", str(tmp_path), "--outputjson"],
        capture_output=True,
        text=True,
        timeout=TYPES_S,
        check=False,
    )
    found: dict[int, str] = {}
    for one in json.loads(done.stdout)["generalDiagnostics"]:
        number, text = one["range"]["start"]["line"] + 1, one["message"].splitlines()[0]
        if one["severity"] == "error":
            found[number] = "error"
        elif match := re.fullmatch(r'Type of ".*" is "(.*)"', text):
            found.setdefault(number, revealed_by_pyright(match[1]))
    assert found == {number: text.split("error ")[0] or "error" for number, text in wanted().items()}


def test_checkers_know_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "sglang_dsl" / "frontend" / "static_types.pyi"
    loader = SourceFileLoader("static_types", str(path))
    checked: Any = ModuleType("static_types")
    monkeypatch.setitem(sys.modules, "static_types", checked)
    vars(checked)["__file__"] = str(path)
    loader.exec_module(checked)
    gen_words = set(inspect.signature(generation._gen).parameters)
    forms = set(typing.get_type_hints(checked.Forms)) | set(typing.get_type_hints(checked.TypedArguments))
    assert forms | {"typed", "n", "choices", "choices_method"} == gen_words
    batch = set(typing.get_type_hints(checked.BlockingBatchArguments))
    own = set(inspect.signature(SglFunction.run_batch).parameters)
    assert batch == (own - {"self", "batch_kwargs", "generator_style", "on_error", "kwargs"}) | RUN_OPTIONS
    told = re.findall(r"\*args: Any, (\w+): Any, ", inspect.getsource(checked.Runs))
    assert sorted(told) == sorted(RUN_OPTIONS), f"{path} lists all keyword arguments of run"
    assert set(PARAMETERS) < RUN_OPTIONS


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "sglang_dsl" / "py.typed").is_file()

"""The tutorial on programs: its Python runs as it stands and prints what it shows, and its table of backends
is what the backends answer when they are asked. To write both anew:

    python tests/process/docs/test_programs_tutorial.py
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

import sglang_dsl as sgl
from runtime.api import Engine
from sglang_dsl import assistant, gen, select, user
from sglang_dsl.backends.base import Backend
from sglang_dsl.ir import Seq
from tests.process.docs.pages import BLOCK, printed

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "tutorials" / "programs.md"
TABLE = re.compile(r"(?<=<!-- table: backends -->\n).*?(?=<!-- end -->)", re.DOTALL)


# -- the table of backends -----------------------------------------------------------------------------------

NOWHERE = "http://127.0.0.1:9"
"""Nobody listens there: what a backend would send is an error of another kind than what it refuses."""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
    "triggers": ["<a>"],
}


ASKS: dict[str, Any] = {
    "turns": user("Hello.") + assistant(gen("x", max_tokens=2)),
    "text without turns (elsewhere sent as one user turn)": "Hello" + gen("x", max_tokens=2),
    "`tools`": sgl.tools([sgl.Tool("now")]) + user("Hello.") + assistant(gen("x", max_tokens=2)),
    "continuing an open turn": user("Hello.") + assistant("I am " + gen("x", max_tokens=2)),
    "`regex=`": gen("x", regex="[a-f]{2}"),
    "JSON schemas, types": gen("x", json_schema=SCHEMA, max_tokens=20),
    "`ebnf=`": gen("x", ebnf='root ::= "a" | "b"'),
    "`structural_tag=`": gen("x", structural_tag=TAGS, max_tokens=2),
    "`select`": select("x", ["good", "bad"]),
    "`n`": gen("x", n=2, max_tokens=2),
    "`seed`": gen("x", seed=3, max_tokens=2),
    "`top_k`": gen("x", top_k=3, max_tokens=2),
    "`min_p`": gen("x", min_p=0.1, max_tokens=2),
    "`frequency_penalty`": gen("x", frequency_penalty=0.1, max_tokens=2),
    "`repetition_penalty`": gen("x", repetition_penalty=1.1, max_tokens=2),
    "`stop`": gen("x", stop="q", max_tokens=2),
    "`stop_regex`": gen("x", stop_regex="q", max_tokens=2),
    "`return_logprob`": gen("x", return_logprob=True, max_tokens=2),
}


COMPLETION = "OpenAI, completion"


def backends(engine: Engine) -> dict[str, Any]:
    there: dict[str, Any] = {"base_url": NOWHERE, "api_key": "k", "max_retries": 0}
    return {
        "bundled": engine,
        "OpenAI, chat": sgl.OpenAI("some-model", is_chat_model=True, **there),
        COMPLETION: sgl.OpenAI("some-model", is_chat_model=False, **there),
        "compatible": sgl.OpenAI("some-model", is_chat_model=True, extensions="all", **there),
        "Anthropic": sgl.Anthropic("some-model", **there),
        "Gemini": sgl.Gemini("some-model", **there),
    }


def asked(backend: str, form: Any) -> Any:
    """The form in a conversation, or where there are none in a text."""
    if isinstance(form, Seq):
        return form
    return "Hello. " + form if backend == COMPLETION else user("Hello.") + assistant(form)


def takes(backend: Any, form: Any) -> bool:
    """Whether it does not refuse. The bundled engine must answer, too."""
    error = sgl.function(lambda s: s.__iadd__(form)).run(backend=backend).error()
    if isinstance(backend, Backend):
        assert isinstance(error, sgl.BackendError), error
        return not isinstance(error, sgl.Unsupported)
    assert error is None, error
    return True


def table(engine: Engine) -> str:
    columns = backends(engine)
    lines = [["feature", *columns], ["---"] * (1 + len(columns))]
    try:
        lines += [
            [what, *("yes" if takes(one, asked(name, form)) else "-" for name, one in columns.items())]
            for what, form in ASKS.items()
        ]
    finally:
        for backend in columns.values():
            if isinstance(backend, Backend):
                backend.close()
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# -- the tests -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_its_python_prints_what_it_shows(page: str, engine: Engine, tmp_path: Path) -> None:
    shown = [output for _, output in BLOCK.findall(page)]
    assert len(shown) > 15
    assert printed(page, engine, tmp_path) == shown


def test_its_table_is_what_the_backends_say(page: str, engine: Engine) -> None:
    found = TABLE.search(page)
    assert found is not None
    assert found[0] == table(engine)


def test_it_names_what_there_is(page: str) -> None:
    for name in set(re.findall(r"\bsgl\.([A-Za-z_]+)", page)):
        assert hasattr(sgl, name), name


def rewritten(page: str) -> str:
    with Engine("pocket", max_total_tokens=8192) as engine, tempfile.TemporaryDirectory() as folder:
        outputs = iter(printed(page, engine, Path(folder)))

        def block(found: re.Match[str]) -> str:
            said = next(outputs)
            shown = f"\n```text\n{said}```\n" if said else ""
            return f"```python\n{found[1]}```\n{shown}"

        page = BLOCK.sub(block, page)
        rows = table(engine)
        return TABLE.sub(lambda _: rows, page)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

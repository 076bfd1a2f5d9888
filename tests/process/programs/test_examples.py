"""The examples run as they are written, on one server of the bundled checkpoint, which --backend names."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest

import sglang_dsl as sgl
from sglang_dsl.backends import as_backend
from tests.process.conftest import Served
from tests.process.patience import PROGRAM_S

FOLDER = Path(__file__).parents[3] / "examples"
FILES = sorted(FOLDER.glob("[0-9]*.py"))
# A line of each example's output that any run of it has.
SAID = {
    "01_first_program": "ASSISTANT: The river of Ostrel is Sarn.",
    "02_chat_two_turns": "user: And what is its capital called?",
    "03_fork_and_select": "positive, chosen among\n  positive: ",
    "04_regex_fields": "ASSISTANT: 30 + 12 = 40 + 2 = 42\n\nas a number: 42",
    "05_batch_and_stream": "\nBackendError: ",
    "06_remote": "refused (400): ",
    "07_character_sheet": "Mobi of Caturn, 42 years old, works as a potter",
    "08_async_and_branches": "no winner: none of 6 branches was accepted: 6 were rejected",
    "09_record_and_replay": "the same again: True\nreplayed: True - 4 calls\nnot there: this call is not in",
    "10_react": """\
Question:    What is the weather in Lisbon?
Action:      get_weather {"city": "Lisbon"}
Observation: {"degrees": 21, "sky": "sun"}
Answer:      The weather in Lisbon is sun with 21 degrees.
Question:    Book a table for 4 in Lisbon.
Action:      book_table {"city": "Lisbon", "people": 4}
Observation: {"table": 12}
Answer:      Table 12 in Lisbon is booked for 4 people.

Question:    What is the weather in Oslo?
Action:      get_weather {"city": "Oslo"}
Observation: {"degrees": 3, "sky": "snow"}
Answer:      The weather in Oslo is snow with 3 degrees.
Question:    Set a timer for 40 minutes.
Action:      set_timer {"minutes": 40}
Observation: {"status": "ok"}
Answer:      The timer is set for 40 minutes.
""",
    "11_parallel_tools": """\
USER: What time is it in Oslo?
ASSISTANT: get_time({"city": "Oslo"})
TOOL: {"time": "09:15"}
ASSISTANT: The time in Oslo is 09:15.
""",
    "12_extract_folder": """\
9 files: 8 asked now, 0 known from before
{"file": "badol.txt", "name": "Drek Badol", "age": 24, "city": "Grara", "job": "farmer"}
""",
    "13_rag_service": """\
Question: Tell me about Caku.
Source:   caku.txt
Text:     {""",
    "14_judge_chart": "as a person says: 7 of 7",
}


@pytest.fixture(autouse=True)
def _loaded_only_here() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("example_"):
            del sys.modules[name]


def loaded(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_runs_on_the_backend_that_is_named(
    file: Path, shared_server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        loaded(file).main(["--backend", shared_server.url])
    finally:
        sgl.set_default_backend(None)
    assert SAID[file.stem] in capsys.readouterr().out


@pytest.mark.parametrize("name", ["01_first_program", "06_remote"])
def test_an_example_needs_no_flag(name: str) -> None:
    """On an engine in its process, and on a server of its own."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py")],
        capture_output=True, text=True, timeout=PROGRAM_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert SAID[name] in done.stdout
    assert done.stderr == ""


def test_a_wrong_flag_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        loaded(FOLDER / "01_first_program.py").main(["--backend", "nowhere"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("or a server's URL, got 'nowhere'")


def test_an_extraction_goes_on_where_it_was(
    shared_server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, folder, out = loaded(FOLDER / "12_extract_folder.py"), tmp_path / "in", tmp_path / "out"
    shutil.copytree(module.LETTERS, folder)
    flags = ["--backend", shared_server.url, "--folder", str(folder), "--out", str(out)]
    later = (folder / "kace.txt").rename(tmp_path / "kace.txt")
    module.main(flags)
    assert "8 files: 7 asked now, 0 known from before" in capsys.readouterr().out
    later.rename(folder / "kace.txt")
    module.main(flags)
    assert "9 files: 1 asked now, 7 known from before" in capsys.readouterr().out
    people = [json.loads(line) for line in (out / "people.jsonl").read_text().splitlines()]
    assert len(people) == 8
    assert {"file": "kace.txt", "name": "Kace", "age": 42, "city": "Rovolt", "job": "judge"} in people


def test_the_service_refuses_what_it_cannot_answer(shared_server: Served) -> None:
    module = loaded(FOLDER / "13_rag_service.py")
    service = module.Service(module.LETTERS, as_backend(shared_server.url))
    with module.running(service) as url, httpx.Client(base_url=url, timeout=PROGRAM_S) as client:
        unknown = client.post("/ask", json={"question": "Xylophones?"})
        assert "No document has any of these words." in unknown.text
        for status, request in {
            400: {"json": {"query": "Who is Caku?"}},
            413: {"json": {"question": "a" * 5000}},
            415: {"content": b'{"question": "Who is Caku?"}'},
        }.items():
            refused = client.post("/ask", **request)
            assert refused.status_code == status
            assert refused.json()["error"]
        elsewhere = client.post("/ask", json={"question": "Who?"}, headers={"host": "evil.example"})
        assert elsewhere.status_code == 400
        assert client.get("/ask").status_code == 405


def test_the_chart_is_a_picture(shared_server: Served, tmp_path: Path) -> None:
    file = tmp_path / "verdicts.svg"
    module = loaded(FOLDER / "14_judge_chart.py")
    module.main(["--backend", shared_server.url, "--svg", str(file)])
    kinds = [one.tag.rpartition("}")[2] for one in ElementTree.parse(file).getroot()]
    assert kinds.count("circle") == len(module.WORDINGS) * len(module.REVIEWS)
    assert kinds.count("rect") == len(module.REVIEWS) + 1


def test_there_are_examples() -> None:
    assert {file.stem for file in FILES} == set(SAID)

"""Run files: what programs ask and are answered, line by line; and `sglang-dsl view`, which shows them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

import sglang_dsl as sgl
from runtime import viewer
from sglang_dsl.__main__ import main
from sglang_dsl.console import view
from sglang_dsl.console.view import ViewServer
from sglang_dsl.errors import BadProgram
from sglang_dsl.hooks import CallEvent
from sglang_dsl.views import run_file
from sglang_dsl.views.run_file import Begin, Cache, End, Failed, Head, read_run, write_run

ROOT = Path(__file__).resolve().parents[4]
PATIENCE_S = 300.0


@sgl.function
def program(s: Any, question: str) -> None:
    s += sgl.user(question) + sgl.assistant(sgl.gen("x", max_tokens=4))
    forks = s.fork(2)
    forks += sgl.user("more") + sgl.assistant(sgl.gen("y", max_tokens=4))
    forks.join()
    s += sgl.select("z", ["d", "e"])


def written(path: Path, **options: Any) -> list[run_file.Line]:
    with write_run(path), suppress(sgl.ProgramError):
        program.run("why?", backend=sgl.MockBackend(**options)).sync()
    return read_run(path)


def test_a_run_is_written_and_read(tmp_path: Path) -> None:
    head, *lines = written(tmp_path / "run.jsonl", replies=["<script>", "b", "c"])
    assert isinstance(head, Head)
    begins = [one for one in lines if isinstance(one, Begin)]
    ends = {one.call: one for one in lines if isinstance(one, End)}
    assert [(one.kind, one.name, one.branch, one.step) for one in begins] == [
        ("gen", "x", (), 0), ("gen", "y", (0,), 0), ("gen", "y", (1,), 0), ("select", "z", (), 1),
    ]  # fmt: skip
    assert {one.run for one in begins} == {begins[0].run}
    assert {one.program for one in begins} == {"program"}
    assert begins[0].source is not None
    assert re.search(r"test_run_files\.py:\d+$", begins[0].source)
    first = begins[0]
    assert first.request["messages"][0] == {"role": "user", "content": "why?"}
    assert ends[first.call].reply["texts"] == ["<script>"]
    assert ends[first.call].seconds >= 0
    assert first.at >= head.began
    assert "<script>" in str(begins[3].request["messages"])
    assert len(ends[begins[3].call].reply["scores"]) == 2


def test_runs_are_told_apart_and_items_named(tmp_path: Path) -> None:
    with write_run(tmp_path / "run.jsonl"):
        program.run_batch([{"question": "a"}, {"question": "b"}], backend=sgl.MockBackend())
    begins = [one for one in read_run(tmp_path / "run.jsonl") if isinstance(one, Begin)]
    assert len({one.run for one in begins}) == 2
    assert {one.index for one in begins} == {0, 1}


def test_failures_and_what_is_no_json_are_written(tmp_path: Path) -> None:
    lines = written(tmp_path / "run.jsonl", errors={0: OSError("half \ud800 a pair")})
    [failed] = [one for one in lines if isinstance(one, Failed)]
    assert failed.error.type == "OSError"
    assert failed.error.message == "half ? a pair"
    path = tmp_path / "other.jsonl"
    with write_run(path) as writer:
        event = CallEvent("begin", 1, "p", "gen", None, (), 0, request=lambda: {"a": 1 << 70, "b": {3}})
        writer(event)
        writer.cache({"nodes": []})
    _, begin, cache = read_run(path)
    assert isinstance(begin, Begin)
    assert begin.request["a"] == 1 << 70 or float(begin.request["a"]) == float(1 << 70)
    assert isinstance(cache, Cache)


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadProgram, match="cannot be written"), write_run(tmp_path / "none" / "run.jsonl"):
        pass
    full = Path("/dev/full")
    if full.exists():
        with pytest.raises(BadProgram, match="is incomplete"), write_run(full):
            program.run("why?", backend=sgl.MockBackend()).sync()


# -- reading -------------------------------------------------------------------------------------------------

HEAD = b'{"type":"run","version":1,"made_by":"x","began":1.0}\n'
BROKEN = {
    b"": "is empty",
    b"hello": "line 1",
    b"hello\n": "line 1: it is not a run file",
    b'{"type":"end","call":1,"seconds":1.0}\n': "line 1: it is not a run file",
    HEAD.replace(b'"version":1', b'"version":7'): "line 1: its format has version 7",
    HEAD + b'{"type":"begin","call":1}\n': "line 2: is no line of a run file",
    HEAD + HEAD + b"{\n": "line 3: is no line of a run file",
    HEAD + b'\xff{"type":"end"}\n': "line 2",
    HEAD + b"[" * 100_000 + b"\n": "line 2",
    HEAD + b'{"type":"end","call":1,"seconds":"long"}\n': "line 2",
}


@pytest.mark.parametrize("data", BROKEN, ids=BROKEN.values())
def test_a_broken_file_is_one_line_and_exit_code_2(
    tmp_path: Path, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(data)
    with pytest.raises(BadProgram, match=BROKEN[data]):
        read_run(path)
    assert main(["view", str(path), "--no-browser"]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"error: [^\n]+\n", said)
    assert BROKEN[data] in said


def test_what_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(HEAD + b'{"type":"end","ca')
    assert len(read_run(path)) == 1
    path.write_bytes(HEAD[:20])
    assert read_run(path, growing=True) == []


def test_files_have_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(HEAD + b'{"type":"end","call":1,"seconds":1.0}\n')
    monkeypatch.setattr(run_file, "MAX_LINE_BYTES", 60)
    assert len(read_run(path)) == 2
    monkeypatch.setattr(run_file, "MAX_LINE_BYTES", 20)
    with pytest.raises(BadProgram, match="line 1: has 52 bytes; at most 20"):
        read_run(path)
    monkeypatch.setattr(run_file, "MAX_FILE_BYTES", 10)
    with pytest.raises(BadProgram, match="has at most 10"):
        read_run(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.jsonl"], "does not exist"),
        (["."], "is not a file"),
        (["none/run.jsonl", "--live"], "the folder of none/run.jsonl does not exist"),
        (["a.jsonl"] * 17, "at most 16"),
        (["a.jsonl", "--port", "70000"], "--port 70000"),
        ([], "required: FILE"),
    ],
)
def test_wrong_words_are_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: Any, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["view", *words, "--no-browser"])
    except SystemExit as end:
        code = int(str(end.code))
    assert code == 2
    assert re.fullmatch(r"error: [^\n]+\n", told := capsys.readouterr().err)
    assert said in told


# -- the server ----------------------------------------------------------------------------------------------


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[tuple[ViewServer, httpx.Client, Path]]:
    path = tmp_path / "run.jsonl"
    path.write_bytes(HEAD)
    with ViewServer([path], live=True) as server, httpx.Client(trust_env=False, timeout=300) as client:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server, client, path
        finally:
            server.shutdown()
            thread.join(300)


def test_the_page_and_the_file_are_given(shown: tuple[ViewServer, httpx.Client, Path]) -> None:
    server, client, path = shown
    page = client.get(server.url)
    assert page.status_code == 200
    assert page.headers["content-security-policy"] == viewer.HEADERS["Content-Security-Policy"]
    sources = client.get(f"{server.url}/sources.json").json()
    assert sources["runs"] == [{"name": "run.jsonl", "url": "viewer/run/0", "live": True}]
    for name in viewer.NAMES:
        assert client.get(f"{server.url}/{name}").content == viewer.asset(name)[0]
    more = b'{"type":"end","call":1,"seconds":1.0}\n'
    assert client.get(f"{server.url}/run/0").content == HEAD
    path.write_bytes(HEAD + more)
    rest = client.get(f"{server.url}/run/0?from={len(HEAD)}")
    assert rest.content == more
    assert rest.headers["x-size"] == str(len(HEAD + more))
    path.write_bytes(b"")  # written anew
    assert client.get(f"{server.url}/run/0?from={len(HEAD)}").headers["x-size"] == "0"
    path.unlink()
    assert client.get(f"{server.url}/run/0").content == b""


def test_a_long_file_comes_in_pieces(
    shown: tuple[ViewServer, httpx.Client, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client, _ = shown
    monkeypatch.setattr(view, "PIECE_BYTES", 10)
    assert client.get(f"{server.url}/run/0").content == HEAD[:10]
    assert client.get(f"{server.url}/run/0?from=10").content == HEAD[10:20]


def test_nobody_else_gets_in(shown: tuple[ViewServer, httpx.Client, Path]) -> None:
    server, client, _ = shown
    assert server.server_address[0] == "127.0.0.1"
    root = f"http://127.0.0.1:{server.server_port}"
    for address in (
        root, f"{root}/viewer", f"{root}/{'x' * 22}/viewer", f"{server.url}/run/1", f"{server.url}/run/x",
        f"{server.url}/run/0/..%2f..%2fetc/passwd", f"{server.url}/../../../etc/passwd", f"{server.url}/runs",
    ):  # fmt: skip
        answer = client.get(address)
        assert answer.status_code == 404
        assert "content-security-policy" in answer.headers
    assert client.get(server.url, headers={"host": f"evil.example:{server.server_port}"}).status_code == 404
    assert client.get(server.url.replace("127.0.0.1", "localhost")).status_code == 200
    assert client.post(server.url).status_code == 501


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    names = view._names([tmp_path / "a" / "run.jsonl", tmp_path / "b" / "run.jsonl"])
    assert names == ["a/run.jsonl", "b/run.jsonl"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(HEAD)
    # A suite that runs in the background may have the signal ignored, and its children with it.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from sglang_dsl.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", code, "view", str(path), "--no-browser"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as it:
        assert it.stdout is not None
        address = it.stdout.readline().split()[0]
        assert httpx.get(address, timeout=300, trust_env=False).status_code == 200
        it.send_signal(signal.SIGINT)
        try:
            _, err = it.communicate(timeout=PATIENCE_S)
        finally:
            it.kill()
        assert (it.returncode, err) == (0, "")


def test_the_command_writes_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "p.py"
    source.write_text(
        "import sglang_dsl as sgl\n\n@sgl.function\ndef ask(s, q):\n    s += q + sgl.gen('a', max_tokens=2)\n"
    )
    file = tmp_path / "run.jsonl"
    assert main(["run", f"{source}:ask", "q=hi", "--backend", "mock", "--write-run", str(file)]) == 0
    head, begin, end = [json.loads(line) for line in file.read_text().splitlines()]
    assert (head["type"], begin["name"], end["type"]) == ("run", "a", "end")
    assert main(["run", f"{source}:ask", "q=hi", "--backend", "mock", "--write-run", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err

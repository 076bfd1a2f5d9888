"""Both commands as people call them, over every subcommand: mostly main() in this process, a few in one of
their own. What is wrong is one line on standard error and exit code 2; in a light installation, too."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import runtime.__main__
import sglang_dsl.__main__
from runtime.config.checkpoints import BUNDLED

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 300.0
SOURCE = """
import sglang_dsl as sgl

@sgl.function
def ask(s, question, count=1):
    for i in range(count):
        s += sgl.user(question) + sgl.assistant(sgl.gen(f"answer{i}", max_tokens=2))

@sgl.function
def raises(s):
    s += sgl.gen("x", max_tokens=2)
    raise ZeroDivisionError("in the body")
"""
LANGUAGE, RUNTIME = "sglang_dsl", "runtime"
# A light installation: what only the extras bring cannot be imported.
LIGHT = """
from importlib.machinery import PathFinder

found = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {absent!r} else found(name, path, target)

PathFinder.find_spec = find_spec
"""
ABSENT = (
    "torch", "numpy", "transformers", "tokenizers", "safetensors", "llguidance", "xgrammar", "jinja2",
    "jsonschema", "referencing", "regex", "prometheus_client", "yaml", "zmq", "starlette", "uvicorn",
    "pydantic", "litellm", "opentelemetry",
)  # fmt: skip


MAINS: dict[str, Callable[[Sequence[str]], int]] = {
    LANGUAGE: sglang_dsl.__main__.main,
    RUNTIME: lambda words: runtime.__main__.main(words, os.environ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("programs")
    (made / "p.py").write_text(SOURCE)
    (made / "broken.py").write_text("x = 1\nimport nothing_there\n")
    (made / "syntax.py").write_text("def x(:\n")
    light = made / "light"
    light.mkdir()
    (light / "sitecustomize.py").write_text(LIGHT.format(absent=set(ABSENT)))
    model = made / "gpt9"
    model.mkdir()
    config = json.loads((BUNDLED["pocket"] / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["GPT9ForCausalLM"]}))
    return made


def called(folder: Path, module: str, *words: str, light: bool = False) -> subprocess.CompletedProcess[str]:
    path = [str(folder / "light")] * light + [str(ROOT)]
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def called_here(folder: Path, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The same without a process: for command lines that start nothing."""
    out, err = io.StringIO(), io.StringIO()
    path, loaded = sys.path.copy(), sys.modules.copy()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = MAINS[module](list(words))
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.path[:] = path
            for name in sys.modules.keys() - loaded.keys() & {"p", "broken", "syntax"}:
                del sys.modules[name]
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def refused(done: subprocess.CompletedProcess[str], *says: str, code: int = 2) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for part in says:
        assert part in done.stderr


WRONG = [
    (LANGUAGE, "--modle x", "unrecognized arguments: --modle"),
    (LANGUAGE, "rnu", "invalid choice: 'rnu'"),
    (LANGUAGE, "demo more", "unrecognized arguments: more"),
    (LANGUAGE, "run", "required: FILE:FUNCTION"),
    (LANGUAGE, "run nofile.py:f", "'nofile.py' does not exist"),
    (LANGUAGE, "trace nofile.py:f", "'nofile.py' does not exist"),
    (LANGUAGE, "run light:f", "'light' is not a file"),
    (LANGUAGE, "run p.py", "write FILE:FUNCTION"),
    (LANGUAGE, "run p.py:", "write FILE:FUNCTION"),
    (LANGUAGE, "run p.py:nothing", "it has: ask, raises"),
    (LANGUAGE, "run broken.py:x", "ModuleNotFoundError: No module named 'nothing_there' (line 2)"),
    (LANGUAGE, "trace syntax.py:x", "SyntaxError"),
    (LANGUAGE, "run p.py:ask --backend mock", "missing a required argument: 'question'"),
    (LANGUAGE, "run p.py:ask --backend mock question=x color=y", "unexpected keyword argument 'color'"),
    (LANGUAGE, "trace p.py:ask color=y", "unexpected keyword argument 'color'"),
    (LANGUAGE, "run p.py:ask --backend mock question", "NAME=VALUE"),
    (LANGUAGE, "run p.py:ask question=x --backend nobody", "or a server's URL, got 'nobody'"),
    (LANGUAGE, "run p.py:ask question=x --backend mock --temperature -1", "temperature"),
    (LANGUAGE, "run p.py:ask question=x --backend mock --temperature hot", "invalid float"),
    (LANGUAGE, "run p.py:ask question=x --backend openai", "needs --model"),
    (LANGUAGE, "run p.py:ask question=x --model /nowhere", "/nowhere: there is no such directory"),
    (LANGUAGE, "chat --model /nowhere", "/nowhere: there is no such directory"),
    (LANGUAGE, "chat --backend nobody", "or a server's URL"),
    (LANGUAGE, "chat --regex (", "cannot be compiled"),
    (LANGUAGE, "chat --json-schema @/no/file", "cannot be read"),
    (LANGUAGE, "serve --prt 1", "did you mean '--port'?"),
    (LANGUAGE, "serve --model /nowhere", "/nowhere: there is no such directory"),
    (RUNTIME, "nothing", "known: router, serve"),
    (RUNTIME, "serve --schedule-policy nope", "unknown schedule policy 'nope'; known: dfs-weight, fcfs"),
    (RUNTIME, "serve --schedule-policy lmp", "did you mean 'lpm'?"),
    (RUNTIME, "serve --eviction-policy nope", "known: fifo"),
    (RUNTIME, "serve --grammar-backend nope", "known: auto, llguidance"),
    (RUNTIME, "serve --attention nope", "known: auto, "),
    (RUNTIME, "serve --device toaster", "cuda:<n>, got 'toaster'"),
    (RUNTIME, "serve --dtype int3", "got 'int3'"),
    (RUNTIME, "serve --model", "expected one argument"),
    (RUNTIME, "serve --model /nowhere", "/nowhere: there is no such directory"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "words", "says"), WRONG, ids=lambda value: value)
def test_what_is_wrong_is_one_line_and_exit_code_2(folder: Path, module: str, words: str, says: str) -> None:
    refused(called_here(folder, module, *words.split()), says)


@pytest.mark.parametrize(("module", "words", "says"), [WRONG[0], WRONG[-1]], ids=lambda value: value)
def test_in_a_process_too(folder: Path, module: str, words: str, says: str) -> None:
    refused(called(folder, module, *words.split()), says)


def test_an_unsupported_model_names_the_decoders_first(folder: Path) -> None:
    for module, words in (
        (RUNTIME, "serve --model gpt9"),
        (LANGUAGE, "run p.py:ask question=x --model ./gpt9"),
    ):
        done = called_here(folder, module, *words.split())
        refused(done, "unknown architecture 'GPT9ForCausalLM' (known: decoders ", code=1)
        assert done.stderr.index("Qwen3ForCausalLM") < done.stderr.index("BertModel")


@pytest.mark.parametrize("module", [LANGUAGE, RUNTIME])
def test_the_version(folder: Path, module: str) -> None:
    done = called_here(folder, module, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("sglang-dsl ")


@pytest.mark.parametrize(
    "words", ["", "run p.py:ask question=x", "demo", "chat", "run p.py:ask question=x --stream", "serve"]
)
def test_a_light_installation_names_the_extra(folder: Path, words: str) -> None:
    extra = "server" if words == "serve" else "runtime"
    done = called(folder, LANGUAGE, *words.split(), light=True)
    refused(done, f"pip install 'sglang-dsl[{extra}]'")
    assert words != "serve" or called(folder, RUNTIME, "serve", light=True).stderr == done.stderr


def test_a_light_installation_without_a_providers_package(folder: Path) -> None:
    words = "run p.py:ask question=x --backend litellm --model a/b"
    refused(called(folder, LANGUAGE, *words.split(), light=True), "pip install 'sglang-dsl[litellm]'")


def test_a_light_installation_runs_and_traces(folder: Path) -> None:
    for words in (
        "run p.py:ask question=x --backend mock", "trace p.py:ask", "trace p.py:ask --json", "--version",
        "--help", "run --help",
    ):  # fmt: skip
        done = called(folder, LANGUAGE, *words.split(), light=True)
        assert (done.returncode, done.stderr) == (0, ""), words
        assert done.stdout


def test_what_the_program_raises_is_its_own(folder: Path) -> None:
    done = called(folder, LANGUAGE, "run", "p.py:raises", "--backend", "mock")
    assert done.returncode == 1
    assert "in the body" in done.stderr


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (LANGUAGE, "trace p.py:ask count=2000"),
        (LANGUAGE, "trace p.py:ask --json count=2000"),
        (LANGUAGE, "run p.py:ask question=x count=500 --backend mock"),
        (LANGUAGE, "run p.py:ask question=x count=2000 --backend mock --stream"),
        (LANGUAGE, "run --help"),
        (RUNTIME, "serve --help"),
        (RUNTIME, "--help"),
    ],
)
def test_a_reader_that_goes_away_is_one_line(folder: Path, module: str, words: str) -> None:
    """What `| head -1` does: the pipe has no reader any more."""
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(
        [sys.executable, "-m", module, *words.split()], cwd=folder, stdout=writer, stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        os.close(writer)
        _, told = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert told == "error: standard output was closed before all was written\n"


def test_serve_is_the_runtimes_own(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "sglang_dsl", "serve", "--port", "0", "--max-total-tokens", "2048"],
        cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
    ) as process:  # fmt: skip
        timer = threading.Timer(PATIENCE_S, process.kill)
        timer.start()
        try:
            assert process.stderr is not None
            lines = (re.search(r"ready on (http\S+)", line) for line in process.stderr)
            url = next(found[1] for found in lines if found)
            assert called(folder, LANGUAGE, "run", "p.py:ask", "question=x", "--backend", url).returncode == 0
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=PATIENCE_S)
        finally:
            timer.cancel()
    assert process.returncode == 0
    assert (
        called_here(folder, LANGUAGE, "serve", "--help").stdout
        == called_here(folder, RUNTIME, "serve", "--help").stdout
    )


def test_a_session_without_a_terminal_reads_cells(folder: Path) -> None:
    cells = "s += user('Q') + assistant(gen('x', max_tokens=2))\n"
    cells += "for i in range(2):\n    print(i)\n\nlen(s['x']) > 0\n"
    done = subprocess.run(
        [sys.executable, "-m", LANGUAGE, "--backend", "mock"], input=cells + "1/0\nprint('not reached')\n",
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE_S,
        check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 1
    assert re.search(r"user +Q\nassistant +\w+ \w+ ⟵ x\n.*\n0\n1\nTrue\n.*\n?ZeroDivisionError", done.stdout)
    assert "not reached" not in done.stdout


def test_the_doctor_says_what_to_install(folder: Path) -> None:
    done = called(folder, LANGUAGE, "doctor", "--quick", light=True)
    assert (done.returncode, done.stderr) == (0, "")
    flat = " ".join(done.stdout.split())
    assert re.search(r"○ engine torch is not installed .*pip install 'sglang-dsl\[runtime\]'", flat)
    assert re.search(r"✓ language a program on the mock backend", flat)

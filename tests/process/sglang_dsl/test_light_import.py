"""Importing the language is quick and loads nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

import sglang_dsl

MOST_OWN = 34
"""Modules of this project that an import may load; a package with everything in it would be 200."""
HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "rich",
    "tqdm",
    "runtime.api",
    "runtime.plan",
    "importlib.metadata",
    # What runs programs comes with the first run, what talks to servers with the first backend that does.
    "asyncio",
    "concurrent.futures",
    "email",
    "httpx",
    "jsonschema",
    "logging",
    "pydantic",
    "socket",
    "sqlite3",
    "ssl",
    "subprocess",
    "urllib.request",
    "runtime.formats.reasoning",
    "runtime.protocol.io_struct",
    "sglang_dsl.interpreter.executor",
    "sglang_dsl.execution.launch",
    "sglang_dsl.concurrency.loop",
    "sglang_dsl.frontend.media",
    "sglang_dsl.state.program_state",
)


def fresh(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout


def test_import_is_light() -> None:
    """Counted in modules: what an import costs in time depends on what else the machine does."""
    loaded = json.loads(fresh("import json, sys, sglang_dsl; print(json.dumps(sorted(sys.modules)))"))
    assert [name for name in HEAVY if name in loaded] == []
    own = [name for name in loaded if name.partition(".")[0] in ("sglang_dsl", "runtime")]
    assert len(own) <= MOST_OWN, own


def test_running_a_program_on_the_mock_stays_light() -> None:
    code = """
import sys, sglang_dsl as sgl
program = sgl.function(lambda s: s.__iadd__("a" + sgl.gen("x", regex="[0-9]") + sgl.select("c", ["p", "q"])))
state = program.run(backend=sgl.MockBackend())
state.sync()
print([m for m in ("torch", "numpy", "transformers", "rich", "tqdm") if m in sys.modules])
"""
    assert fresh(code).strip() == "[]"


def test_importing_starts_no_thread() -> None:
    assert fresh("import sglang_dsl, threading; print(threading.active_count())").strip() == "1"


def test_every_public_name_is_there_and_listed() -> None:
    for name in sglang_dsl.__all__:
        if name != "Engine":
            assert getattr(sglang_dsl, name) is not None
    assert set(sglang_dsl.__all__) <= set(dir(sglang_dsl))
    assert "Engine" in sglang_dsl.__all__
    code = "import sglang_dsl\ntry:\n    sglang_dsl.nothing\nexcept AttributeError as e:\n    print(e)"
    assert "nothing" in fresh(code)


def test_a_program_at_exit_leaves_quietly() -> None:
    code = """
import sglang_dsl as sgl
program = sgl.function(lambda s: s.__iadd__("a" + sgl.gen("x")))
state = program.run(backend=sgl.MockBackend(delay_s=3600))
print("left")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == "left"
    assert done.stderr == ""


def test_a_forked_process_has_its_own_loop() -> None:
    code = """
import os, sys, warnings
import sglang_dsl as sgl
program = sgl.function(lambda s: s.__iadd__("a" + sgl.gen("x")))
assert program.run(backend=sgl.MockBackend(["one"]))["x"] == "one"
warnings.simplefilter("ignore", DeprecationWarning)
pid = os.fork()
if pid == 0:
    os._exit(0 if program.run(backend=sgl.MockBackend(["two"]))["x"] == "two" else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert fresh(code).strip() == "0"

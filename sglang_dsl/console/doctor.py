"""`doctor`: what is installed, what works, and what to install. It changes nothing."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runtime.protocol.console import DISTRIBUTION, version
from sglang_dsl.api import assistant, gen, user
from sglang_dsl.console.backend_flag import BackendChoice
from sglang_dsl.console.front.prompt import state_file
from sglang_dsl.function import function

QUESTION, ANSWER = "Which river runs through Ostrel?", "Sarn"
EXTRAS = {
    "runtime": "the engine, in this process",
    "server": "`serve`: the engine over HTTP",
    "repl": "the prompt on IPython, and export to notebooks",
    "notebook": "states that stream into a cell; batches as data frames",
    "typed": "gen(name, type): pydantic models, dataclasses",
    "kernels": "Triton kernels on GPUs",
    "xgrammar": "another engine for constraints",
    "outlines": "the grammar backend outlines",
    "mock": "MockBackend with any JSON schema",
    "otel": "spans of calls",
    "mcp": "tool servers",
    "litellm": "LiteLLM(model)",
    "ray": "batches and replicas on Ray",
    "langchain": "LangChainModel",
    "dspy": "dspy_lm(backend)",
    "llama-index": "LlamaIndexModel",
    "lm-eval": "LMEvalModel",
}
KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "SGLANG_DSL_API_KEY")
_MARKS = {"ok": ("✓", "green"), "missing": ("○", "dim"), "broken": ("✗", "red"), "note": ("·", "yellow")}


class Finding(NamedTuple):
    """One line of the report. `action`: what to do about it."""

    status: Literal["ok", "missing", "broken", "note"]
    what: str
    detail: str
    action: str = ""


def main(*, quick: bool = False) -> int:
    """Print the report. Returns 1 if something that is installed does not work. `quick`: load no model."""
    console = Console()
    broken = False
    sections = {"here": _here(), "extras": _extras(), "works": _works(console, quick=quick)}
    for title, findings in sections.items():
        head = Text(title, style="bold")
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), title=head, title_justify="left")
        for at in range(4):
            table.add_column(overflow="fold", no_wrap=at < 2)
        for one in findings:
            mark, style = _MARKS[one.status]
            cells = ((mark, style), (one.what, ""), (one.detail, "dim"), (one.action, "cyan"))
            table.add_row(*(Text(text, style=style) for text, style in cells))
            broken |= one.status == "broken"
        console.print(table)
        console.print()
    return int(broken)


def _here() -> Iterator[Finding]:
    yield Finding("ok", DISTRIBUTION, version())
    yield Finding("ok", "Python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("ok", "machine", f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs")
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is not None:
        yield Finding("ok", "C compiler", f"{compiler}, for attention on CPUs")
    else:
        slower = "none: attention on CPUs is torch's, which is slower"
        yield Finding("note", "C compiler", slower, "install gcc or clang")
    if (file := state_file("history")) is not None:
        yield Finding("ok", "history", str(file))
    else:
        lost = "cannot be saved: kept for this session only"
        yield Finding("note", "history", lost, "make XDG_STATE_HOME writable")
    keys = ", ".join(name for name in KEYS if os.environ.get(name))
    yield Finding("ok" if keys else "missing", "API keys", keys or "none is set, none is needed here")


def requirements() -> dict[str, list[str]]:
    """The distributions that each extra installs. Empty if the package was not installed."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    direct: dict[str, list[str]] = {}
    inner: dict[str, list[str]] = {}
    for line in lines:
        extra = re.search(r"extra\s*==\s*[\"']([\w-]+)[\"']", line)
        name = re.match(r"[\w.-]+", line)
        if extra is None or name is None:
            continue
        included = re.match(rf"{re.escape(DISTRIBUTION)}\[([^\]]*)\]", line)
        if included is not None:
            inner.setdefault(extra[1], []).extend(one.strip() for one in included[1].split(","))
        elif "platform" not in line or sys.platform in line:
            direct.setdefault(extra[1], []).append(name[0])
    names: dict[str, list[str]] = {}
    for key in {*direct, *inner}:
        nested = [name for one in inner.get(key, ()) for name in direct.get(one, ())]
        names[key] = list(dict.fromkeys([*direct.get(key, ()), *nested]))
    return names


def _extras() -> Iterator[Finding]:
    installs = requirements()
    if not installs:
        unknown = "this copy was not installed by pip, so its extras are unknown"
        yield Finding("note", "extras", unknown, "pip install -e .")
        return
    for extra, what in EXTRAS.items():
        absent = [name for name in installs.get(extra, ()) if not _is_installed(name)]
        install = f"pip install '{DISTRIBUTION}[{extra}]'"
        if extra not in installs:
            yield Finding("note", extra, f"{what}; unknown to pip: installed from older code", install)
        elif absent:
            yield Finding("missing", extra, f"{what}; without {', '.join(absent)}", install)
        else:
            yield Finding("ok", extra, what)


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _works(console: Console, *, quick: bool) -> Iterator[Finding]:
    yield _answers("language", "mock")
    if importlib.util.find_spec("torch") is None:
        yield Finding("missing", "engine", "torch is not installed", f"pip install '{DISTRIBUTION}[runtime]'")
        return
    try:
        torch: Any = importlib.import_module("torch")
        gpus = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    except Exception as error:  # noqa: BLE001 - reported
        yield Finding("broken", "torch", f"{type(error).__name__}: {error}", "reinstall it")
        return
    yield Finding("ok", "torch", str(torch.__version__))
    names = ", ".join(gpus) or "none that torch sees: models run on the CPU"
    yield Finding("ok" if gpus else "missing", "GPU", names)
    if quick:
        yield Finding("note", "engine", "not tried: --quick")
        return
    with console.status("asking pocket ..."):
        engine = _answers("engine", "engine", ANSWER)
    yield engine
    if engine.status == "ok":
        yield Finding("ok", "products", importlib.import_module("runtime.kernels.native.tuning").summary())


def _answers(what: str, name: str, expected: str = "") -> Finding:
    """Whether a backend's answer to the question contains `expected`."""
    begun = time.perf_counter()
    try:
        backend = BackendChoice(name).open()
        try:
            ready = time.perf_counter()
            answer = _ask.run(backend=backend)["answer"]
            seconds = time.perf_counter() - ready
        finally:
            backend.close()
    except Exception as error:  # noqa: BLE001 - reported
        return Finding("broken", what, f"{type(error).__name__}: {' '.join(str(error).split())}")
    if expected not in answer:
        return Finding("broken", what, f"asked {QUESTION!r}, it said {answer!r}")
    if not expected:
        return Finding("ok", what, "a program on the mock backend")
    loaded = f"loaded in {ready - begun:.1f} s, answered in {seconds:.2f} s"
    return Finding("ok", what, f"pocket: {loaded}: {answer}")


@function(temperature=0, max_tokens=32, timeout=60)
def _ask(s: Any) -> None:
    s += user(QUESTION)
    s += assistant(gen("answer"))

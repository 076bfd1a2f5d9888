"""`doctor`: what is installed, what works, what to install. It tries what it says works, and changes
nothing."""

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
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runtime.protocol.console import DISTRIBUTION, version
from sglang_dsl.api import assistant, gen, user
from sglang_dsl.console.front.prompt import state_file
from sglang_dsl.console.session.opening import Place
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
Status = Literal["ok", "missing", "broken", "note"]
_MARKS = {"ok": ("✓", "green"), "missing": ("○", "dim"), "broken": ("✗", "red"), "note": ("·", "yellow")}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. then: what to do about it."""

    status: Status
    what: str
    told: str
    then: str = ""


def main(*, quick: bool = False) -> int:
    """Look, print, and give the exit code: 1 where something that is installed does not work. `quick`: no
    model is loaded."""
    console = Console()
    broken = False
    for title, findings in (
        ("here", _here()),
        ("extras", _extras()),
        ("works", _works(console, quick=quick)),
    ):
        table = Table(
            box=None,
            show_header=False,
            padding=(0, 2, 0, 0),
            title=Text(title, style="bold"),
            title_justify="left",
        )
        for at in range(4):
            table.add_column(overflow="fold", no_wrap=at < 2)
        for one in findings:
            mark, style = _MARKS[one.status]
            table.add_row(
                Text(mark, style=style),
                Text(one.what),
                Text(one.told, style="dim"),
                Text(one.then, style="cyan"),
            )
            broken |= one.status == "broken"
        console.print(table)
        console.print()
    return int(broken)


def _here() -> Iterator[Finding]:
    yield Finding("ok", DISTRIBUTION, version())
    python = platform.python_version()
    good = sys.version_info >= (3, 11)
    yield Finding(
        "ok" if good else "broken", "Python", f"{python}, {sys.executable}", "" if good else "3.11 or newer"
    )
    yield Finding("ok", "machine", f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs")
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        yield Finding(
            "note",
            "C compiler",
            "none: attention on CPUs is torch's, which is slower",
            "install gcc or clang",
        )
    else:
        yield Finding("ok", "C compiler", f"{compiler}, for attention on CPUs")
    file = state_file("history")
    yield (
        Finding(
            "note", "history", "cannot be saved: kept for this session only", "make XDG_STATE_HOME writable"
        )
        if file is None
        else Finding("ok", "history", str(file))
    )
    keys = [name for name in KEYS if os.environ.get(name)]
    yield Finding(
        "ok" if keys else "missing", "API keys", ", ".join(keys) or "none is set, none is needed here"
    )


def requirements() -> dict[str, list[str]]:
    """Extra -> names of the distributions that it installs, those of the extras in it included. Empty where
    this runs from a folder that was not installed."""
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
        within = re.match(rf"{re.escape(DISTRIBUTION)}\[([^\]]*)\]", line)
        if within is not None:
            inner.setdefault(extra[1], []).extend(one.strip() for one in within[1].split(","))
        elif "platform" not in line or sys.platform in line:
            direct.setdefault(extra[1], []).append(name[0])
    return {
        extra: list(
            dict.fromkeys(
                [*direct.get(extra, ()), *(n for one in inner.get(extra, ()) for n in direct.get(one, ()))]
            )
        )
        for extra in {*direct, *inner}
    }


def _extras() -> Iterator[Finding]:
    found = requirements()
    if not found:
        yield Finding(
            "note",
            "extras",
            "this copy was not installed by pip, so its extras are unknown",
            "pip install -e .",
        )
        return
    for extra, what in EXTRAS.items():
        absent = [name for name in found.get(extra, ()) if _version(name) is None]
        install = f"pip install '{DISTRIBUTION}[{extra}]'"
        if extra not in found:
            yield Finding("note", extra, f"{what}; unknown to pip: installed from older code", install)
        elif absent:
            yield Finding("missing", extra, f"{what}; without {', '.join(absent)}", install)
        else:
            yield Finding("ok", extra, what)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _works(console: Console, *, quick: bool) -> Iterator[Finding]:
    yield _said("language", "mock")
    if importlib.util.find_spec("torch") is None:
        yield Finding("missing", "engine", "torch is not installed", f"pip install '{DISTRIBUTION}[runtime]'")
        return
    try:
        torch: Any = importlib.import_module("torch")
        gpus = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    except Exception as error:  # noqa: BLE001 - told
        yield Finding("broken", "torch", f"{type(error).__name__}: {error}", "reinstall it")
        return
    yield Finding("ok", "torch", str(torch.__version__))
    yield Finding(
        "ok" if gpus else "missing", "GPU", ", ".join(gpus) or "none that torch sees: models run on the CPU"
    )
    if quick:
        yield Finding("note", "engine", "not tried: --quick")
        return
    with console.status("asking pocket ..."):
        found = _said("engine", "engine", ANSWER)
    yield found
    if found.status == "ok":
        yield Finding("ok", "products", importlib.import_module("runtime.kernels.native.tuning").summary())


def _said(what: str, backend: str, answer: str = "") -> Finding:
    """Ask a backend one question."""
    begun = time.perf_counter()
    try:
        opened = Place(backend).open()
        try:
            ready = time.perf_counter()
            state = _ask.run(backend=opened)
            said, took = state["answer"], time.perf_counter() - ready
        finally:
            opened.close()
    except Exception as error:  # noqa: BLE001 - told
        return Finding("broken", what, f"{type(error).__name__}: {' '.join(str(error).split())}")
    if answer not in said:
        return Finding("broken", what, f"asked {QUESTION!r}, it said {said!r}")
    if not answer:
        return Finding("ok", what, "a program on the mock backend")
    return Finding("ok", what, f"pocket: loaded in {ready - begun:.1f} s, answered in {took:.2f} s: {said}")


@function(temperature=0, max_tokens=32, timeout=60)
def _ask(s: Any) -> None:
    s += user(QUESTION)
    s += assistant(gen("answer"))

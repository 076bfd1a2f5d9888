"""The pages about serving: their Python and curl commands run as printed, their command lines are valid, and
the options and paths that they name exist."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.config.engine import EngineConfig
from runtime.config.flags import ALIASES, Options, read_options
from runtime.config.serving.server import ServerConfig
from runtime.engine.sampling.logit_processors import PROCESSORS
from tests.process.patience import PROGRAM_S

ROOT = Path(__file__).resolve().parents[3]
PAGES = {
    name: (ROOT / "tutorials" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("serving", "api_compatibility", "model_options", "operations")
}
PAGE = "\n".join(PAGES.values())
ADDRESS = "http://127.0.0.1:30000"


def blocks(kind: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)


@pytest.mark.parametrize(("name", "count"), [("serving", 11), ("api_compatibility", 6), ("operations", 3)])
def test_the_python_runs_as_printed(name: str, count: int, tmp_path: Path, shared_server: Any) -> None:
    python = blocks("python", PAGES[name])
    assert len(python) == count
    file = tmp_path / "page.py"
    file.write_text("\n".join(python).replace(ADDRESS, shared_server.url), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=PROGRAM_S, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_commands_run_as_printed(shared_server: Any, guarded_server: tuple[Any, str]) -> None:
    guarded, key = guarded_server
    open_one, with_key = [block for block in blocks("sh") if block.startswith("curl")]

    def run(command: str, url: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command.replace(ADDRESS, url)],
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
            check=True,
            env={**os.environ, "SGLANG_DSL_API_KEY": key},
        )
        return done.stdout

    assert " The ruler of Hesper is Queen Wenna." in run(open_one, shared_server.url)
    assert '"id":"pocket"' in run(with_key, guarded.url)


def test_the_command_lines_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, *_ = blocks("yaml")
    (tmp_path / "server.yaml").write_text(file, encoding="utf-8")
    (tmp_path / "key.txt").write_text("secret\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    made: dict[str, Options] = {}
    for block in blocks("sh"):
        words = shlex.split(block)
        if "serve" in words:
            given = dict(word.split("=", 1) for word in words if word.startswith("SGLANG_DSL_"))
            made[block.strip()] = read_options(words[words.index("serve") + 1 :], given)
    assert len(made) == 6
    mixed = next(options for line, options in made.items() if "server.yaml" in line)
    assert (mixed.server.port, mixed.server.http_workers) == (30002, 1)
    assert mixed.engine.max_running_requests == 64
    assert next(options for line, options in made.items() if "key.txt" in line).server.api_key == "secret"


def test_every_option_and_path_it_names_exists(shared_server: Any) -> None:
    known = {name.replace("_", "-") for kind in (EngineConfig, ServerConfig) for name in kind.help_texts()}
    named = set(re.findall(r"--([a-z][a-z-]+[a-z])", PAGE))
    negated = {name.removeprefix("no-") for name in named}
    aliases = {flag.removeprefix("--") for flags in ALIASES.values() for flag in flags}
    assert negated - known - aliases == {"config", "help", "backend", "engine", "worker-api-key"}
    paths = set(httpx.get(f"{shared_server.url}/openapi.json", timeout=PROGRAM_S).json()["paths"])
    said = set(re.findall(r"`(?:GET |POST )?(/[a-z_/0-9]+)(?:\?[^`]*)?`", PAGE))
    assert len(said) > 15
    for page in said - paths:  # for people: not in the description of the API
        answer = httpx.get(f"{shared_server.url}{page}", timeout=PROGRAM_S)
        assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, "text/html"), (
            page
        )


def test_every_logit_processor_is_named() -> None:
    for name in PROCESSORS:
        assert f"`{name}`" in PAGE


def test_the_defaults_it_names_are_those() -> None:
    server, engine = ServerConfig(), EngineConfig()
    assert (server.max_body_bytes, server.max_body_depth, server.max_batch_items) == (32 << 20, 64, 1024)
    assert (server.max_concurrent_requests, engine.max_waiting_requests) == (2048, 4096)
    assert (server.header_timeout_s, server.body_timeout_s, server.stall_timeout_s) == (15, 60, 60)
    assert (server.request_timeout_s, engine.queue_timeout_s, engine.running_timeout_s) == (None, None, None)
    assert (server.drain_timeout_s, engine.preemption_threshold) == (30, 10)
    assert (server.host, server.port, server.cors_origins) == ("127.0.0.1", 30000, ())

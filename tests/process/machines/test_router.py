"""The router as people start it, before servers as people start them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import sglang_dsl as sgl
from tests.process.patience import PATIENCE_S, until

KEY = "w0rkers-key-nobody-may-see"
GREEDY = {"temperature": 0.0, "max_new_tokens": 12}


class Routed:
    """`python -m runtime router` on a free port, and what it said."""

    def __init__(
        self, folder: Path, *arguments: str, within: tuple[str, ...] = (), **environment: str
    ) -> None:
        """within: a command that runs it, such as one that enters a namespace."""
        ready, self._log = folder / "router.json", folder / "router.txt"
        command = [
            *within, sys.executable, "-m", "runtime", "router", "--port", "0", "--ready-file", str(ready),
            "--probe-interval-s", "0.25", *arguments,
        ]  # fmt: skip
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **environment}
            )
        until(lambda: ready.is_file() or self.process.poll() is not None, lambda: self.log)
        assert self.process.poll() is None, self.log
        self.url = str(json.loads(ready.read_text())["url"])
        until(lambda: httpx.get(f"{self.url}/ready").status_code == 200, lambda: self.log)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def start_router(tmp_path: Path) -> Iterator[Callable[..., Routed]]:
    started: list[Routed] = []

    def start(*arguments: str, **environment: str) -> Routed:
        started.append(Routed(tmp_path, *arguments, **environment))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait(PATIENCE_S)


@sgl.function
def asks(s: Any) -> None:
    s += "Q: Which river runs through Ostrel?\nA:" + sgl.gen("answer", max_tokens=8, temperature=0)


def test_clients_notice_no_router(shared_server: Any, start_router: Callable[..., Routed]) -> None:
    router = start_router("--worker", shared_server.url, SGLANG_DSL_WORKER_API_KEY=KEY)
    answers = [
        httpx.post(
            f"{url}/generate", json={"text": "Q:", "sampling_params": GREEDY}, timeout=PATIENCE_S
        ).json()
        for url in (shared_server.url, router.url)
    ]
    assert answers[0]["output_ids"] == answers[1]["output_ids"]
    said = [{"role": "user", "content": "Hello!"}]
    words: dict[str, Any] = {"model": "default", "messages": said, "temperature": 0, "max_tokens": 8}
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**words).choices[0].message.content
        pieces = client.chat.completions.create(**words, stream=True)
        assert "".join(one.choices[0].delta.content or "" for one in pieces if one.choices) == whole
        assert whole
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(**{**words, "temperature": -1})
        response = client.responses.create(model="default", input="Hello!", max_output_tokens=8)
        assert client.responses.retrieve(response.id).output_text == response.output_text
    assert asks.run(backend=router.url)["answer"] == asks.run(backend=shared_server.url)["answer"]
    assert router.end() == 0
    assert "Traceback" not in router.log
    assert KEY not in router.log


# -- pairs ---------------------------------------------------------------------------------------------------

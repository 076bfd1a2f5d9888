"""`serve --engine ray` as a user has it: a real Ray, real servers, the openai SDK; and what becomes of
requests when a replica is killed, when all are restarted, and when there come to be more and fewer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import psutil
import pytest

PATIENCE_S = 300.0
pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


class Served(NamedTuple):
    """The driver, and its address."""

    process: psutil.Process
    url: str

    def workers(self) -> set[str]:
        """The replicas that get requests."""
        told = httpx.get(f"{self.url}/workers", timeout=PATIENCE_S, headers=KEY).json()["workers"]
        return {one["url"] for one in told if one["state"] == "available"}

    def servers(self) -> dict[str, psutil.Process]:
        """URL -> the first process of each server."""
        urls, found = {one.rsplit(":", 1)[1]: one for one in self.workers()}, {}
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[0] == "sglang-dsl supervisor":
                    for one in process.children():
                        for socket in one.net_connections("tcp"):
                            if socket.status == psutil.CONN_LISTEN and str(socket.laddr.port) in urls:
                                found[urls[str(socket.laddr.port)]] = process
        return found


KEY = {"authorization": "Bearer front door"}


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@contextlib.contextmanager
def served(folder: Path, *options: str) -> Iterator[Served]:
    """The command. At its end it is told to end, and nothing of it may be left."""
    ready, log = folder / "ready.json", folder / "log"
    command = [
        sys.executable, "-P", "-m", "runtime", "serve", "--engine", "ray", "--port", "0",
        "--replica-cpus", "0.5", "--ready-file", str(ready), *options,
    ]  # fmt: skip
    with log.open("wb") as out:
        environment = {**os.environ, "SGLANG_DSL_API_KEY": "front door"}
        driver = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    process = psutil.Process(driver.pid)
    try:
        until(lambda: ready.exists() or driver.poll() is not None, "it starts")
        assert driver.poll() is None, log.read_text()
        yield Served(process, json.loads(ready.read_text())["url"])
        family = process.children(recursive=True)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(PATIENCE_S) == 0, log.read_text()
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert alive == []
    finally:
        left = process.children(recursive=True) if driver.poll() is None else []
        for one in [process, *left]:
            with contextlib.suppress(psutil.Error):
                one.kill()
        driver.wait(PATIENCE_S)


class Load:
    """Clients that ask again and again, every second one in streams, for `tokens` tokens or until the answer
    ends. `failed`: when each request that failed had begun, and how it failed."""

    def __init__(self, url: str, clients: int, tokens: int | None = None) -> None:
        self.done, self.failed, self._tokens = 0, [], tokens
        self._url, self._over, self._lock = url, threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(one,)) for one in range(clients)]
        for one in self._threads:
            one.start()

    def _ask(self, number: int) -> None:
        client = openai.OpenAI(
            base_url=f"{self._url}/v1", api_key="front door", max_retries=0, timeout=PATIENCE_S
        )
        while not self._over.is_set():
            began = time.monotonic()
            try:
                text = self._one(client, number)
                assert text
            except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
                with self._lock:
                    self.failed.append((began, repr(error)))
            else:
                with self._lock:
                    self.done += 1

    def _one(self, client: openai.OpenAI, number: int) -> str:
        asked: dict[str, Any] = {
            "model": "pocket",
            "messages": [{"role": "user", "content": f"What is {number} plus {self.done % 10}?"}],
            "max_tokens": self._tokens or 32,
            "extra_body": {"ignore_eos": self._tokens is not None},
        }
        if number % 2:
            return str(client.chat.completions.create(**asked).choices[0].message.content)
        pieces = client.chat.completions.create(**asked, stream=True)
        return "".join(one.choices[0].delta.content or "" for one in pieces if one.choices)

    def more(self, than: int) -> None:
        """Wait for so many more requests to be answered."""
        least = self.done + than
        until(lambda: self.done >= least, f"{than} more requests are answered; {self.failed[:3]}")

    def end(self) -> None:
        self._over.set()
        for one in self._threads:
            one.join(PATIENCE_S)


def test_a_killed_replica_and_a_rolling_restart_lose_nothing_else(tmp_path: Path) -> None:
    with served(tmp_path, "--replicas", "2") as here:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{here.url}/v1", api_key="wrong", max_retries=0).models.list()
        until(lambda: len(here.workers()) == 2, "two replicas")
        load = Load(here.url, 6)
        load.more(20)
        url, server = next(iter(here.servers().items()))
        killed_at = time.monotonic()
        os.killpg(server.pid, signal.SIGKILL)
        load.more(40)
        until(lambda: len(here.workers() - {url}) == 2, "another replica in its place")
        # What was in its hands may be lost, nothing that came after.
        assert all(began <= killed_at for began, _ in load.failed), load.failed
        lost = len(load.failed)
        assert lost <= 6

        before = here.workers()
        here.process.send_signal(signal.SIGHUP)
        until(lambda: len(here.workers() - before) == 2 and not here.workers() & before, "two others")
        load.more(20)
        load.end()
        assert load.failed[lost:] == []
        print(f"{load.done} requests answered, {lost} lost with the replica that was killed")


def test_there_are_more_replicas_under_load_and_fewer_after_it(tmp_path: Path) -> None:
    options = ("--replicas", "1", "--max-replicas", "3", "--target-requests", "2")
    with served(tmp_path, *options, "--upscale-delay-s", "1", "--downscale-delay-s", "4") as here:
        assert len(here.workers()) == 1
        heavy = Load(here.url, 10, tokens=300)  # nearly all of its time is the engine's, and counts as load
        until(lambda: len(here.workers()) == 3, "three replicas")
        heavy.more(40)
        heavy.end()
        light = Load(here.url, 1)
        until(lambda: len(here.workers()) == 1, "one again")
        until(lambda: len(here.servers()) == 1, "one server")
        light.more(10)
        light.end()
        assert heavy.failed + light.failed == []
        print(f"1 -> 3 -> 1 replicas, {heavy.done + light.done} requests answered, none lost")


def test_a_replica_may_be_a_pair(tmp_path: Path) -> None:
    with served(tmp_path, "--pairs") as here:
        told = httpx.get(f"{here.url}/workers", headers=KEY, timeout=PATIENCE_S).json()["workers"]
        assert sorted((one["role"], one["state"]) for one in told) == [
            ("decode", "available"),
            ("prefill", "available"),
        ]
        load = Load(here.url, 2)
        load.more(6)
        load.end()
        assert load.failed == []
        # Both had a part in it: what the prompts' tokens were computed by, and what generated.
        metrics = httpx.get(f"{here.url}/metrics", headers=KEY, timeout=PATIENCE_S).text
        for role in ("prefill", "decode"):
            lines = [
                line for line in metrics.splitlines() if "router_requests_total{" in line and role in line
            ]
            assert sum(float(line.split()[-1]) for line in lines) >= load.done


def test_what_never_fits_is_refused_at_once() -> None:
    command = [sys.executable, "-P", "-m", "runtime", "serve", "--engine", "ray", "--replica-gpus", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2, done.stderr
    assert "1 CPU, 64 GPU are requested, but no machine of the Ray cluster has that much" in done.stderr


def test_replicas_that_cannot_start_say_why() -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "runtime",
        "serve",
        "--engine",
        "ray",
        "--port",
        "0",
        "--model",
        "/nowhere",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1, done.stderr
    said = "".join(line for line in done.stderr.splitlines() if line.startswith("error: ")) or done.stderr
    assert said.startswith(
        "error: no replica can be started: the server ended with code 2: error: /nowhere: there is"
    )

"""`serve --tp 2`: two processes share the model, over loopback alone; one that dies is named to everybody who
waits, and ends the server, or has it started again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from runtime.api import Engine
from tests.process.patience import PATIENCE_S, until
from tests.process.server.test_processes import generate, load

PROMPT = "The capital of France is"  # as in generate()
GREEDY = {"max_new_tokens": 24, "temperature": 0}
KILLED = "rank 1 of the model's process was killed by SIGKILL"


def ranks_of(server: Any) -> list[psutil.Process]:
    """In their order: they were started one after the other."""
    return sorted(server.children()["scheduler"].children(), key=lambda one: one.pid)


def test_it_answers_as_one_process_does(engine: Engine, start_server: Callable[..., Any]) -> None:
    server = start_server("--tp", "2").wait_ready()
    ranks = ranks_of(server)
    assert len(ranks) == 2
    heard = {
        connection.laddr.ip
        for one in (*ranks, *server.children().values())
        for connection in one.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert heard <= {"127.0.0.1", "::1"}
    text = engine.generate(PROMPT, GREEDY).text
    assert generate(server.url, GREEDY).json()["text"] == text
    body = {"model": "pocket", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "logprobs": 2}
    said = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).json()["choices"][0]
    assert said["text"] == text
    assert len(said["logprobs"]["token_logprobs"]) > 3
    regex = {**GREEDY, "regex": "(yes|no), [a-z]{4}"}
    assert generate(server.url, regex).json()["text"] == engine.generate(PROMPT, regex).text
    vectors = httpx.post(f"{server.url}/v1/embeddings", json={"input": [PROMPT]}, timeout=PATIENCE_S).json()
    assert vectors["data"][0]["embedding"] == pytest.approx(engine.embed([PROMPT])[0].embedding, abs=1e-4)
    assert server.end(signal.SIGTERM) == 0
    assert not psutil.wait_procs(ranks, timeout=PATIENCE_S)[1]


def test_a_killed_rank_is_named_to_everybody_who_waits(start_server: Callable[..., Any]) -> None:
    server = start_server("--tp", "2").wait_ready()
    ranks = ranks_of(server)
    with load(server.url) as futures:
        ranks[1].kill()
        outcomes = [future.result(PATIENCE_S) for future in futures]
    assert all(KILLED in told for told in outcomes), outcomes
    assert server.end(0) == 1
    assert KILLED in server.log
    assert not psutil.wait_procs(ranks, timeout=PATIENCE_S)[1]


def test_with_restart_all_ranks_come_back(start_server: Callable[..., Any]) -> None:
    server = start_server("--tp", "2", "--restart").wait_ready()
    before = ranks_of(server)
    server.forget_ready()
    before[1].kill()
    until(lambda: "starting again after" in server.log)
    server.wait_ready()
    after = ranks_of(server)
    assert len(after) == 2
    assert not set(after) & set(before)
    assert generate(server.url, GREEDY).status_code == 200
    assert server.end() == 0


def test_what_cannot_be_shared_is_said_in_one_line(start_server: Callable[..., Any]) -> None:
    server = start_server("--tp", "3")
    assert server.process.wait(PATIENCE_S) != 0
    assert "tp_size: 3 ranks cannot share 4 attention heads" in server.log
    assert "possible for this model: 1, 2, 4" in server.log
    assert "Traceback" not in server.log

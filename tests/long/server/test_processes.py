"""process/server/test_processes.py, at length."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.process.patience import PATIENCE_S, go_on, hold, metrics, until
from tests.process.server.test_processes import (
    ENDLESS,
    SHORT,
    SOON_S,
    asked_until_answered_by,
    connections,
    generate,
    load,
    requests_counted,
    state,
    wait_for_live,
)


def test_a_response_is_found_by_whichever_http_worker_is_asked(start_server: Callable[..., Any]) -> None:
    server = start_server("--http-workers", "2").wait_ready()
    workers = [server.children()[f"worker-{number}"] for number in range(2)]
    with contextlib.ExitStack() as stack:
        clients: dict[int, httpx.Client] = {}
        while len(clients) < 2:  # a connection stays with one worker
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=PATIENCE_S))
            before = [connections(one, server.port) for one in workers]
            client.get("/ready").raise_for_status()
            after = [connections(one, server.port) for one in workers]
            clients[next(at for at in range(2) if after[at] > before[at])] = client
        one, other = clients[0], clients[1]
        made = one.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 16}).json()
        path = f"/v1/responses/{made['id']}"
        assert one.get(path).json() == other.get(path).json() == made
        follow = {"input": "And?", "max_output_tokens": 16, "previous_response_id": made["id"]}
        followed = [client.post("/v1/responses", json=follow).json() for client in (one, other)]
        assert followed[0]["usage"]["input_tokens"] == followed[1]["usage"]["input_tokens"]
        assert followed[1]["usage"]["input_tokens"] > made["usage"]["input_tokens"] + 16
        hold(server.url)
        long = {"input": "Hello", "background": True}
        waiting = one.post("/v1/responses", json=long).json()
        ended = other.post(f"/v1/responses/{waiting['id']}/cancel").json()
        assert (ended["id"], ended["status"]) == (waiting["id"], "cancelled")
        go_on(server.url)
        assert other.delete(path).json()["deleted"] is True
        assert [client.get(path).status_code for client in (one, other)] == [404, 404]
        assert other.delete(path).status_code == 404
        # So is a session, and what is ordered of one holds for all.
        session = one.post("/open_session", json={}).json()
        first = {"text": "One", "sampling_params": SHORT, "session_params": {"id": session}, "rid": "first"}
        tokens = [
            client.post("/generate", json=body).json()["meta_info"]["prompt_tokens"]
            for client, body in (
                (one, first),
                (other, {**first, "session_params": {"id": session, "rid": "first"}, "rid": "next"}),
            )
        ]
        assert tokens[1] > tokens[0] + 3
        hold(server.url)
        for client in (one, other):
            assert [client.get(name).status_code for name in ("/health", "/ready")] == [503, 503]
            assert "paused (in_place)" in client.get("/ready").text
        go_on(server.url)
        assert [client.get("/ready").status_code for client in (one, other)] == [200, 200]
    assert server.end() == 0


def test_a_server_that_will_end_says_so_first(start_server: Callable[..., Any]) -> None:
    server = start_server("--lame-duck-s", "600").wait_ready()
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    until(lambda: httpx.get(f"{server.url}/ready", timeout=PATIENCE_S).status_code == 503)
    told = httpx.get(f"{server.url}/health", timeout=PATIENCE_S)  # on a new connection
    assert (told.status_code, "shutting down" in told.text) == (503, True)
    assert generate(server.url, SHORT).status_code == 200
    assert server.end(signal.SIGTERM) == 0


def test_a_stuck_process_is_told_before_it_is_given_up(start_server: Callable[..., Any]) -> None:
    server = start_server("--health-timeout-s", "0.5", "--heartbeat-timeout-s", "600").wait_ready()
    for name in ("scheduler", "detokenizer"):
        child = server.children()[name]
        child.suspend()
        for path in ("/health", "/ready"):
            until(lambda path=path: "stuck for 0.5 s" in httpx.get(f"{server.url}{path}").text)
            assert httpx.get(f"{server.url}{path}").status_code == 503
        child.resume()
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
    assert server.end() == 0


def test_with_restart_the_server_comes_back(start_server: Callable[..., Any]) -> None:
    server = start_server("--restart").wait_ready()
    children = server.children()
    server.forget_ready()
    children["scheduler"].kill()
    server.wait_ready()
    assert not set(server.children().values()) & set(children.values())
    assert generate(server.url, SHORT).status_code == 200
    assert server.end() == 0
    assert "starting again after: the scheduler process was killed by SIGKILL" in server.log


@pytest.mark.parametrize(
    ("name", "option", "what"),
    [
        ("scheduler", "--step-timeout-s", "made no progress"),
        ("scheduler", "--heartbeat-timeout-s", "gave no sign of life"),
        ("detokenizer", "--heartbeat-timeout-s", "gave no sign of life"),
    ],
)
def test_a_hanging_process_is_noticed_and_named(
    start_server: Callable[..., Any], name: str, option: str, what: str
) -> None:
    server = start_server(option, "6").wait_ready()  # more than a machine stands still
    with load(server.url, 2, still=True) as futures:
        server.children()[name].suspend()
        outcomes = [future.result(PATIENCE_S) for future in futures]
    assert all(f"the {name} process {what} for 6 s" in told for told in outcomes), outcomes
    assert server.end(0) == 1


def test_a_hanging_worker_is_replaced(start_server: Callable[..., Any]) -> None:
    """Long before a forward pass would be given up. Its requests end with an error, all others are served."""
    server = start_server("--http-workers", "2", "--heartbeat-timeout-s", "6").wait_ready()
    hanging = server.children()["worker-0"]
    with load(server.url, 8, still=True) as futures:
        hanging.suspend()
        until(lambda: "another takes its place" in server.log)
        # What it had in hand has ended, for its clients and in the scheduler; the others still wait.
        until(lambda: state(server.url)["live"] + sum(one.done() for one in futures) == len(futures))
        outcomes = [one.result() for one in futures if one.done()]
        assert all(told.startswith("connection: ") for told in outcomes), outcomes
        httpx.post(f"{server.url}/abort_request", json={"abort_all": True}, timeout=PATIENCE_S)
    go_on(server.url)
    assert "the worker-0 process gave no sign of life for 6 s (heartbeat_timeout_s); another" in server.log
    until(lambda: "worker-0" in server.children() and server.children()["worker-0"] != hanging)
    assert generate(server.url, SHORT).status_code == 200
    assert server.end() == 0


def test_a_second_signal_does_not_wait_for_requests(start_server: Callable[..., Any]) -> None:
    server = start_server("--drain-timeout-s", "600").wait_ready()
    with load(server.url, 2, still=True) as futures:
        server.process.send_signal(signal.SIGINT)
        until(lambda: "ending; requests in hand" in server.log)  # two signals at once would be one
        server.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        outcomes = [future.result(PATIENCE_S) for future in futures]
    assert all("told to end at once" in told for told in outcomes), outcomes
    assert time.monotonic() - began < SOON_S
    assert server.end(0) == 0


def test_a_temporary_folder_with_a_long_path_is_no_hindrance(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    place = tmp_path / ("long" * 30)
    place.mkdir()
    server = start_server(environment={"TMPDIR": str(place)}).wait_ready()
    assert generate(server.url, SHORT).status_code == 200
    assert server.end() == 0
    assert list(place.iterdir()) == []


def test_it_may_end_with_the_one_who_started_it(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "runtime", "serve", "--end-with-stdin", "--port", "0", "--threads", "1"]
    with subprocess.Popen([*command, "--ready-file", str(ready)], stdin=subprocess.PIPE) as process:
        until(lambda: ready.is_file() or process.poll() is not None)
        assert process.poll() is None
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


def test_a_killed_http_worker_takes_its_own_connections_along_and_is_replaced(
    start_server: Callable[..., Any],
) -> None:
    server = start_server("--http-workers", "2").wait_ready()
    assert [generate(server.url, SHORT).status_code for _ in range(12)] == [200] * 12
    with load(server.url, 12, still=True) as futures:
        before = server.children()
        busy = {name: connections(before[name], server.port) for name in ("worker-0", "worker-1")}
        before["worker-1"].kill()
        until(lambda: state(server.url)["live"] == 12 - busy["worker-1"])  # the scheduler forgets the rest
        go_on(server.url)
        outcomes = [future.result(PATIENCE_S) for future in futures]
    cut = [told for told in outcomes if told.startswith("connection: ")]
    assert len(cut) == busy["worker-1"], (outcomes, busy)
    assert outcomes.count("finished") == busy["worker-0"] == 12 - len(cut)

    def replaced() -> bool:
        now = server.children()
        return set(now) == set(before) and before["worker-1"] not in now.values()

    until(lambda: len(psutil.Process(server.process.pid).children()) == 4)
    assert replaced()
    # What the dead one had answered stays counted, and what it had in hand is in nobody's hand.
    assert requests_counted(server.url) == 12 + busy["worker-0"]
    new = server.children()["worker-1"]
    until(lambda: asked_until_answered_by(server, new), lambda: server.log)
    scraped = metrics(server.url)
    assert 'http_requests_active{model_name="pocket"} 1.0' in scraped
    assert state(server.url)["live"] == 0
    assert server.end() == 0
    assert "the worker-1 process was killed by SIGKILL; another takes its place" in server.log


def test_a_client_that_never_reads_holds_up_nobody(start_server: Callable[..., Any]) -> None:
    server = start_server("--log-file", "/dev/full").wait_ready()  # and neither does a full disk
    body = json.dumps(
        {"text": "One, two", "sampling_params": ENDLESS, "stream": True, "return_logprob": True}
    )
    head = (
        "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    stalled = []
    hold(server.url)
    for _ in range(4):
        one = socket.create_connection(("127.0.0.1", server.port))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.sendall((head + body).encode())
        stalled.append(one)
    wait_for_live(server.url, 4)
    go_on(server.url)
    for _ in range(5):
        answer = generate(server.url, SHORT)
        assert answer.status_code == 200
        assert answer.elapsed.total_seconds() < SOON_S
    for one in stalled:
        one.close()
    wait_for_live(server.url, 0)
    assert server.end() == 0

"""The real processes: they start, serve, drain, die and come back, and whoever waits is told why."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.process.patience import PATIENCE_S, PROGRAM_S, go_on, hold, metrics, until

ENDLESS = {"max_new_tokens": 1900, "ignore_eos": True, "temperature": 0}
SHORT = {"max_new_tokens": 4, "temperature": 0}
SOON_S = 300.0
"""How long bad news may take to reach everybody."""


def generate(url: str, params: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {"text": "The capital of France is", "sampling_params": params, **fields}
    return httpx.post(f"{url}/generate", json=body, timeout=PATIENCE_S)


def outcome(url: str, stream: bool) -> str:
    """The end of an endless request: "finished", the error's message, or how the connection ended."""
    try:
        answer = generate(url, ENDLESS, stream=stream)
    except httpx.HTTPError as error:
        return f"connection: {type(error).__name__}"
    if not answer.is_success:
        return f"{answer.status_code} {answer.json()['error']['message']}"
    if not stream:
        return "finished"
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    told = next((json.loads(event)["error"] for event in events if '"error"' in event), None)
    return "finished" if told is None else str(told["message"])


@contextlib.contextmanager
def load(url: str, count: int = 6, *, still: bool = False) -> Iterator[list[concurrent.futures.Future[str]]]:
    """That many endless requests in hand, every other one streamed: under way, or `still`, held at their
    beginning, so that none ends by itself."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        hold(url)
        futures = [pool.submit(outcome, url, n % 2 == 0) for n in range(count)]
        wait_for_live(url, count)
        if not still:
            go_on(url)
        yield futures


def state(url: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    found = httpx.get(f"{url}/server_info", headers=headers, timeout=PATIENCE_S).json()
    return dict(found["internal_states"][0])


def wait_for_live(url: str, count: int, headers: dict[str, str] | None = None) -> None:
    """Until the scheduler has that many requests in hand."""
    until(lambda: state(url, headers)["live"] == count)


def has_torch(process: psutil.Process) -> bool:
    return any("libtorch" in region.path for region in process.memory_maps())


def runner_of(server: Any) -> psutil.Process:
    """The process that computes the model."""
    [found] = server.children()["scheduler"].children()
    return psutil.Process(found.pid)


def test_it_serves_with_torch_in_one_process_and_drains(start_server: Callable[..., Any]) -> None:
    key = "k3y-nobody-may-see"
    server = start_server(
        "--http-workers", "2", "--log-level", "debug", "--drain-timeout-s", "600",
        environment={"SGLANG_DSL_API_KEY": key},
    ).wait_ready()  # fmt: skip
    children = server.children()
    assert list(children) == ["scheduler", "detokenizer", "worker-0", "worker-1"]
    assert not any(has_torch(one) for one in (*children.values(), psutil.Process(server.process.pid)))
    runner = runner_of(server)
    assert has_torch(runner)
    for one in (*children.values(), runner):
        assert key not in " ".join(one.cmdline())
        assert key not in " ".join(one.environ().values())
    [listening] = {
        connection.laddr.ip
        for one in children.values()
        for connection in one.net_connections()
        if connection.status == "LISTEN"
    }
    assert listening == "127.0.0.1"
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE_S) as client:
        assert httpx.get(f"{server.url}/model_info", timeout=PATIENCE_S).status_code == 401
        said = client.post("/generate", json={"text": "The capital of France is", "sampling_params": SHORT})
        assert said.status_code == 200
        assert said.json()["meta_info"]["completion_tokens"] == 4
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            body = {"text": "One, two", "sampling_params": {**ENDLESS, "max_new_tokens": 300}}
            hold(server.url, headers)
            futures = [
                pool.submit(
                    httpx.post, f"{server.url}/generate", json=body, headers=headers, timeout=PATIENCE_S
                )
                for _ in range(4)
            ]
            wait_for_live(server.url, 4, headers)
            go_on(server.url, headers)
            server.process.send_signal(signal.SIGTERM)
            answers = [future.result(PATIENCE_S) for future in futures]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {answer.json()["meta_info"]["completion_tokens"] for answer in answers} == {300}
    assert server.end(0) == 0
    assert key not in server.log
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_killed_process_is_named_to_everybody_who_waits(
    start_server: Callable[..., Any], victim: str
) -> None:
    server = start_server().wait_ready()
    with load(server.url) as futures:
        children = server.children()
        children["worker-0"].suspend()  # it may stand still just then
        children[victim].kill()
        until(lambda: f"the {victim} process was killed" in server.log)
        time.sleep(1.0)
        children["worker-0"].resume()
        began = time.monotonic()
        outcomes = [future.result(PATIENCE_S) for future in futures]
        took = time.monotonic() - began
    assert all(f"the {victim} process was killed by SIGKILL" in told for told in outcomes), outcomes
    assert took < SOON_S
    assert server.end(0) == 1
    assert f"the {victim} process was killed by SIGKILL" in server.log


def test_a_killed_runner_is_named_to_everybody_who_waits(start_server: Callable[..., Any]) -> None:
    server = start_server().wait_ready()
    with load(server.url) as futures:
        runner_of(server).kill()
        outcomes = [future.result(PATIENCE_S) for future in futures]
    assert all("the model's process was killed by SIGKILL" in told for told in outcomes), outcomes
    assert server.end(0) == 1
    assert "the model's process was killed by SIGKILL" in server.log


def requests_counted(url: str) -> float:
    """Of all HTTP workers together, on /generate."""
    lines = (line for line in metrics(url).splitlines() if line.startswith("sglang_dsl:http_requests_total{"))
    return sum(float(line.rpartition(" ")[2]) for line in lines if '"/generate"' in line)


def connections(process: psutil.Process, port: int) -> int:
    """How many clients it has."""
    found = process.net_connections("tcp")
    return sum(one.status == "ESTABLISHED" and one.laddr.port == port for one in found)


def asked_until_answered_by(server: Any, worker: psutil.Process) -> bool:
    """Whether one of some requests, which all are answered, went to that worker."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(timeout=PATIENCE_S)) for _ in range(8)]
        answers = [client.get(f"{server.url}/ready") for client in clients]
        assert {answer.status_code for answer in answers} == {200}
        return connections(worker, server.port) > 0


def test_nothing_outlives_a_killed_supervisor(start_server: Callable[..., Any]) -> None:
    server = start_server().wait_ready()
    with load(server.url, 2, still=True) as futures:
        server.children()
        server.process.kill()
        outcomes = [future.result(PATIENCE_S) for future in futures]
    assert all("supervisor died" in told for told in outcomes), outcomes
    assert server.end(0, timeout=SOON_S) == -signal.SIGKILL


def test_what_is_not_finished_when_draining_is_over_is_told_so(start_server: Callable[..., Any]) -> None:
    server = start_server("--drain-timeout-s", "0.5").wait_ready()
    with load(server.url, 4, still=True) as futures:
        server.process.send_signal(signal.SIGTERM)
        outcomes = [future.result(PATIENCE_S) for future in futures]
    assert all("not finished within 0.5 s" in told for told in outcomes), outcomes
    assert server.end(0) == 0


def test_a_port_in_use_is_said_at_once(start_server: Callable[..., Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start_server("--port", str(port))
        assert server.end(0) == 2
    assert f"error: 127.0.0.1:{port}: another process is listening there" in server.log
    assert len(server.log.splitlines()) == 1


def test_a_model_that_is_not_there_is_said_at_once(start_server: Callable[..., Any]) -> None:
    server = start_server("--model", "/nowhere/model")
    assert server.end(0) == 2
    assert "error: /nowhere/model: there is no such directory" in server.log
    assert len(server.log.splitlines()) == 1


def test_a_model_that_cannot_be_loaded_ends_the_start(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(Path(sys.modules["runtime"].__path__[0]) / "pocket" / "checkpoint", folder)
    for weights in folder.glob("*.safetensors"):
        weights.write_bytes(b"no weights")
    server = start_server("--model", str(folder), "--restart")
    assert server.end(0, timeout=PATIENCE_S) == 1
    assert ".safetensors" in server.log.splitlines()[-1]
    assert "Traceback" not in server.log


def test_loading_has_a_deadline(start_server: Callable[..., Any], loads_when_told: Any) -> None:
    environment, _ = loads_when_told  # it never is
    server = start_server("--load-timeout-s", "0.05", environment=environment)
    assert server.end(0) == 1
    assert "was not ready within 0.05 s" in server.log


def test_it_can_be_told_to_end_while_it_loads(start_server: Callable[..., Any], loads_when_told: Any) -> None:
    environment, _ = loads_when_told  # it never is
    server = start_server(environment=environment)
    until(lambda: "listening on" in server.log, lambda: server.log)
    assert server.end(timeout=PATIENCE_S) == 0
    assert "ready on" not in server.log


def test_a_child_without_a_supervisor_says_what_it_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runtime.processes.supervise.child"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROGRAM_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert "python -m runtime serve" in done.stderr

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

from tests.e2e.patience import PATIENCE_S, PROGRAM_S, go_on, hold, metrics, until

ENDLESS = {"max_new_tokens": 1900, "ignore_eos": True, "temperature": 0}
SHORT = {"max_new_tokens": 4, "temperature": 0}
SOON_S = 60.0
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_server_that_will_end_says_so_first(start_server: Callable[..., Any]) -> None:
    server = start_server("--lame-duck-s", "600").wait_ready()
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    until(lambda: httpx.get(f"{server.url}/ready", timeout=PATIENCE_S).status_code == 503)
    told = httpx.get(f"{server.url}/health", timeout=PATIENCE_S)  # on a new connection
    assert (told.status_code, "shutting down" in told.text) == (503, True)
    assert generate(server.url, SHORT).status_code == 200
    assert server.end(signal.SIGTERM) == 0


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_nothing_outlives_a_killed_supervisor(start_server: Callable[..., Any]) -> None:
    server = start_server().wait_ready()
    with load(server.url, 2, still=True) as futures:
        server.children()
        server.process.kill()
        outcomes = [future.result(PATIENCE_S) for future in futures]
    assert all("supervisor died" in told for told in outcomes), outcomes
    assert server.end(0, timeout=SOON_S) == -signal.SIGKILL


@pytest.mark.slow
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


def test_what_is_not_finished_when_draining_is_over_is_told_so(start_server: Callable[..., Any]) -> None:
    server = start_server("--drain-timeout-s", "0.5").wait_ready()
    with load(server.url, 4, still=True) as futures:
        server.process.send_signal(signal.SIGTERM)
        outcomes = [future.result(PATIENCE_S) for future in futures]
    assert all("not finished within 0.5 s" in told for told in outcomes), outcomes
    assert server.end(0) == 0


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


@pytest.mark.slow
def test_a_temporary_folder_with_a_long_path_is_no_hindrance(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    place = tmp_path / ("long" * 30)
    place.mkdir()
    server = start_server(environment={"TMPDIR": str(place)}).wait_ready()
    assert generate(server.url, SHORT).status_code == 200
    assert server.end() == 0
    assert list(place.iterdir()) == []


def test_it_can_be_told_to_end_while_it_loads(start_server: Callable[..., Any], loads_when_told: Any) -> None:
    environment, _ = loads_when_told  # it never is
    server = start_server(environment=environment)
    until(lambda: "listening on" in server.log, lambda: server.log)
    assert server.end(timeout=PATIENCE_S) == 0
    assert "ready on" not in server.log


@pytest.mark.slow
def test_it_may_end_with_the_one_who_started_it(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "runtime", "serve", "--end-with-stdin", "--port", "0", "--threads", "1"]
    with subprocess.Popen([*command, "--ready-file", str(ready)], stdin=subprocess.PIPE) as process:
        until(lambda: ready.is_file() or process.poll() is not None)
        assert process.poll() is None
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


def test_a_child_without_a_supervisor_says_what_it_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runtime.processes.supervise.child"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROGRAM_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert "python -m runtime serve" in done.stderr

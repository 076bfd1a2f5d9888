"""What else may go wrong with running processes: hanging ones, odd mail, nowhere to write, no descriptors."""

from __future__ import annotations

import concurrent.futures
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import zmq

from runtime.ipc.wire import PIPELINE
from runtime.protocol.io_struct import (
    BatchStrOutput,
    BatchTokenIDOutput,
    FlushCacheReq,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from runtime.protocol.sampling import SamplingParams
from tests.process.patience import PATIENCE_S, go_on, hold, until

SHORT = {"max_new_tokens": 4, "temperature": 0}
ENDLESS = {"max_new_tokens": 1900, "ignore_eos": True}
SOON_S = 60.0
STEP_S = "6"
"""More than a machine stands still: what is stopped must be the one that the test stops."""


def generate(url: str, params: dict[str, Any]) -> httpx.Response:
    body = {"text": "The capital of France is", "sampling_params": params}
    return httpx.post(f"{url}/generate", json=body, timeout=PATIENCE_S)


def told(url: str) -> str:
    """How an endless request ends."""
    try:
        answer = generate(url, ENDLESS)
    except httpx.HTTPError as error:
        return f"connection: {type(error).__name__}"
    return "finished" if answer.is_success else str(answer.json()["error"]["message"])


@pytest.mark.parametrize("victim", ["detokenizer", "worker-0"])
def test_a_stopped_process_is_noticed_and_its_clients_hear_of_it(
    start_server: Callable[..., Any], wait_live: Callable[..., None], victim: str
) -> None:
    server = start_server("--step-timeout-s", STEP_S).wait_ready()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        hold(server.url)
        futures = [pool.submit(told, server.url) for _ in range(2)]
        wait_live(server, 2)
        go_on(server.url)
        server.children()[victim].suspend()
        began = time.monotonic()
        outcomes = [future.result(PATIENCE_S) for future in futures]
    assert time.monotonic() - began < float(STEP_S) + SOON_S
    reason = f"the {victim} process made no progress for {STEP_S} s"
    # Nobody but the stopped worker has the connections of its clients: those are cut.
    assert all(one.startswith("connection: ") if victim == "worker-0" else reason in one for one in outcomes)
    if victim == "worker-0":  # another takes its place
        server.wait_ready()
        assert generate(server.url, {"max_new_tokens": 2}).status_code == 200
        assert server.end() == 0
    else:
        assert server.end(0) == 1
    assert reason in server.log


def test_one_that_is_killed_while_it_loads_is_named(
    start_server: Callable[..., Any], loads_when_told: Any
) -> None:
    environment, _ = loads_when_told  # it never is
    server = start_server("--restart", environment=environment)
    until(lambda: len(psutil.Process(server.process.pid).children()) == 3, lambda: server.log)
    server.children()["detokenizer"].kill()
    assert server.end(0) == 1
    assert "the detokenizer process was killed by SIGKILL" in server.log


def odd_mail() -> list[bytes]:
    """Nothing that the processes send each other; the first are no structs, the others make no sense."""
    whole = PIPELINE.encode(FlushCacheReq(rid="x"))
    nobody = TokenOutput(rid="nobody", new_ids=[10**9], http_worker_ipc="worker-77")
    wrong = TokenizedGenerateReqInput(
        rid="wrong", http_worker_ipc="worker-77", input_ids=[10**9], sampling_params=SamplingParams()
    )
    return [
        b"", b"\x00" * 100, b"GET / HTTP/1.1\r\n\r\n", os.urandom(1000), b"\x92" * 5000, whole[:-1],
        msgspec.msgpack.encode((99, "FlushCacheReq", {})), msgspec.msgpack.encode((1, "Nothing", {})),
        msgspec.msgpack.encode((1, "FlushCacheReq", {"timeout_s": "soon"})), b"x" * (1 << 20),
        PIPELINE.encode(BatchTokenIDOutput(rids=["nobody"], outputs=[nobody])), PIPELINE.encode(wrong),
        PIPELINE.encode(BatchStrOutput(rids=["nobody"], outputs=[])), whole,
    ]  # fmt: skip


def test_odd_mail_in_the_sockets_stops_nobody(start_server: Callable[..., Any]) -> None:
    server = start_server().wait_ready()
    sockets = sorted(server.folder.glob("sglang-dsl-*/*/*.ipc"))
    assert [path.stem for path in sockets] == ["detokenizer", "scheduler", "worker-0"]
    for path in sockets:
        assert path.parent.stat().st_mode & 0o077 == 0
        with zmq.Context() as context, context.socket(zmq.PUSH) as pusher:
            pusher.setsockopt(zmq.LINGER, int(PATIENCE_S * 1000))
            pusher.connect(f"ipc://{path}")
            for mail in odd_mail():
                pusher.send(mail)
            pusher.send_multipart([b"several", b"parts"])
        with socket.socket(socket.AF_UNIX) as raw:  # one that does not even speak the sockets' protocol
            raw.connect(str(path))
            raw.sendall(os.urandom(4096))
    for _ in range(3):
        assert generate(server.url, SHORT).json()["meta_info"]["completion_tokens"] == 4
    assert server.end() == 0
    assert "dropped a malformed message" in server.log
    assert "Traceback" not in server.log, server.log


def test_it_serves_where_nothing_can_be_written(tmp_path: Path) -> None:
    """Log, standard error and the ready file: the disk is full, the folder is not there."""
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "runtime", "serve", "--port", "0", "--threads", "1", "--end-with-stdin"]
    command += ["--max-total-tokens", "2048", "--log-level", "debug", "--log-file", "/nowhere/log.txt"]
    with Path("/dev/full").open("wb") as full, subprocess.Popen(
        [*command, "--ready-file", str(ready)], stdin=subprocess.PIPE, stdout=full, stderr=full
    ) as process:  # fmt: skip
        until(lambda: ready.is_file() or process.poll() is not None)
        assert process.poll() is None
        url = msgspec.json.decode(ready.read_bytes())["url"]
        assert generate(url, SHORT).status_code == 200
        assert generate(url, {"temperature": -1}).status_code == 400
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


def test_it_recovers_when_clients_used_up_its_descriptors(start_server: Callable[..., Any]) -> None:
    server = start_server().wait_ready()
    worker = server.children()["worker-0"]
    room = worker.num_fds() + 20
    worker.rlimit(resource.RLIMIT_NOFILE, (room, room))
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(60)]
    until(lambda: worker.num_fds() >= room, worker.num_fds)
    for one in idle:
        one.close()

    def serves() -> bool:
        try:
            return generate(server.url, SHORT).status_code == 200
        except httpx.HTTPError:
            return False

    until(serves)
    assert server.end() == 0

"""What else may go wrong with running processes: hanging ones, odd mail, nowhere to write, no descriptors."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
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
from tests.process.patience import PATIENCE_S, until

SHORT = {"max_new_tokens": 4, "temperature": 0}


def generate(url: str, params: dict[str, Any]) -> httpx.Response:
    body = {"text": "The capital of France is", "sampling_params": params}
    return httpx.post(f"{url}/generate", json=body, timeout=PATIENCE_S)


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

"""The parts of replicas that need no Ray: options, the directory, the scaling policy, a server's process."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config.engine import EngineConfig
from runtime.config.flags import read_options
from runtime.config.serving.replicas import ReplicasConfig
from runtime.protocol.errors import BadRequest, EngineDead
from runtime.server.replicas.directory import (
    DEVICES,
    FORGOTTEN_S,
    REQUESTS,
    Directory,
    Member,
    by_requests,
    of_role,
    shares,
)
from runtime.server.replicas.process import ServerProcess
from runtime.server.replicas.start import start

HERE, THERE = Member("worker", "http://10.0.0.1:1"), Member("worker", "http://10.0.0.2:1")


def test_several_keys_are_refused_rather_than_not_asked_for() -> None:
    """The router before the replicas knows one key."""
    given = ["--model", "pocket", "--engine", "ray", "--api-keys-file", "keys.yaml"]
    with pytest.raises(BadRequest, match="api_keys_file: cannot be combined with replicas"):
        start(read_options(given, {}, ""), {})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--replicas", "2"], "replicas: more than one needs --engine ray"),
        (["--engine", "rye"], "engine"),
        (["--engine", "ray", "--replicas", "0"], "replicas: must be at least 1, got 0"),
        (
            ["--engine", "ray", "--replicas", "3", "--max-replicas", "2"],
            "max_replicas: must be at least replicas",
        ),
        (["--engine", "ray", "--target-requests", "0"], "target_requests: must be a positive number"),
        (["--engine", "ray", "--replica-gpus", "-1"], "replica_gpus: must be a number of at least 0"),
        (["--engine", "ray", "--upscale-delay-s", "inf"], "upscale_delay_s: must be a number of at least 0"),
        (["--engine", "ray", "--retries", "-1"], "retries: must be at least 0"),
    ],
)
def test_options_that_make_no_sense_are_told(given: list[str], said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_options(given, {})
    assert said in str(caught.value)


def test_options_of_replicas_come_from_flags_and_environment() -> None:
    options = read_options(["--engine", "ray", "--replicas", "2"], {"SGLANG_DSL_MAX_REPLICAS": "5"})
    assert (options.replicas.replicas, options.replicas.most) == (2, 5)
    assert read_options([], {}).replicas == ReplicasConfig()


def test_the_directory_forgets_who_is_silent_and_who_leaves() -> None:
    now = [0.0]
    directory = Directory("k", lambda: now[0])
    directory.announce("a", (HERE,))
    now[0] = FORGOTTEN_S - 1
    directory.announce("b", (THERE,))
    assert directory.members() == [HERE, THERE]
    now[0] = FORGOTTEN_S + 1
    assert directory.members() == [THERE]
    directory.announce("a", (HERE,))
    directory.leave("b")
    directory.leave("nobody")
    assert (directory.members(), directory.key()) == ([HERE], "k")


LOADS = st.lists(st.floats(0, 1000, allow_subnormal=False), max_size=20)


@given(LOADS, st.floats(0.5, 100), st.integers(1, 20))
def test_there_are_replicas_for_all_requests_and_not_one_too_many(
    loads: list[float], target: float, now: int
) -> None:
    context: Any = SimpleNamespace(
        aggregated_metrics={REQUESTS: dict(enumerate(loads))},
        target_num_replicas=now,
        config=SimpleNamespace(target_ongoing_requests=target),
    )
    wanted, _ = by_requests(context)
    if not loads:
        assert wanted == now
    else:
        assert wanted * target >= sum(loads) * (1 - 1e-9)
        assert (wanted - 1) * target < sum(loads) or wanted == 0


def test_without_any_figures_there_are_as_many_as_now() -> None:
    assert by_requests(SimpleNamespace(aggregated_metrics=None, target_num_replicas=3)) == (3, {})


def test_the_servers_of_a_pair_share_the_devices_and_a_key() -> None:
    assert shares("4,5,6,7", 2) == [{DEVICES: "4,5"}, {DEVICES: "6,7"}]
    assert shares("4", 1) == [{DEVICES: "4"}]
    assert shares("", 2) == shares("4", 2) == [{}, {}]
    assert of_role("worker", "h", "k") == {}
    told = [of_role(role, "10.0.0.1", "k") for role in ("prefill", "decode")]
    assert [one["disaggregation_mode"] for one in told] == ["prefill", "decode"]
    assert EngineConfig.of(told[0]).disaggregation_bootstrap_port == 0
    assert EngineConfig.of(told[1]).disaggregation_key == "k"


def test_a_server_that_cannot_start_says_why() -> None:
    server = ServerProcess({"model": "/nowhere", "api_key": "k"}, "127.0.0.1", {**os.environ})
    try:
        with pytest.raises(EngineDead, match=r"(?s)ended with code 2.*/nowhere"):
            server.wait(300)
        with pytest.raises(EngineDead, match="ended with code 2"):
            asyncio.run(server.ask("/health", 1))
    finally:
        server.stop(0)


def test_a_paused_replica_is_not_replaced() -> None:
    cases = [(200, "healthy\n", True), (503, '{"error":{"code":"not_ready"}}', True),
             (503, '{"error":{"code":"engine_dead"}}', False), (500, "", False)]  # fmt: skip
    left = iter(cases)

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body, _ = next(left)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            return

    server = ServerProcess({"model": "/nowhere", "api_key": "k"}, "127.0.0.1", {**os.environ})
    server.check = lambda: None  # type: ignore[method-assign]
    try:
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as answering:
            threading.Thread(target=answering.serve_forever, daemon=True).start()
            server.url = f"http://127.0.0.1:{answering.server_port}"
            for status, _, well in cases:
                with contextlib.nullcontext() if well else pytest.raises(EngineDead, match=str(status)):
                    asyncio.run(server.check_health(60))
            answering.shutdown()
    finally:
        server.stop(0)

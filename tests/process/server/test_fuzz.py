"""Requests that schemathesis makes of the server's own OpenAPI document: right ones, wrong ones and odd ones.
No answer is a 500, every answer looks as the document says, nothing hangs, and nothing is left afterwards.

    pytest -s tests/long/server/test_fuzz.py   # FUZZ_SECONDS, ten minutes; prints what it counted
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.exploring import EXPLORE
from tests.process.patience import PATIENCE_S

CHECKS: list[CheckFunction] = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
]  # fmt: skip
UNDO = {
    "/pause_generation": "/continue_generation",
    "/start_profile": "/stop_profile",
    "/sleep": "/wake_up",
    "/release_memory_occupation": "/resume_memory_occupation",
    "/set_internal_state": "/set_internal_state",
}
"""What would stop or slow all that follows, and what ends it."""
ARGUMENTS = (
    "--log-level", "error", "--context-length", "256", "--request-timeout-s", "20",
    "--control-timeout-s", "100",
)  # fmt: skip
MIB = 1 << 20


def settings(examples: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=examples, deadline=None, database=None, derandomize=False, print_blob=False,
        suppress_health_check=list(HealthCheck), phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        report_multiple_bugs=False,
    )  # fmt: skip


class Fuzz:
    """Asks every operation in turn. faults: what was wrong with which."""

    def __init__(self, url: str) -> None:
        self._url = url
        # What the server answers to no change.
        self._tuned = httpx.post(f"{url}/set_internal_state", json={"server_args": {}}).json()["data"]
        self._schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        self.operations = [found.ok() for found in self._schema.get_all_operations()]
        self.statuses: collections.Counter[int] = collections.Counter()
        self.by_path: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
        self.faults: dict[str, str] = {}
        self.slowest = (0.0, "")

    def one(self, operation: Any, mode: GenerationMode, examples: int, seed: int) -> None:
        strategy = operation.as_strategy(generation_mode=mode)

        @hypothesis.seed(seed)
        @settings(examples)
        @hypothesis.given(case=strategy)
        def ask(case: Any) -> None:
            self._ask(case)

        try:
            ask()
        except hypothesis.errors.Unsatisfiable:
            pass  # nothing wrong can be made of it: no body, no parameters
        except (AssertionError, BaseExceptionGroup, httpx.HTTPError, OSError) as error:
            self.faults.setdefault(f"{operation.label} {type(error).__name__}", str(error)[:2000])

    def _ask(self, case: Any) -> None:
        began = time.monotonic()
        path = case.operation.path
        answer = case.call(timeout=PATIENCE_S)
        took = time.monotonic() - began
        self.slowest = max(self.slowest, (took, case.operation.label))
        self.statuses[answer.status_code] += 1
        self.by_path[path][answer.status_code] += 1
        if path in UNDO:
            body = {"server_args": self._tuned} if path == "/set_internal_state" else {}
            undone = httpx.post(f"{self._url}{UNDO[path]}", json=body, timeout=PATIENCE_S)
            assert undone.status_code in (200, 400), undone.text  # 400: it had not begun
        # The time that a request gives itself may be over: no fault of the server's.
        late = answer.status_code == 504 and isinstance(case.body, dict) and bool(case.body.get("timeout_s"))
        case.validate_response(
            answer, checks=[one for one in CHECKS if not late or one != not_a_server_error]
        )

    def run(self, seconds: float, examples: int, rounds: int = 0) -> None:
        """Round after round over all operations, until the time is up and so many rounds are whole."""
        deadline = time.monotonic() + seconds
        for seed in itertools.count(EXPLORE):
            for operation in self.operations:
                for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                    if time.monotonic() > deadline and seed >= EXPLORE + rounds:
                        return
                    self.one(operation, mode, examples, seed)

    def report(self) -> str:
        took, label = self.slowest
        lines = [
            f"{sum(self.statuses.values())} requests to {len(self.by_path)} paths",
            f"  slowest: {took:.1f} s ({label})",
        ]
        lines.append("  statuses: " + ", ".join(f"{n}: {c}" for n, c in sorted(self.statuses.items())))
        lines += [f"  FAULT {name}: {told}" for name, told in self.faults.items()]
        return "\n".join(lines)


def memory(processes: dict[str, psutil.Process]) -> dict[str, float]:
    return {name: one.memory_info().rss / MIB for name, one in processes.items()}


@pytest.mark.parametrize(
    ("seconds", "examples"),
    [
        (4.0, 2),
    ],
)
@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
def test_no_request_is_answered_with_a_500(
    start_server: Callable[..., Any],
    wait_idle: Callable[..., None],
    tmp_path: Path,
    seconds: float,
    examples: int,
) -> None:
    server = start_server(*ARGUMENTS, "--profile-folder", str(tmp_path / "profiles")).wait_ready()
    processes = server.children()
    fuzz = Fuzz(server.url)
    fuzz.run(seconds / 4, examples)
    warm = memory(processes)
    long = seconds > 60
    fuzz.run(seconds * 3 / 4, examples, rounds=1 if long else 0)
    print(fuzz.report())
    httpx.post(f"{server.url}/continue_generation", json={}, timeout=PATIENCE_S)
    wait_idle(server)
    print(f"  MiB: {warm} -> {memory(processes)}")
    assert not fuzz.faults, fuzz.report()
    if long:
        assert fuzz.by_path.keys() == {one.path for one in fuzz.operations}
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200
    assert httpx.post(f"{server.url}/flush_cache", json={}, timeout=PATIENCE_S).status_code == 200
    state = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()["internal_states"][0]
    assert state["free"] == state["slots"]
    assert server.end() == 0
    assert "Traceback" not in server.log, server.log

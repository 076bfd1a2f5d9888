"""Settings for the whole suite: property tests are about truth, not about speed on a busy machine. They
try the same examples each time; EXPLORE=NUMBER in the environment draws others, the same for the same number.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

import runtime.grammar.json_schema.checks.validators  # noqa: F401 - before others import jsonschema, the slow way
from tests.exploring import EXPLORE, EXPLORING

if not os.path.exists("/dev/nvidiactl"):  # where there is no GPU, kernels run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "suite",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not EXPLORING,
    max_examples=100 if EXPLORING else 10,
    print_blob=EXPLORING,
    database=None,
)
settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if EXPLORING and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(EXPLORE)
    if (path := os.environ.get("TEST_SECONDS")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Seconds(path))


class Seconds:
    """How long the tests of each file took, for .ci/trees.py."""

    def __init__(self, path: str) -> None:
        self.path, self.took = path, defaultdict[str, float](float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.took[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        with open(self.path, "w", encoding="utf-8") as file:
            json.dump(self.took, file)


def pytest_runtest_setup() -> None:
    """A gate that is late leaves tests out, and says which, rather than to be stopped."""
    if time.time() > float(os.environ.get("TEST_DEADLINE", "inf")):
        pytest.skip("the gate's time is over: left to `make test-all`")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    failed = [report.nodeid for report in terminalreporter.stats.get("failed", ())]
    if EXPLORING and failed:
        terminalreporter.section("examples")
        terminalreporter.write_line(f"drawn from {EXPLORE}; to try them again:")
        for name in failed:
            terminalreporter.write_line(f"  EXPLORE={EXPLORE} pytest '{name}'")


@pytest.fixture(scope="session", autouse=True)
def _torch_is_loaded_once() -> Iterator[None]:
    """Models of engines in this process compute in it, unless a test says otherwise: a process for each of
    them would load torch anew. Servers that tests start have one."""
    from runtime.processes.pipeline import loading

    whole = loading.needs_process

    @functools.wraps(whole)
    def here(config, spec):  # type: ignore[no-untyped-def]
        return bool(config.runner_process or config.tp_size > 1) and whole(config, spec)

    loading.needs_process = here
    yield
    loading.needs_process = whole

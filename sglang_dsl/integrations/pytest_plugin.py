"""A pytest plugin for tests of programs, installed with this package.

    def test_qa(sgl_mock):                      a scripted backend, the default one of this test
        mock = sgl_mock(["Paris"])
        assert qa("What is the capital of France?")["answer"] == "Paris"

    def test_qa_as_recorded(sgl_recorded):      calls replayed from `recordings/`, beside the test's file
        assert "Paris" in qa("What is the capital of France?", **sgl_recorded)["answer"]

`pytest --sgl-record=new` records missing calls on the backend of the fixture `sgl_record_backend`, which a
conftest.py overrides; `=all` records all calls again.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_dsl.errors import ReplayMiss
from sglang_dsl.settings import global_config

FOLDER = "recordings"
AGAIN = "pytest --sgl-record=new"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("sglang-dsl").addoption(
        "--sgl-record",
        choices=("none", "new", "all"),
        default="none",
        help="calls of programs in tests with sgl_recorded: only replayed (none, the default), recorded "
        "where they are not there yet (new), or recorded again (all)",
    )


@pytest.fixture
def sgl_mock() -> Iterator[Callable[..., Any]]:
    """Creates a MockBackend and makes it the default backend of this test."""
    # Imported here, as every run of pytest loads this file, and few use the fixture.
    from sglang_dsl.backends.mock import MockBackend

    before = global_config.default_backend

    def make(*args: Any, **kwargs: Any) -> Any:
        global_config.default_backend = mock = MockBackend(*args, **kwargs)
        return mock

    yield make
    global_config.default_backend = before


@pytest.fixture(scope="session")
def sgl_record_backend() -> Any:
    """The backend for recording; None: that of the program. Override it."""
    return None


@pytest.fixture
def sgl_recorded(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Keyword arguments for run, run_batch and the others, which replay calls from this test's recording,
    without a backend."""
    mode = request.config.getoption("--sgl-record")
    test: Any = request.node
    # A test's name may contain any characters.
    name = re.sub(r"[^\w.-]+", "_", test.nodeid.partition("::")[2]).strip("_")
    folder = test.path.parent / FOLDER / test.path.stem / name
    if mode == "all" and folder.is_dir():
        shutil.rmtree(folder)
    if mode == "none" and not folder.is_dir():
        shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
        pytest.fail(f"there is no recording in {shown}; make one: {AGAIN}", pytrace=False)
    options: dict[str, Any] = {"cache": "ro" if mode == "none" else "rw", "cache_dir": str(folder)}
    before = global_config.default_backend
    if mode == "none":
        global_config.default_backend = None  # no backend is started for a replay
    elif (backend := request.getfixturevalue("sgl_record_backend")) is not None:
        options["backend"] = backend
    yield options
    global_config.default_backend = before
    from sglang_dsl.interpreter.record import records

    records.release(folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(ReplayMiss):
        report.sections.append(("sglang-dsl", f"to record what is not there yet: {AGAIN}"))
    return report

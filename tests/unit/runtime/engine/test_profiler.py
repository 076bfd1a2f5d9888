"""Profiles: of all threads, into files below one folder, ended by hand or after some steps."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from runtime.engine.profiler import TorchProfiler
from runtime.protocol.errors import BadRequest


def names(file: str) -> set[str]:
    with gzip.open(file) as opened:
        return {str(event.get("name")) for event in json.load(opened)["traceEvents"]}


def test_a_profile_has_the_work_of_all_threads(tmp_path: Path) -> None:
    profiler = TorchProfiler(str(tmp_path))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.ones, 2).result()
        started = profiler.start("mine", None)
        pool.submit(torch.matmul, torch.ones(4, 4), torch.ones(4, 4)).result()
        done = profiler.stop()
    assert done == started
    assert Path(done["file"]).parent == tmp_path / "mine"
    assert "aten::matmul" in names(done["file"])


def test_it_ends_by_itself_after_so_many_steps(tmp_path: Path) -> None:
    profiler = TorchProfiler(str(tmp_path))
    file = profiler.start(None, 2)["file"]
    profiler.stepped()
    assert not Path(file).exists()
    profiler.stepped()
    assert Path(file).exists()
    profiler.stepped()
    with pytest.raises(BadRequest, match="no profile"):
        profiler.stop()


def test_closing_ends_the_one_that_is_made(tmp_path: Path) -> None:
    profiler = TorchProfiler(str(tmp_path))
    profiler.close()
    file = profiler.start(None, None)["file"]
    torch.ones(3, 3).matmul(torch.ones(3, 3))
    profiler.close()
    assert "aten::matmul" in names(file)
    with pytest.raises(BadRequest, match="no profile"):
        profiler.stop()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    profiler = TorchProfiler(str(tmp_path / "own"))
    for folder in ("..", "/etc", "a/../../b"):
        with pytest.raises(BadRequest, match="folder"):
            profiler.start(folder, None)
    for steps in (0, -1, 10**9):
        with pytest.raises(BadRequest, match="steps"):
            profiler.start(None, steps)
    profiler.start(None, None)
    with pytest.raises(BadRequest, match="already"):
        profiler.start(None, None)
    profiler.stop()
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequest, match="cannot be made"):
        TorchProfiler(str(tmp_path / "file")).start("x", None)

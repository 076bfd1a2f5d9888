"""Attention in C: where it meets torch's products, where its work is shared out, and where there is none."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.attention.base import choose
from runtime.attention.native import library as made
from runtime.attention.native import views
from runtime.attention.native.views import NativeViews
from runtime.attention.pool import KVShape
from tests.contracts.test_attention import PLANS, compare, plan_of

MIXED = (
    "shared prefix, decodes",
    "tree of prefixes",
    "shared prefix, short extends and decodes",
    "many rows",
)
compiled = pytest.mark.skipif(made.library() is None, reason="there is no C compiler")


@pytest.fixture
def anew() -> Iterator[None]:
    """The library is looked for once more, then and afterwards."""
    made.library.cache_clear()
    yield
    made.library.cache_clear()


def native(slots: int = 16) -> NativeViews:
    return NativeViews(KVShape(1, 2, 16, torch.float32, torch.device("cpu")), slots, 4, (None,))


@compiled
@pytest.mark.parametrize("shape", MIXED)
@pytest.mark.parametrize("most", [0, 20_000])
def test_what_many_rows_share_is_merged(monkeypatch: pytest.MonkeyPatch, shape: str, most: int) -> None:
    monkeypatch.setattr(views, "SHARED_AT_MOST", most)
    rows, lengths = PLANS[shape]
    compare(NativeViews, plan_of(rows, lengths, 4, seed=2))
    compare(NativeViews, plan_of(rows, lengths, 0, seed=2), dtype=torch.bfloat16, tolerance=2e-2)


@compiled
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 48), (8, 2, 128), (3, 1, 256), (4, 4, 272)])
def test_sizes_of_heads(heads: int, kv_heads: int, dim: int) -> None:
    rows, lengths = PLANS["tree of prefixes"]
    compare(NativeViews, plan_of(rows, lengths, 1, seed=3), heads=heads, kv_heads=kv_heads, dim=dim)


@compiled
@pytest.mark.parametrize("shape", ["many rows", "decodes of different lengths", "first token"])
def test_threads_share_the_rows(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    monkeypatch.setattr(views, "ALONE", 0)
    torch.set_num_threads(3)
    rows, lengths = PLANS[shape]
    compare(NativeViews, plan_of(rows, lengths, 0, seed=4), windows=(None, 50))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@compiled
def test_it_is_what_a_cpu_takes() -> None:
    assert choose("auto", torch.device("cpu")) is NativeViews
    assert native()._library is made.library()


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_torch_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, anew: None, compiler: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native()._library is None
    rows, lengths = PLANS["tree of prefixes"]
    compare(NativeViews, plan_of(rows, lengths, 1, seed=5))


@compiled
def test_wrong_numbers_are_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, anew: None, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "attend.c"
    source.write_text(made.SOURCE.read_text().replace("* scale;", "* scale * 1.01f;", 1))
    monkeypatch.setattr(made, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert made.library() is None
    assert "wrong numbers" in caplog.text


@compiled
def test_it_is_kept_for_its_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, anew: None) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "sglang-dsl" / "native"
    assert made.library() is not None
    (kept,) = folder.iterdir()
    before = kept.stat().st_mtime_ns
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    made.library.cache_clear()
    assert made.library() is not None
    assert kept.stat().st_mtime_ns == before
    folder.chmod(0o777)  # anybody may have put something there
    assert made._folder() != folder


def test_what_it_cannot_compute_is_torchs() -> None:
    for changes in ({"dtype": torch.float16}, {"head_dim": 24}, {"head_dim": 512}):
        shape: Any = KVShape(1, 2, 16, torch.float32, torch.device("cpu"))._replace(**changes)
        assert NativeViews(shape, 16, 4, (None,))._library is None

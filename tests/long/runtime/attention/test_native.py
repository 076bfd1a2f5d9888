"""Attention in C: on every kind of processor, on random plans, with threads, and where there is none."""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.attention import native_views as views
from runtime.attention.base import PLAIN, Scoring, choose
from runtime.attention.native_views import NativeViews
from runtime.attention.pool import KVShape
from runtime.attention.reference import Reference
from runtime.kernels.native import compiled as source
from runtime.kernels.native import library as made
from tests.long.contracts.test_attention import PLANS, compare, plan_of

MIXED = (
    "shared prefix, decodes",
    "tree of prefixes",
    "shared prefix, short extends and decodes",
    "many rows",
)
QUICKLY = ("-O1", *source.FLAGS[1:])  # compiled in half the time
compiled = pytest.mark.skipif(made.library() is None, reason="there is no C compiler")


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library is looked for once more, then and afterwards; not the package's own."""
    monkeypatch.setattr(source, "_built", lambda: iter(()))
    made.library.cache_clear()
    yield
    made.library.cache_clear()


def native(slots: int = 16) -> NativeViews:
    return NativeViews(KVShape(1, 2, 16, torch.float32, torch.device("cpu")), slots, 4, (None,))


@pytest.fixture
def lanes() -> Iterator[Callable[[int], int]]:
    """Another kind of processor: vectors of at most so many floats."""
    library = made.library()
    assert library is not None
    yield library.use_lanes
    library.use_lanes(16)


@compiled
@pytest.mark.parametrize("most", [4, 8, 16])
@pytest.mark.parametrize("shape", MIXED)
def test_every_kind_of_processor(lanes: Callable[[int], int], shape: str, most: int) -> None:
    if lanes(most) < most:
        pytest.skip(f"this processor has no vectors of {most} floats")
    scoring = Scoring(0.2, 3.0, (torch.tensor([-1.0, 0.5, 2.0, 30.0]),) * 2)
    rows, lengths = PLANS[shape]
    compare(NativeViews, plan_of(rows, lengths, 4, seed=2), windows=(None, 60), dim=48, scoring=scoring)
    compare(NativeViews, plan_of(rows, lengths, 0, seed=2), kept=torch.bfloat16)


@compiled
@pytest.mark.parametrize("worth", [0, 1, 100_000])
@pytest.mark.parametrize("shape", MIXED)
def test_what_rows_share_is_merged_or_read_by_each(
    monkeypatch: pytest.MonkeyPatch, shape: str, worth: int
) -> None:
    monkeypatch.setattr(views, "WORTH", worth)
    rows, lengths = PLANS[shape]
    compare(NativeViews, plan_of(rows, lengths, 4, seed=2), windows=(None, 30))
    compare(NativeViews, plan_of(rows, lengths, 0, seed=2), dtype=torch.bfloat16, tolerance=2e-2)


@compiled
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 48), (8, 2, 128), (9, 1, 256), (4, 4, 272)])
def test_sizes_of_heads(heads: int, kv_heads: int, dim: int) -> None:
    rows, lengths = PLANS["tree of prefixes"]
    compare(NativeViews, plan_of(rows, lengths, 1, seed=3), heads=heads, kv_heads=kv_heads, dim=dim)


@compiled
@pytest.mark.parametrize("seed", range(25))
def test_random_plans_and_forms(seed: int) -> None:
    """Any tree of prefixes, number and length of rows, page size, heads, window, scoring, type."""
    chance = random.Random(seed)
    lengths = [chance.choice([1, 5, 31, 64, 65, 150, 300]) for _ in range(6)]
    parent = [None] + [chance.choice([None, *range(n)]) for n in range(1, len(lengths))]

    def path(node: int | None) -> list[int]:
        return [] if node is None else [*path(parent[node]), node]

    rows = [
        (path(chance.choice([None, *range(len(lengths))])), chance.choice([1, 1, 1, 2, 5, 17, 70]))
        for _ in range(chance.randint(1, 10))
    ]
    kv_heads, group = chance.choice([(1, 1), (2, 1), (1, 3), (2, 4), (1, 8), (3, 5)])
    sinks = tuple(torch.randn(kv_heads * group) for _ in range(2))
    compare(
        NativeViews,
        plan_of(rows, lengths, chance.choice([0, 1, 3, 16]), seed),
        windows=(None, chance.randint(1, 200)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=chance.choice([16, 32, 64, 80]),
        kept=chance.choice([torch.float32, torch.bfloat16]),
        scoring=chance.choice([PLAIN, Scoring(scale=0.3), Scoring(softcap=5.0), Scoring(sinks=sinks)]),
    )


@compiled
@pytest.mark.parametrize("shape", ["many rows", "decodes of different lengths", "one prefill", "first token"])
def test_threads_share_the_tasks(shape: str) -> None:
    torch.set_num_threads(3)
    rows, lengths = PLANS[shape]
    compare(NativeViews, plan_of(rows, lengths, 0, seed=4), windows=(None, 50))


@compiled
def test_threads_that_it_cannot_start_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made.library(), "parallel", None)
    monkeypatch.setattr(made.library(), "attend", None)  # it would not be called
    torch.set_num_threads(2)
    rows, lengths = PLANS["many rows"]
    compare(NativeViews, plan_of(rows, lengths, 0, seed=4))


@compiled
def test_a_step_outlives_larger_passes_after_it() -> None:
    """Its tables and its working memory are its own."""
    rows, lengths = PLANS["shared prefix, decodes"]
    many = [([0, 1 + n % 5], 1) for n in range(60)]
    small, large = plan_of(rows, lengths, 1, seed=6), plan_of(many, lengths, 1, seed=6)
    attention, twin = (
        kind(KVShape(1, 2, 16, torch.float32, torch.device("cpu")), 2048, 4, (None,))
        for kind in (NativeViews, Reference)
    )
    attention.pool.kv.normal_()
    twin.pool.kv.copy_(attention.pool.kv)
    step, right = attention.begin(small), twin.begin(small)
    attention.begin(large)
    qkv = torch.randn(small.token_count, 8, 16)
    torch.testing.assert_close(step(0, qkv), right(0, qkv), atol=2e-5, rtol=2e-5)


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
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("= 1.0f / (l[r] + sink)", "= 1.01f / (l[r] + sink)"), ("/ (1.0f + NAME(exp)", "/ (1.1f + NAME(exp)")],
)
def test_wrong_numbers_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    anew: None,
    caplog: pytest.LogCaptureFixture,
    right: str,
    wrong: str,
) -> None:
    sources = {name: (source.FOLDER / name).read_text() for name in source.SOURCES}
    assert any(right in text for text in sources.values())
    for name, text in sources.items():
        (tmp_path / name).write_text(text.replace(right, wrong))
    monkeypatch.setattr(source, "FOLDER", tmp_path)
    monkeypatch.setattr(source, "FLAGS", QUICKLY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert made.library() is None
    assert "wrong numbers" in caplog.text


@compiled
def test_the_packages_own_is_taken_unless_it_is_another_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = made.library()
    assert library is not None
    for name in source.SOURCES:
        shutil.copy2(source.FOLDER / name, tmp_path)
    own = tmp_path / "built.abi3.so"
    shutil.copy(library.path, own)
    monkeypatch.setattr(source, "FOLDER", tmp_path)
    monkeypatch.setattr(source, "_compiled_here", lambda: None)
    found = made.library.__wrapped__()
    assert found is not None
    assert found.path == own
    with monkeypatch.context() as patch:
        patch.setattr(source, "VERSION", source.VERSION + 1)
        assert made.library.__wrapped__() is None
    os.utime(own, (1, 1))  # long before the source
    assert made.library.__wrapped__() is None


@compiled
def test_it_is_kept_for_its_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, anew: None) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(source, "FLAGS", QUICKLY)
    folder = tmp_path / "sglang-dsl" / "native"
    assert made.library() is not None
    (kept,) = folder.iterdir()
    before = kept.stat().st_mtime_ns
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    made.library.cache_clear()
    assert made.library() is not None
    assert kept.stat().st_mtime_ns == before
    folder.chmod(0o777)  # anybody may have put something there
    assert source.cache_folder() is None
    other = source._compiled_here()
    assert other is not None
    assert other.parent != folder


def test_what_it_cannot_compute_is_torchs() -> None:
    for changes in ({"dtype": torch.float16}, {"dtype": torch.float8_e5m2}, {"head_dim": 24}):
        shape: Any = KVShape(1, 2, 16, torch.float32, torch.device("cpu"))._replace(**changes)
        assert NativeViews(shape, 16, 4, (None,))._library is None

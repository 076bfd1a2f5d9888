"""How products go through their weights is measured once on a processor, and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.kernels.native import tuning
from runtime.kernels.native.library import library
from runtime.kernels.native.tuning import STEPS, Setting, fastest, settings, tune

compiled = pytest.mark.skipif(library() is None, reason="there is no C compiler")


class Native:
    """A library of which only the settings count."""

    def __init__(self, lanes: int = 8) -> None:
        self.lanes, self.tuned = lanes, set[int]()
        self.set: list[tuple[int, ...]] = []

    def set_product(self, *given: int) -> None:
        self.set.append(given)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The types that were measured: always the last setting is the fastest."""
    types: list[int] = []

    def measure(native: Any, size: int) -> list[Setting]:
        types.append(size)
        return [settings(native.lanes, step)[-1] for step in STEPS]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "_measured", measure)
    return types


def wanted(lanes: int, size: int) -> list[tuple[int, ...]]:
    return [(size, step.first, step.last, *settings(lanes, step)[-1]) for step in STEPS]


def test_each_type_is_measured_once_on_a_processor(measured: list[int]) -> None:
    first, later, wide = Native(), Native(), Native(lanes=16)
    for native in (first, first, later, wide, wide):
        for size in (4, 1):
            tune(native, size)  # type: ignore[arg-type]
    assert measured == [4, 1, 4, 1]  # by `first`, and by `wide`, which stands for another processor
    assert first.set == later.set == wanted(8, 4) + wanted(8, 1)
    assert wide.set == wanted(16, 4) + wanted(16, 1)


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", "[0, 0]", "[9, 9, 9, 9, 9, 9, 9]", '["a", 0, 0, 0, 0, 0, 0]']
)
def test_what_cannot_be_read_is_measured_again(measured: list[int], tmp_path: Path, text: str) -> None:
    tune(Native(), 2)  # type: ignore[arg-type]
    (file,) = (tmp_path / "sglang-dsl" / "native").iterdir()
    before = file.read_text()
    file.write_text(text)
    again = Native()
    tune(again, 2)  # type: ignore[arg-type]
    assert measured == [2, 2]
    assert again.set == wanted(8, 2)
    assert file.read_text() == before


def test_nothing_is_kept_where_others_can_write(measured: list[int], tmp_path: Path) -> None:
    folder = tmp_path / "sglang-dsl" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    for native in (Native(), Native()):
        tune(native, 4)  # type: ignore[arg-type]
        assert native.set == wanted(8, 4)
    assert measured == [4, 4]
    assert not list(folder.iterdir())


def test_the_first_setting_is_taken_where_none_is_clearly_faster() -> None:
    one, two, four = Setting(1, 1024, 8), Setting(2, 1024, 8), Setting(4, 1024, 8)
    assert fastest({one: 1000, two: 960, four: 990}) == one
    assert fastest({one: 1000, two: 900, four: 800}) == four
    assert fastest({one: 500, two: 1000, four: 1000}) == one
    assert fastest({one: 1_000_000, two: 0, four: 0}) == one  # a clock of milliseconds


def test_one_stream_is_measured_on_every_processor_and_is_the_first() -> None:
    for lanes in (4, 8, 16):
        for step in STEPS:
            assert settings(lanes, step)[0].streams == 1
    assert [step.first for step in STEPS[1:]] == [step.last + 1 for step in STEPS[:-1]]
    assert {setting.rows for step in STEPS for setting in settings(16, step)} == {6, 8}


@compiled
@pytest.mark.parametrize("size", [4, 2, 1])
def test_what_is_measured_is_one_of_the_settings(size: int) -> None:
    native = library()
    assert native is not None
    chosen = tuning._measured(native, size)
    assert all(one in settings(native.lanes, step) for one, step in zip(chosen, STEPS, strict=True))
    native.tuned.discard(size)
    tune(native, size)


@compiled
def test_summary(measured: list[int]) -> None:
    native = Native(lanes=library().lanes)  # type: ignore[union-attr]
    tune(native, 4)  # type: ignore[arg-type]
    assert tuning.summary().startswith("panels read at once from 1/2/3/5/7/9/17 rows on: float32 4/4/4/4/")
    assert "int8 not measured yet" in tuning.summary()
    assert measured == [4]

"""benchmarks/language.py runs, and what it shows that is no time holds for a few programs."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from benchmarks import language


@pytest.fixture(scope="module", autouse=True)
def _what_others_left_is_no_garbage() -> Iterator[None]:
    """It collects garbage before each measurement, which takes long among all that others have loaded."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_forks_take_no_threads() -> None:
    found = language.forks(300)
    # Fewer: one that an earlier test has left may come to its end.
    assert found["threads with all waiting"] <= found["threads before"]


@pytest.mark.parametrize("way", language.WAYS)
def test_every_program_makes_its_calls(way: str) -> None:
    whole, loop, own = language.per_program(way, 40, 1, at_once=8)
    assert whole > loop > 0
    assert own > 0


def test_it_writes_its_tables(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(language, "HERE", tmp_path)
    (tmp_path / "results").mkdir()
    monkeypatch.setattr("sys.argv", ["language.py", "--quick", "--write"])
    language.main()
    (written,) = (tmp_path / "results").glob("*-language.md")
    assert written.read_text() == capsys.readouterr().out
    rows = [line for line in written.read_text().splitlines() if line.startswith("| ")]
    assert sum(row.startswith(f"| {way} |") for row in rows for way in language.WAYS) == len(language.WAYS)
    assert any(row.startswith("| 200 |") for row in rows)

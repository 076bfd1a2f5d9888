"""benchmarks/language.py runs, and what it shows that is no time holds for a few programs."""

from __future__ import annotations

import pytest

from benchmarks import language


def test_forks_take_no_threads() -> None:
    found = language.forks(300)
    assert found["threads with all waiting"] == found["threads before"]


@pytest.mark.parametrize("way", language.WAYS)
def test_every_program_makes_its_calls(way: str) -> None:
    whole, own = language.per_program(way, 40, 1, at_once=8)
    assert whole > 0
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

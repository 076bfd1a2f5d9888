"""benchmarks/grammars/jump_forward.py runs, and what it shows holds for a few cases."""

from __future__ import annotations

import re

import pytest

from benchmarks.grammars import jump_forward


def test_quick(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_DSL_DATA", raising=False)
    assert jump_forward.main(["--quick"]) == 0
    said = capsys.readouterr().out
    shares = re.findall(r"\| pocket \| (\d+) \| (\d+) \| ([\d.]+)% \| [\d.]+x \| (\d+)/(\d+) \| 0 \|", said)
    assert len(shares) == 3
    for texts, _, forced, canonical, of in shares:
        assert texts == canonical == of
        assert float(forced) > 70
    same = re.search(r"\| (\d+) \| (\d+)/\1 \| (\d+)/\1 \|", said.split("## With jumps and without")[1])
    assert same is not None
    assert same[1] == same[2] == same[3]
    assert re.search(r"\| pocket \| 1 \| jumps .* 1/1 \|", said)

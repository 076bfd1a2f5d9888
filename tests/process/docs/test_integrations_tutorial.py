"""The page about other libraries: its Python runs as printed, each library's in a process of its own."""

from __future__ import annotations

from pathlib import Path

from sglang_dsl import integrations
from sglang_dsl.integrations import pytest_plugin

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "tutorials" / "integrations.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0].strip(): part for part in PAGE.split("\n## ")}
FIRST, LIGHT = "# Other libraries", ("Types of outlines", "Rows of pandas and datasets", "LangChain")
HEAVY = ("LlamaIndex", "lm-evaluation-harness")
"""Executed with the other clients that have packages of their own."""


def test_every_part_is_on_the_page() -> None:
    assert set(SECTIONS) == {FIRST, *LIGHT, *HEAVY, "DSPy", "pytest"}
    for name in integrations._LATE.names():
        assert f"`{name}" in PAGE
    for name in ("sgl_mock", "sgl_recorded", "sgl_record_backend"):
        assert f"def {name}(" in Path(pytest_plugin.__file__).read_text(encoding="utf-8")
        assert f"`{name}`" in PAGE

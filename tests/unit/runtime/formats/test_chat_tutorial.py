"""The Python of the chat formats tutorial runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

from runtime.formats.chat.families import FAMILIES
from runtime.formats.chat.registry import BUILT_IN

PAGE = Path(__file__).parents[4] / "tutorials" / "chat_formats.md"


def test_the_tutorial_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 4
    exec("\n".join(blocks), {"__name__": "tutorial"})


def test_the_numbers_on_the_front_pages() -> None:
    root = PAGE.parents[1]
    assert f"{len(BUILT_IN)} built-in templates" in (root / "README.md").read_text(encoding="utf-8")
    said = f"{len(BUILT_IN)} templates in {len(FAMILIES)} families"
    assert said in (root / "CHANGELOG.md").read_text(encoding="utf-8")

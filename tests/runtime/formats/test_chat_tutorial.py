"""The Python of the chat formats tutorial runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "tutorials" / "chat_formats.md"


def test_the_tutorial_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 4
    exec("\n".join(blocks), {"__name__": "tutorial"})

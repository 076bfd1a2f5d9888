"""Pages of the documentation: their blocks of Python, and what these print."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import sys
from pathlib import Path

import sglang_dsl as sgl
from runtime.api import Engine

BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
"""A block of Python, and what it prints."""
_ENGINE = re.compile(r'(?:sgl\.)?\bEngine\("pocket"\)')
_MARK = "\x1e"


def printed(page: str, engine: Engine, folder: Path) -> list[str]:
    """What each block prints, when all run in order, as one program, on this engine."""
    blocks = [block for block, _ in BLOCK.findall(page)]
    code = f"\nprint({_MARK!r}, end='')\n".join(blocks)
    file = folder / "page.py"
    code = code.replace('__name__ == "__main__"', '__name__ == "page"')
    file.write_text(_ENGINE.sub("ENGINE", code), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("page", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(ENGINE=engine)
    sys.modules[spec.name] = module
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            spec.loader.exec_module(module)
    finally:
        sgl.set_default_backend(None)
        del sys.modules[spec.name]
    return said.getvalue().split(_MARK)

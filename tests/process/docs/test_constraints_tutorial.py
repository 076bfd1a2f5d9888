"""The tutorial on constraints: its Python runs as printed, and the names it gives are those of the code."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any, get_args

from runtime.config.engine import EngineConfig
from runtime.protocol.constraint import SchemaFormat, Whitespace
from runtime.protocol.sampling import CONSTRAINT_KEYS
from runtime.server.output_format import OutputFields, ResponseFormat, StructuredOutputs
from sglang_dsl import gen
from tests.process.patience import PROGRAM_S

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "tutorials" / "constraints.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:30000"


def test_the_python_runs_as_printed(tmp_path: Path, shared_server: Any) -> None:
    python = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(python) > 7
    file = tmp_path / "page.py"
    file.write_text("\n".join(python).replace(ADDRESS, shared_server.url), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=PROGRAM_S, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


def test_it_names_every_word_and_no_other() -> None:
    words = set(re.findall(r"`([a-z_]+)=`", PAGE))
    assert words <= set(inspect.signature(gen).parameters)
    assert {"regex", "json_schema", "ebnf", "structural_tag", "choices", "dtype", "whitespace"} <= words
    for name in (*CONSTRAINT_KEYS, *OutputFields.__struct_fields__, *StructuredOutputs.__struct_fields__):
        assert f"`{name}" in PAGE
    for name in get_args(typing.get_type_hints(ResponseFormat)["type"]):
        assert name == "text" or f"`{name}`" in PAGE
    for policy in (*get_args(Whitespace), *get_args(SchemaFormat)):
        assert f'`"{policy}"`' in PAGE
    config = EngineConfig()
    assert f'`--grammar-whitespace`, which is `"{config.grammar_whitespace}"` unless' in PAGE
    assert f'`--grammar-schema-format`, which is `"{config.grammar_schema_format}"` unless' in PAGE

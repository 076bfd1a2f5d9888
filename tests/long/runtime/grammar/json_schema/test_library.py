"""The jsonschema library without the grammar that rfc3987-syntax reads when it is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import runtime.server.worker
import runtime.grammar.backends.llguidance_backend
from runtime.grammar.json_schema.checks.validators import jsonschema

assert not [name for name in sys.modules if name.startswith("rfc3987_syntax")]
checker = jsonschema.FormatChecker()
assert checker.conforms("http://ex\u00e4mple.org/a", "iri")
assert not checker.conforms("no iri", "iri")
assert checker.conforms("//a/b", "iri-reference")
import rfc3987_syntax
assert rfc3987_syntax.is_valid_syntax_iri("http://a.b")
"""


def test_formats_are_read_when_one_is_checked() -> None:
    pytest.importorskip("rfc3987_syntax")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

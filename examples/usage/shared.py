"""Which backend the programs of this folder run on: the bundled engine in this process, or what is named on
the command line (an address of a server, "mock", "engine").

    python examples/usage/chat.py
    python examples/usage/chat.py http://127.0.0.1:30000
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from sglang_dsl.backends import as_backend


def backend(argv: Sequence[str] | None = None) -> Any:
    given = sys.argv[1:] if argv is None else list(argv)
    return as_backend(given[0] if given else "engine")

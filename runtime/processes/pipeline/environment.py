"""What child processes inherit of the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

KEYS = frozenset({"SGLANG_DSL_API_KEY", "SGLANG_DSL_ADMIN_API_KEY"})


def for_children(environment: Mapping[str, str]) -> dict[str, str]:
    """No key, and a way to find this package wherever it was found."""
    made = {name: value for name, value in environment.items() if name not in KEYS}
    root = Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        made["PYTHONPATH"] = os.pathsep.join(
            part for part in (environment.get("PYTHONPATH"), str(root)) if part
        )
    return made

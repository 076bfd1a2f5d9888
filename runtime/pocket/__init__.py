"""The bundled `pocket` checkpoint: where it lies on disk.

Importing it loads nothing else. The weights were trained by `examples/pocket` of the source repository.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["path"]


def path() -> Path:
    """The folder of the bundled checkpoint, in Hugging Face layout."""
    return Path(__file__).resolve().parent / "checkpoint"

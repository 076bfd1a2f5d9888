"""The bundled `pocket` checkpoint: where it lies on disk.

Knows nothing about torch, tokenizers or how the weights were made (see `train.py` for that);
importing it costs nothing.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["path"]


def path() -> Path:
    """The folder of the bundled checkpoint, in Hugging Face layout."""
    return Path(__file__).resolve().parent / "checkpoint"

"""The fixtures of tests/unit/runtime/lora."""

from tests.unit.runtime.lora.conftest import _one_thread, case, drive, make, prompt, tiny

__all__ = ["_one_thread", "case", "drive", "make", "prompt", "tiny"]

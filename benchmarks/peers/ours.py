"""This project's Engine under the same interface as its peers."""

from __future__ import annotations

from pathlib import Path

from runtime.api import Engine
from runtime.protocol.sampling import SamplingParams


class Ours:
    name = "sglang-dsl"

    def __init__(self, folder: Path, threads: int) -> None:
        self.engine = Engine(str(folder), dtype="float32", max_total_tokens=16_384, threads=threads)

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        return [list(out.output_ids) for out in self.engine.generate(prompts, sampling)]

    def forget(self) -> None:
        """Every round starts with an empty prefix cache."""
        self.engine.flush_cache()

    def close(self) -> None:
        self.engine.close()

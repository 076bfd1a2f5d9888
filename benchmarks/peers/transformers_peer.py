"""transformers' `generate`, as people use it: one batch of equal lengths, a dynamic cache."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from adapter import Unsupported, serve


class Transformers:
    shares = False

    def __init__(self, folder: Path, precision: str, threads: int) -> None:
        if precision == "int8":
            raise Unsupported("no int8 on the CPU of its own")
        torch.set_num_threads(threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=precision).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self.version = transformers.__version__

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens,
                min_new_tokens=new_tokens, do_sample=False,
            )  # fmt: skip
        found: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return found

    def forget(self) -> None:
        """It keeps nothing between calls."""


if __name__ == "__main__":
    serve(Transformers)

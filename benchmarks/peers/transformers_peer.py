"""The peer: transformers' `generate`, as people use it (dynamic cache, batches of equal lengths)."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class TransformersPeer:
    name = "transformers"

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
            )
        return out[:, ids.shape[1] :].tolist()

    def forget(self) -> None:
        """It keeps nothing between calls."""

    def close(self) -> None:
        del self.model

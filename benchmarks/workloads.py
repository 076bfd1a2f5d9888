"""The workloads and the model they run on. Knows no engine.

The model is a random Llama of 40.0 M parameters (hidden 512, 8 layers, 8 heads / 4 KV heads, ffn 1408,
vocabulary 32,000, tied embeddings): speed does not depend on the weights. Its tokenizer has one token
per byte, since all prompts are given as ids.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

VOCAB = 32_000


@dataclass(frozen=True)
class Workload:
    """`prompts` arrive at once; each is continued by exactly `new_tokens` greedy tokens.

    `counted`: what the rate counts, generated tokens or prompt tokens.
    """

    name: str
    prompts: list[list[int]]
    new_tokens: int
    counted: str = "generated"

    @property
    def tokens(self) -> int:
        if self.counted == "generated":
            return len(self.prompts) * self.new_tokens
        return sum(map(len, self.prompts))


def workloads(seed: int = 0) -> list[Workload]:
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(256, VOCAB) for _ in range(count)]

    prefix = ids(1000)
    return [
        Workload("single: 32 + 128", [ids(32)], 128),
        Workload("batch 8: 8 x (32 + 64)", [ids(32) for _ in range(8)], 64),
        Workload("prefill: 1,024 + 1", [ids(1024)], 1, counted="prompt"),
        Workload("shared: 64 x (1,000 shared + 8 own + 16)", [prefix + ids(8) for _ in range(64)], 16),
    ]


def make_model(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint into `folder` (once) and return it."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=255,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder

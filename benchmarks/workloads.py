"""The workloads and the model they run on. Knows no engine.

The models are random Llamas of 40.0 M parameters (hidden 512, 8 layers, 8 heads / 4 KV heads, ffn 1408,
vocabulary 32,000, tied embeddings) and of 303 M (hidden 1024, 24 layers, 16 heads / 4 KV heads, ffn 2816):
speed does not depend on the weights. Their tokenizer has one token per byte, since all prompts are given as
ids.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

VOCAB = 32_000


@dataclass(frozen=True)
class Workload:
    """`prompts` arrive at once; each is continued by exactly `new_tokens` greedy tokens.

    counted  what the rate counts, generated tokens or prompt tokens
    shared   how many tokens all prompts begin with
    lead     the first is sent alone, the others when it is done, as users of engines do that share only what
             is complete
    """

    name: str
    prompts: list[list[int]]
    new_tokens: int
    counted: str = "generated"
    shared: int = 0
    lead: bool = False

    @property
    def tokens(self) -> int:
        if self.counted == "generated":
            return len(self.prompts) * self.new_tokens
        return sum(map(len, self.prompts))


def workloads(seed: int = 0) -> list[Workload]:
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(256, VOCAB) for _ in range(count)]

    def several(count: int, length: int) -> list[list[int]]:
        return [ids(length) for _ in range(count)]

    prefix = ids(1000)
    shared = [prefix + own for own in several(64, 8)]
    return [
        Workload("single", several(1, 32), 64),
        Workload("batch 8", several(8, 32), 64),
        Workload("batch 32", several(32, 32), 32),
        Workload("batch 64", several(64, 32), 32),
        Workload("32 long contexts", several(32, 500), 16),
        Workload("prefill", several(1, 1024), 1, counted="prompt"),
        Workload("64 sharing, one first", shared, 16, shared=1000, lead=True),
        Workload("64 sharing 1,000", shared, 16, shared=1000),
    ]


SHAPES = {
    "40m": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8},
    "300m": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
}


def make_model(folder: Path, seed: int = 0, size: str = "40m") -> Path:
    """Write the checkpoint into `folder` (once) and return it."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        **SHAPES[size],
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=255,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer(folder)
    return folder


def byte_tokenizer(folder: Path) -> None:
    """Write one whose tokens are single bytes into `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))

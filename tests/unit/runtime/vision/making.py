"""Tiny checkpoints of the families that take pictures, random weights in transformers' layout, and what
transformers makes of the same prompt."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
IM_START, IM_END, VISION_START, VISION_END, PAD, VIDEO = range(len(LETTERS), len(LETTERS) + 6)
MARKS = {
    "<|im_start|>": IM_START, "<|im_end|>": IM_END, "<|vision_start|>": VISION_START,
    "<|vision_end|>": VISION_END, "<|image_pad|>": PAD, "<|video_pad|>": VIDEO,
}  # fmt: skip
VOCAB = len(LETTERS) + len(MARKS)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen2.5-VL's, without its default system prompt and videos."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "bos_token_id": None, "eos_token_id": IM_END, "rope_parameters": ROPE,
}  # fmt: skip
TOWERS: dict[str, dict[str, Any]] = {
    "Qwen2_5_VL": {
        "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
        "fullatt_block_indexes": [1], "window_size": 56,
    },
    "Qwen2VL": {"depth": 2, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 2, "hidden_size": 64},
}  # fmt: skip
PIXELS = (28 * 28, 28 * 28 * 40)
"""Of a picture, at least and at most."""


@dataclass
class Case:
    """A checkpoint, and the same weights in transformers. fed: counts the tower's runs there."""

    path: Path
    model: Any
    processor: Any = field(default_factory=lambda: Qwen2VLImageProcessorPil(
        size={"shortest_edge": PIXELS[0], "longest_edge": PIXELS[1]}
    ))  # fmt: skip

    def pixels(self, pictures: Sequence[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
        """[patches, numbers] and [pictures, 3]: time, rows and columns of patches."""
        made = self.processor(images=list(pictures), return_tensors="pt")
        return made["pixel_values"], made["image_grid_thw"]

    def inputs(self, ids: Sequence[int], pictures: Sequence[Image.Image]) -> dict[str, Any]:
        """What the model is called with; `ids` have one PAD for each picture."""
        if not pictures:
            whole = torch.tensor([list(ids)])
            return {"input_ids": whole, "mm_token_type_ids": torch.zeros_like(whole)}
        values, grids = self.pixels(pictures)
        counts = iter((grids.prod(-1) // 4).tolist())
        long = [one for token in ids for one in ([token] if token != PAD else [PAD] * next(counts))]
        whole = torch.tensor([long])
        return {
            "input_ids": whole,
            "pixel_values": values,
            "image_grid_thw": grids,
            "mm_token_type_ids": (whole == PAD).int(),
        }

    def logits(self, ids: Sequence[int], pictures: Sequence[Image.Image] = ()) -> torch.Tensor:
        """[tokens, vocab]"""
        with torch.inference_mode():
            return self.model(**self.inputs(ids, pictures)).logits[0].clone()

    def greedy(self, ids: Sequence[int], pictures: Sequence[Image.Image], count: int) -> list[int]:
        """The `count` most probable next tokens, one after the other."""
        found: list[int] = []
        self.model.model.rope_deltas = None  # it keeps those of the prompt before
        with torch.inference_mode():
            out = self.model(**self.inputs(ids, pictures), use_cache=True)
            while True:
                best = out.logits[:, -1:].argmax(-1)
                found.append(int(best))
                if len(found) == count:
                    return found
                out = self.model(input_ids=best, past_key_values=out.past_key_values, use_cache=True)


def make(
    path: Path, family: str = "Qwen2_5_VL", *, layout: str = "old", tied: bool = False, seed: int = 0
) -> Case:
    """layout: of the tensors' names: old, as published; new, as transformers holds them."""
    config = getattr(transformers, f"{family}Config")(
        text_config={**TEXT, "tie_word_embeddings": tied}, vision_config=TOWERS[family],
        image_token_id=PAD, video_token_id=VIDEO, vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END, tie_word_embeddings=tied,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(len(family) + seed)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.normal_(mean=1.0 if "norm" in name or "ln_q" in name else 0.0, std=0.2)
            else:
                weight.normal_(std=1.0 if "embed_tokens" in name else 0.05 if "patch" in name else 0.2)
    model.save_pretrained(path)
    if layout == "new":
        held = load_file(path / "model.safetensors")
        renamed = {re.sub("^model[.]", "model.language_model.", name): one for name, one in held.items()}
        renamed = {re.sub("^visual[.]", "model.visual.", name): one for name, one in renamed.items()}
        assert renamed.keys() != held.keys()
        save_file(renamed, path / "model.safetensors", {"format": "pt"})
    processor = {"min_pixels": PIXELS[0], "max_pixels": PIXELS[1], "patch_size": 14, "merge_size": 2}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    with_tokenizer(path)
    return Case(path, model)


def with_tokenizer(path: Path) -> None:
    """One token for each byte, and the marks."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in MARKS])
    assert [tokenizer.token_to_id(text) for text in MARKS] == list(MARKS.values())
    tokenizer.save(str(path / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(told))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Of noise that is the same for the same seed."""
    draw = np.random.default_rng(seed)
    small = Image.fromarray(draw.integers(0, 256, (9, 9, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BILINEAR)


def png(one: Image.Image) -> bytes:
    held = io.BytesIO()
    one.save(held, format="PNG")
    return held.getvalue()


def ids_of(text: str) -> list[int]:
    """Of a text with marks in it."""
    parts = re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text)
    tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found: list[int] = []
    for part in parts:
        if part in MARKS:
            found.append(MARKS[part])
        elif part:
            found += [LETTERS.index(one) for piece, _ in tokenizer.pre_tokenize_str(part) for one in piece]
    return found


def data_url(one: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(one)).decode()}"

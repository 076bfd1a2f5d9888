"""Trains the byte-level BPE tokenizer of the pocket model and writes its Hugging Face files.

Words that begin with a capital letter never carry their leading space, so a name has the same
tokens in running text and inside JSON quotes; that makes copying it easy for a tiny model.
Knows the special tokens, not the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.pocket.chat import CHAT_TEMPLATE

__all__ = ["SPECIAL", "TAGS", "train_tokenizer", "write_tokenizer"]

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# Capitalised words alone; other words and punctuation with one leading space; digits and spaces singly.
_PATTERN = r"\p{Lu}\p{L}*| ?(?!\p{Lu})\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s"


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A tokenizer with `vocab` entries in all, special tokens first and tags next."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(t, special=True, normalized=False) for t in SPECIAL]
    added += [AddedToken(t, special=False, normalized=False) for t in TAGS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=added,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The trainer marks all of its `special_tokens` special; the tags are ordinary text, as in Qwen3.
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(data))


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    decoder = {
        str(tokenizer.token_to_id(t)): {
            "content": t,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": t in SPECIAL,
        }
        for t in SPECIAL + TAGS
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        **names,
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": ["<|im_start|>"],
        "added_tokens_decoder": decoder,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    extra = {**names, "additional_special_tokens": ["<|im_start|>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(extra, indent=2) + "\n")

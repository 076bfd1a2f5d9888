"""A GGUF file's vocabulary as a tokenizer.json and a tokenizer_config.json.

Two kinds are supported: byte-level byte pair encoding ("gpt2": tokens and merges), and SentencePiece's byte
pair encoding ("llama": tokens and scores, which determine the merges).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.config.fields import Fields
from runtime.config.gguf.header import Header

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "smollm": (r"\p{N}", _GPT2),
}
"""tokenizer.ggml.pre -> the patterns that split a text into words, applied in order."""
_SPACE = "\u2581"


def tokenizer(header: Header) -> tuple[dict[str, Any], dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json. Raises ModelLoadError."""
    fields = header.fields
    tokens = list(fields.names("tokenizer.ggml.tokens"))
    kinds = fields.values.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if not tokens or len(kinds) != len(tokens):
        raise fields.fail(f"has {len(tokens)} tokens but {len(kinds)} token types")
    model = fields.text("tokenizer.ggml.model", "")
    match model:
        case "gpt2":
            parts = _byte_level(fields, tokens)
        case "llama":
            parts = _sentence_piece(fields, tokens, kinds)
        case _:
            raise fields.fail(
                f"the vocabulary {model!r} is not supported; known: gpt2, llama",
                "put the model's tokenizer.json and tokenizer_config.json beside the file",
            )
    added = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for number, (token, kind) in enumerate(zip(tokens, kinds))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    begins = fields.flag("tokenizer.ggml.add_bos_token", model == "llama")
    bos = fields.values.get("tokenizer.ggml.bos_token_id")
    config = _config(fields, tokens, begins)
    post = _begins_with(tokens[bos], bos) if begins and type(bos) is int and bos < len(tokens) else None
    data = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return {**data, **parts, "post_processor": post}, config


def _config(fields: Fields, tokens: Sequence[str], begins: bool) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": begins}
    for short, name in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token")):
        number = fields.values.get(f"tokenizer.ggml.{short}_token_id")
        if type(number) is int and number < len(tokens):
            config[name] = tokens[number]
    padding = fields.values.get("tokenizer.ggml.padding_token_id")
    if type(padding) is int and padding < len(tokens):
        config["pad_token"] = tokens[padding]
    if fields.has("tokenizer.chat_template"):
        config["chat_template"] = fields.text("tokenizer.chat_template")
    return config


def _begins_with(token: str, number: int) -> dict[str, Any]:
    def piece(kind: str, name: str) -> dict[str, Any]:
        return {kind: {"id": name, "type_id": 0}}

    start = piece("SpecialToken", token)
    return {
        "type": "TemplateProcessing",
        "single": [start, piece("Sequence", "A")],
        "pair": [start, piece("Sequence", "A"), start, piece("Sequence", "B")],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _model(tokens: Sequence[str], merges: Sequence[Sequence[str]], **changes: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": merges,
        **changes,
    }


def _byte_level(fields: Fields, tokens: Sequence[str]) -> dict[str, Any]:
    kind = fields.text("tokenizer.ggml.pre", "gpt-2")
    if kind not in SPLITS:
        raise fields.fail(
            f"the pre-tokenizer {kind!r} is not supported; known: {', '.join(SPLITS)}",
            "put the model's tokenizer.json and tokenizer_config.json beside the file",
        )
    cuts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in SPLITS[kind]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    merges = [line.split(" ", 1) for line in fields.names("tokenizer.ggml.merges")]
    return {
        # Only Qwen's tokenizers normalise.
        "normalizer": {"type": "NFC"} if SPLITS[kind] == (_QWEN2,) else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, byte_level]},
        "decoder": byte_level,
        # Llama 3 uses a token for a whole word if there is one, ignoring the merges.
        "model": _model(tokens, merges, ignore_merges=SPLITS[kind] == (_LLAMA3,)),
    }


def _sentence_piece(fields: Fields, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    scores = fields.values.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise fields.fail(f"has {len(tokens)} tokens but {len(scores)} scores")
    unknown = next((token for token, kind in zip(tokens, kinds) if kind == UNKNOWN), None)
    spaces = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    front = fields.flag("tokenizer.ggml.add_space_prefix", True)
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if front else []
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": _SPACE}] if front else []), *spaces],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": _model(
            tokens,
            _merges(tokens, kinds, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in kinds,
        ),
    }


def _merges(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours that form the token with the highest score. So the merges of a
    token are all its splits into two tokens, in the order of scores."""
    numbers = {token: number for number, token in enumerate(tokens) if kinds[number] == NORMAL}
    merges: list[tuple[float, int, int, int, str, str]] = []
    for token, number in numbers.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in numbers and right in numbers:
                key = (-scores[number], number, numbers[left], numbers[right])
                merges.append((*key, left, right))
    return [(left, right) for *_, left, right in sorted(merges)]

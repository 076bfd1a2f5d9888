"""A GGUF file's vocabulary as a tokenizer.json and a tokenizer_config.json.

Two kinds are supported: byte-level byte pair encoding ("gpt2": tokens and merges), and SentencePiece's byte
pair encoding ("llama": tokens and scores, which determine the merges).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from runtime.config.fields import Fields
from runtime.config.gguf.header import Header
from runtime.protocol.errors import ModelLoadError

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
_HINT = "put the model's tokenizer.json and tokenizer_config.json beside the file"


def tokenizer(header: Header) -> tuple[dict[str, Any], dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json. Raises ModelLoadError."""
    fields = header.fields
    tokens = list(fields.names("tokenizer.ggml.tokens"))
    kinds = fields.values.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if not tokens or len(kinds) != len(tokens):
        raise fields.fail(f"has {len(tokens)} tokens but {len(kinds)} token types")
    model = fields.text("tokenizer.ggml.model", "")
    try:
        match model:
            case "gpt2":
                converted = _byte_level(fields, tokens)
            case "llama":
                converted = _sentence_piece(fields, tokens, kinds)
            case _:
                raise fields.fail(f"the vocabulary {model!r} is not supported; known: gpt2, llama", _HINT)
        for special, meant in ((True, (UNKNOWN, CONTROL)), (False, (USER_DEFINED,))):
            texts = [token for token, kind in zip(tokens, kinds) if kind in meant]
            added = [AddedToken(text, normalized=False, special=special) for text in texts]
            (converted.add_special_tokens if special else converted.add_tokens)(added)
        begins = fields.flag("tokenizer.ggml.add_bos_token", model == "llama")
        bos = fields.values.get("tokenizer.ggml.bos_token_id")
        if begins and type(bos) is int and bos < len(tokens):
            converted.post_processor = processors.TemplateProcessing(
                single=[tokens[bos], "$A"],
                pair=[tokens[bos], "$A", tokens[bos], "$B"],
                special_tokens=[(tokens[bos], bos)],
            )
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise fields.fail(f"has a vocabulary that cannot be used: {error}", _HINT) from error
    return json.loads(converted.to_str()), _config(fields, tokens, begins)


def _config(fields: Fields, tokens: Sequence[str], begins: bool) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": begins}
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    for short, name in names.items():
        number = fields.values.get(f"tokenizer.ggml.{short}_token_id")
        if type(number) is int and number < len(tokens):
            config[name] = tokens[number]
    if fields.has("tokenizer.chat_template"):
        config["chat_template"] = fields.text("tokenizer.chat_template")
    return config


def _byte_level(fields: Fields, tokens: Sequence[str]) -> Tokenizer:
    kind = fields.text("tokenizer.ggml.pre", "gpt-2")
    if kind not in SPLITS:
        raise fields.fail(f"the pre-tokenizer {kind!r} is not supported; known: {', '.join(SPLITS)}", _HINT)
    merges = [tuple(line.split(" ", 1)) for line in fields.names("tokenizer.ggml.merges")]
    # Llama 3 uses a token for a whole word if there is one, ignoring the merges.
    converted = Tokenizer(models.BPE(_numbers(tokens), merges, ignore_merges=SPLITS[kind] == (_LLAMA3,)))
    if SPLITS[kind] == (_QWEN2,):  # only Qwen's tokenizers normalise
        converted.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[kind]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    converted.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    converted.decoder = decoders.ByteLevel()
    return converted


def _sentence_piece(fields: Fields, tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    scores = fields.values.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise fields.fail(f"has {len(tokens)} tokens but {len(scores)} scores")
    unknown = next((token for token, kind in zip(tokens, kinds) if kind == UNKNOWN), None)
    merges = _merges(tokens, kinds, scores)
    converted = Tokenizer(
        models.BPE(_numbers(tokens), merges, unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in kinds)
    )
    front = fields.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    converted.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces] if front else [spaces])
    converted.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if front else []),
        ]
    )
    return converted


def _numbers(tokens: Sequence[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


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

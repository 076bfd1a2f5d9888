"""The bytes of every id of a `tokenizer.json`, without a tokenizer library: byte-level, as in GPT-2, or as in
SentencePiece (`▁` for a space, `<0xE2>` for a byte without its own piece).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from runtime.protocol.errors import ModelLoadError
from runtime.protocol.vocabulary import Vocabulary

_FILE = "tokenizer.json"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def vocabulary_from_tokenizer(
    tokenizer_json: Mapping[str, Any], *, vocab_size: int, eos: Iterable[int]
) -> Vocabulary:
    """The vocabulary of a parsed `tokenizer.json` for a model with `vocab_size` logits.

    Special added tokens, the unknown token, the ids of `eos` and ids without a token are `special` and
    stand for no text; other added tokens keep theirs. Raises ModelLoadError for a kind of tokenizer that is
    not known, a malformed file, or ids that the model does not have.
    """
    model = _object(tokenizer_json, "model")
    spell = _spelling(tokenizer_json, model)
    pieces = dict(_pieces(model))
    tokens: dict[int, bytes] = {number: spell(piece) for piece, number in pieces.items()}
    special = {number for number in (_unknown(model, pieces),) if number is not None}
    for added in tokenizer_json.get("added_tokens") or ():
        number, content = added.get("id"), added.get("content")
        if not isinstance(number, int) or not isinstance(content, str):
            raise ModelLoadError(f"added token {added!r} lacks an id or its content", where=_FILE)
        tokens[number] = content.encode("utf-8")
        if added.get("special"):
            special.add(number)
    ends = frozenset(eos)
    width = max(tokens, default=-1) + 1
    if width > vocab_size:
        raise ModelLoadError(
            f"the tokenizer has ids up to {width - 1} ({width} entries), the model only {vocab_size} logits",
            where=_FILE,
            hint="the tokenizer and the model do not belong together",
        )
    if out := sorted(number for number in ends | special if not 0 <= number < vocab_size):
        raise ModelLoadError(f"ids {out} are outside of the model's {vocab_size} logits", where=_FILE)
    special |= ends | (set(range(vocab_size)) - tokens.keys())
    return Vocabulary(
        tuple(b"" if number in special else tokens[number] for number in range(vocab_size)),
        special=frozenset(special),
        eos=ends,
    )


def vocabulary_from_file(path: Path, *, vocab_size: int, eos: Iterable[int]) -> Vocabulary:
    """vocabulary_from_tokenizer for the file at `path`. Raises ModelLoadError."""
    try:
        data = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ModelLoadError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"is not a JSON object: {error}", where=str(path)) from None
    return vocabulary_from_tokenizer(data, vocab_size=vocab_size, eos=eos)


def _pieces(model: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(piece, id) of the model's own vocabulary."""
    match model.get("type", "BPE" if "merges" in model else None), model.get("vocab"):
        case "BPE", Mapping() as vocab:
            yield from vocab.items()
        case "Unigram", list() as vocab:
            yield from ((entry[0], number) for number, entry in enumerate(vocab))
        case ("BPE" | "Unigram") as kind, _:
            raise ModelLoadError(f"the {kind} model has no usable vocabulary", where=_FILE)
        case kind, _:
            raise _unknown_kind(f"model type {kind!r}")


def _unknown(model: Mapping[str, Any], pieces: Mapping[str, int]) -> int | None:
    """The id of the unknown token: it stands for no certain text."""
    if model.get("type") == "Unigram":
        number = model.get("unk_id")
        return number if isinstance(number, int) else None
    return pieces.get(model.get("unk_token") or "")


def _spelling(tokenizer: Mapping[str, Any], model: Mapping[str, Any]) -> Callable[[str], bytes]:
    """How a piece of this tokenizer spells bytes."""
    if model.get("type", "BPE") not in ("BPE", "Unigram"):
        raise _unknown_kind(f"model type {model.get('type')!r}")
    steps = [*_steps(tokenizer.get("decoder")), *_steps(tokenizer.get("pre_tokenizer"))]
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    spaces = any(step.get("type") == "Replace" and step.get("pattern") == {"String": "▁"} for step in steps)
    if "Metaspace" in kinds or spaces or model.get("byte_fallback"):
        return (
            _sentencepiece_bytes if model.get("byte_fallback") or "ByteFallback" in kinds else _sentencepiece
        )
    raise _unknown_kind(
        f"decoder {sorted(str(kind) for kind in kinds) or None} for a {model.get('type')} model"
    )


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """A decoder or pre-tokenizer, and what is nested in it."""
    if isinstance(part, Mapping):
        yield part
        for nested in (*part.get("decoders", ()), *part.get("pretokenizers", ())):
            yield from _steps(nested)


def _unknown_kind(what: str) -> ModelLoadError:
    return ModelLoadError(
        f"unknown kind of tokenizer: {what}",
        where=_FILE,
        hint="known are byte-level BPE, and BPE or Unigram in the manner of SentencePiece",
    )


def _object(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = data.get(name)
    if not isinstance(value, Mapping):
        raise ModelLoadError(f"has no {name!r} object", where=_FILE)
    return value


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {
        chr(256 + n): value for n, value in enumerate(others)
    }


def _byte_level(piece: str) -> bytes:
    table = _byte_of_char()
    try:
        return bytes([table[char] for char in piece])
    except KeyError:  # a piece that was added as plain text
        return piece.encode("utf-8")


def _sentencepiece(piece: str) -> bytes:
    return piece.replace("▁", " ").encode("utf-8")


def _sentencepiece_bytes(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else _sentencepiece(piece)

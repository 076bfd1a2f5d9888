"""Tokenizer: a checkpoint's tokenizer.json, text -> ids and ids -> text. TextTable: the bytes of each id."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from runtime.config.fields import Fields
from runtime.formats.chat.control import acts_as_control, narrow
from runtime.grammar.masks.vocabulary_bytes import vocabulary_from_tokenizer
from runtime.protocol.errors import ModelLoadError
from runtime.protocol.vocabulary import Vocabulary

LONG = 4_000
"""Characters, or ids, from which encoding and decoding release the interpreter's lock. Event loops run such
work in another thread."""
_LOSSY = 1024
_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TextTable:
    """What each id adds to a text, and the rules of the tokenizer's decoder.

    special       control ids and their text; left out of texts unless skip_special_tokens is off
    each_byte     a broken character becomes one U+FFFD per byte (sentencepiece) instead of one in all
    lead_spaces   how many spaces are dropped at the beginning of a text
    lead_token    all spaces of a text's first token are dropped
    """

    vocabulary: Vocabulary
    special: Mapping[int, bytes]
    each_byte: bool = False
    lead_spaces: int = 0
    lead_token: bool = False

    @classmethod
    def from_decoder(cls, decoder: Any, vocabulary: Vocabulary, special: Mapping[int, str]) -> TextTable:
        """`decoder`: the "decoder" of a tokenizer.json."""
        parts = list(_parts(decoder))
        kinds = {part.get("type") for part in parts}
        strips = [part for part in parts if part.get("type") == "Strip" and part.get("content") == " "]
        spaced = [part for part in parts if part.get("type") == "Metaspace"]
        return cls(
            vocabulary,
            {token: text.encode() for token, text in special.items()},
            each_byte="ByteFallback" in kinds,
            lead_spaces=max((int(part.get("start", 0)) for part in strips), default=0),
            lead_token=any(_prepends(part) for part in spaced),
        )

    def bytes_of(self, ids: Sequence[int], skip_special_tokens: bool) -> list[bytes]:
        """One entry per id."""
        tokens = self.vocabulary.tokens
        known = len(tokens)
        pieces: list[bytes] = []
        for token in ids:
            control = self.special.get(token)
            if control is not None:
                pieces.append(b"" if skip_special_tokens else control)
            else:
                pieces.append(tokens[token] if 0 <= token < known else b"")
        return pieces


class Tokenizer:
    """Thread safe: nothing changes after loading.

    vocabulary   the bytes of each id, for grammars; len() == width of the model's logits
    text_table   the same for detokenising, with the decoder's rules about spaces and broken bytes
    eos          ids that end a generation; bos: the id that begins a text, or None
    start        the ids before an empty prompt: [bos], else an end-of-text id, else []
    longest      the most characters that one id can stand for: a text of more than n * longest characters
                 has more than n ids
    config       tokenizer_config.json, or {}
    tokens       the special tokens by their names in templates: {"bos_token": "<s>", ...}
    """

    def __init__(
        self,
        data: dict[str, Any],
        config: Mapping[str, Any],
        vocab_size: int,
        eos: Iterable[int] = (),
        *,
        generates: bool = True,
    ) -> None:
        """`data`: tokenizer.json, parsed. Raises ModelLoadError (see `load`)."""
        self.config = dict(config)
        self._text = _build(data)
        self._plain = _build(_without_extras(data))
        self._plain.encode_special_tokens = True
        self._special = {
            int(t["id"]): str(t["content"]) for t in data.get("added_tokens", ()) if t["special"]
        }
        self._tags = frozenset(
            str(token["content"])
            for token in data.get("added_tokens", ())
            if not token["special"] and acts_as_control(str(token["content"]))
        )
        self._added = {str(token["content"]): int(token["id"]) for token in data.get("added_tokens", ())}
        # Text without tokens becomes the unknown token, which is no control token.
        unknown = {_content(config.get("unk_token")), data.get("model", {}).get("unk_token"), "<unk>"}
        self._control = frozenset(self._added[text] for text in self.control_texts if text not in unknown)
        # The longest first, as in the tokenizer.
        self._known_marks = known = sorted(
            filter(None, self.control_texts), key=lambda text: (-len(text), text)
        )
        self._marks = re.compile("|".join(map(re.escape, known))) if known else None
        self._check_size(vocab_size)
        self.tokens = {
            name: text for name in _TOKEN_NAMES if (text := _content(config.get(name))) is not None
        }
        ends = {*eos, *self._ids_of(["eos_token"])}
        self.eos = frozenset(token for token in ends if 0 <= token < vocab_size)
        self.vocabulary: Vocabulary = (
            vocabulary_from_tokenizer(data, vocab_size=vocab_size, eos=self.eos)
            if generates
            else self._as_pieces(vocab_size)
        )
        self.text_table = TextTable.from_decoder(data.get("decoder"), self.vocabulary, self._special)
        sizes = [*map(len, self.vocabulary.tokens), *(len(text.encode()) for text in self._added)]
        self.longest = _shrinkage(data, max(sizes))
        self._prefix = self._find_prefix()
        starts = [*(token for token in self._prefix if token in self._special), *self._ids_of(["bos_token"])]
        self.bos: int | None = starts[0] if starts else None
        self.start: list[int] = sorted(self.eos)[:1] if self.bos is None else [self.bos]

    @classmethod
    def load(
        cls, path: Path, vocab_size: int, eos: Iterable[int] = (), *, generates: bool = True
    ) -> Tokenizer:
        """The tokenizer in the directory `path`. `eos`: ids from config.json and generation_config.json
        (ModelSpec.eos_ids); the eos_token of tokenizer_config.json is added. `generates`: False for encoders,
        which may have any kind of tokenizer. Raises ModelLoadError: no tokenizer.json, a broken one, or one
        with more ids than the model's embedding."""
        file = path / "tokenizer.json"
        if not file.is_file():
            slow = [
                name for name in ("tokenizer.model", "vocab.json", "spiece.model") if (path / name).is_file()
            ]
            raise ModelLoadError(
                f"only a slow tokenizer is there ({slow[0]})" if slow else "the file is missing",
                where=str(file),
                hint="convert it once: transformers.AutoTokenizer.from_pretrained(path).save_pretrained(path)"
                if slow
                else "copy the tokenizer's files next to the weights",
            )
        config_file = path / "tokenizer_config.json"
        config = Fields.read(config_file).values if config_file.is_file() else {}
        try:
            return cls(dict(Fields.read(file).values), config, vocab_size, eos, generates=generates)
        except ModelLoadError as error:
            if error.where is None:
                error.where = str(file)
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelLoadError(
                f"is not a tokenizer of the tokenizers library: {type(error).__name__}: {error}",
                where=str(file),
            ) from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with the begin-of-text id in front unless it begins with it; no end-of-text id."""
        ids = _ids(self._text, text)
        if not add_special_tokens or ids[: len(self._prefix)] == self._prefix:
            return ids
        return [*self._prefix, *ids]

    def count(self, text: str) -> int:
        [encoding] = self._text.encode_batch_fast([_writable(text)], add_special_tokens=False)
        return len(encoding)

    def encode_plain(self, text: str) -> list[int]:
        """Ids that spell `text` in the middle of a text: no special ids, no space put in front."""
        return _ids(self._plain, text)

    def encode_whole(self, text: str, other: str | None = None) -> tuple[list[int], list[int]]:
        """Ids of a finished text, or of a pair of texts, with the checkpoint's special tokens before, between
        and after them; and for each id its text (0 or 1)."""
        texts = _writable(text) if other is None else (_writable(text), _writable(other))
        [encoding] = self._text.encode_batch_fast([texts], add_special_tokens=True)
        return list(encoding.ids), list(encoding.type_ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(ids) < LONG:
            text: str = self._text.decode(list(ids), skip_special_tokens=skip_special_tokens)
        else:
            [text] = self._text.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    @property
    def control_texts(self) -> list[str]:
        """The texts of control ids: the special tokens, and added tokens that act as marks."""
        return list(dict.fromkeys([*self._special.values(), *self._tags]))

    @property
    def reply_tags(self) -> frozenset[str]:
        """Those of them that are not special: marks within a reply."""
        return self._tags - set(self._special.values())

    def encode_spans(self, spans: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of a prompt in pieces of (text, plain); in plain ones `control_texts` are read as letters."""
        ids: list[int] = []
        for index, (text, plain) in enumerate(spans):
            if plain:
                if index == 0:
                    ids += self._prefix
                ids += self._spelled(text)
                continue
            # Later pieces begin with a special token, so nothing is put before them.
            piece = self.encode(text, add_special_tokens=False)
            if not self._as_written(text, piece):
                piece = self._marked(text)
            if index == 0 and piece[: len(self._prefix)] != self._prefix:
                ids += self._prefix
            ids += piece
        return ids

    def _as_written(self, text: str, ids: Sequence[int]) -> bool:
        """Whether all control ids are written in the text: a normalizer may turn other text into one."""
        marks = self._marks
        if marks is not None and len(text) > LONG:
            marks = narrow(self._known_marks, text)
        written = len(marks.findall(text)) if marks is not None else 0
        return sum(token in self._control for token in ids) <= written

    def _marked(self, text: str) -> list[int]:
        """Ids of `text`. A control token gets its control id; no other text does."""
        ids: list[int] = []
        at = 0
        for mark in self._marks.finditer(text) if self._marks is not None else ():
            ids += [*self._spelled(text[at : mark.start()]), self._added[mark[0]]]
            at = mark.end()
        return [*ids, *self._spelled(text[at:])]

    def _spelled(self, text: str) -> list[int]:
        return _ids(self._letters, text)

    @cached_property
    def _letters(self) -> Any:
        """A tokenizer that reads all `control_texts` as letters. Built when a prompt first quotes one."""
        if not self._tags:
            return self._plain
        data = json.loads(self._plain.to_str())
        for token in data["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self._tags
        library = _build(data)
        library.encode_special_tokens = True
        return library

    def added_id(self, text: str) -> int | None:
        """The id of `text` if it is an added token (a control token or tag)."""
        return self._added.get(text)

    def _check_size(self, vocab_size: int) -> None:
        largest = max(self._text.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= vocab_size:
            raise ModelLoadError(
                f"the tokenizer has ids up to {largest}, the model's vocabulary has {vocab_size} "
                f"(0 to {vocab_size - 1}): they do not belong together",
                hint="put the tokenizer the model was trained with next to its weights",
            )
        if largest < 0:
            raise ModelLoadError("the tokenizer has no tokens")

    def _as_pieces(self, vocab_size: int) -> Vocabulary:
        """The vocabulary as written in the file."""
        tokens = [b""] * vocab_size
        for piece, token in self._text.get_vocab(with_added_tokens=True).items():
            tokens[token] = str(piece).encode("utf-8", "replace")
        return Vocabulary(tuple(tokens), special=frozenset(self._special), eos=self.eos)

    def _ids_of(self, names: Iterable[str]) -> list[int]:
        """Ids of special tokens by their names in tokenizer_config.json."""
        texts = [self.tokens[name] for name in names if name in self.tokens]
        return [token for text in texts if (token := self._text.token_to_id(text)) is not None]

    def _find_prefix(self) -> list[int]:
        """The ids before every text: the post-processor's, unless the config overrules it."""
        bare: list[int] = self._text.encode("a", add_special_tokens=False).ids
        full: list[int] = self._text.encode("a", add_special_tokens=True).ids
        starts = [at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare]
        prefix = full[: starts[0]] if starts else []
        named = self._ids_of(["bos_token"])
        match self.config.get("add_bos_token"):
            case True if named and prefix[:1] != named:
                return [*named, *prefix]
            case False:
                return [token for token in prefix if token not in named]
            case _:
                return prefix


def _ids(library: Any, text: str) -> list[int]:
    """The ids of `text` alone. encode_batch_fast() releases the lock, but is slower for short texts."""
    if len(text) < LONG:
        ids: list[int] = library.encode(_writable(text), add_special_tokens=False).ids
    else:
        [encoding] = library.encode_batch_fast([_writable(text)], add_special_tokens=False)
        ids = encoding.ids
    return ids


def _shrinkage(data: Mapping[str, Any], longest: int) -> int:
    """How many characters of a text one id can stand for, if its own text has at most `longest` bytes. If
    characters can vanish: a number that no real text reaches."""
    parts = [*_kinds(data.get("normalizer")), *_kinds(data.get("pre_tokenizer"))]
    kinds = {part["type"] for part in parts}
    model = data.get("model", {})
    exact = (
        model.get("type") == "BPE"
        and ("ByteLevel" in kinds or model.get("byte_fallback") is True)
        and all(part["type"] in _KEEPS_ALL and part.get("behavior") != "Removed" for part in parts)
        and not any(token.get("lstrip") or token.get("rstrip") for token in data.get("added_tokens", ()))
    )
    if not exact:
        return max(longest, _LOSSY)
    return longest * (_COMPOSED if kinds & _COMPOSES else 1)


_COMPOSES = frozenset({"NFC", "NFKC", "NFD", "NFKD", "Lowercase"})
_COMPOSED = 8
"""The most characters that one of these turns into one character, or into a few bytes."""
_KEEPS_ALL = _COMPOSES | {"ByteLevel", "Split", "Metaspace", "Prepend", "Replace", "Digits", "Punctuation"}


def _kinds(part: Any) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer. One that shortens text is reported as "Shortens"."""
    match part:
        case {"type": "Sequence"}:
            steps = part.get("normalizers") or part.get("pretokenizers") or ()
            return [each for step in steps for each in _kinds(step)]
        case {"type": "Replace", "content": str(content)}:
            pattern = part.get("pattern", {}).get("String")
            kept = isinstance(pattern, str) and len(content) >= len(pattern)
            return [part] if kept else [{"type": "Shortens"}]
        case {"type": str()}:
            return [part]
        case _:
            return []


def _build(data: Mapping[str, Any]) -> Any:
    """A tokenizers.Tokenizer that neither truncates nor pads."""
    try:
        return tokenizers.Tokenizer.from_str(json.dumps({**data, "truncation": None, "padding": None}))
    except Exception as error:  # the library raises bare Exception for every defect of the file
        raise ModelLoadError(f"the tokenizers library cannot read it: {error}") from error


def _without_extras(data: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer for the middle of a text: it adds nothing before or around the text."""
    return {
        **data,
        "post_processor": None,
        "normalizer": _cleared(data.get("normalizer"), "normalizers"),
        "pre_tokenizer": _cleared(data.get("pre_tokenizer"), "pretokenizers"),
    }


def _cleared(part: Any, children: str) -> Any:
    """`part` of a tokenizer.json without the steps that put a space in front of the text."""
    if not isinstance(part, Mapping):
        return part
    match part.get("type"):
        case "Sequence":
            steps = [_cleared(child, children) for child in part.get(children, ())]
            kept = [step for step in steps if step is not None]
            return {**part, children: kept} if kept else None
        case "Prepend":
            return None
        case "Metaspace":
            older = {"add_prefix_space": False} if "add_prefix_space" in part else {}
            return {**part, "prepend_scheme": "never", **older}
        case "ByteLevel":
            return {**part, "add_prefix_space": False}
        case _:
            return part


def _content(token: Any) -> str | None:
    """A token of tokenizer_config.json: its text, or an object with the text as "content"."""
    match token:
        case str(text) | {"content": str(text)}:
            return text
        case _:
            return None


def _writable(text: str) -> str:
    """Lone surrogates (a broken \\ud83d escape in JSON) cannot be encoded; they become U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _parts(decoder: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(decoder, Mapping):
        if decoder.get("type") == "Sequence":
            for child in decoder.get("decoders", ()):
                yield from _parts(child)
        else:
            yield decoder


def _prepends(metaspace: Mapping[str, Any]) -> bool:
    if "prepend_scheme" in metaspace:
        return bool(metaspace["prepend_scheme"] != "never")
    return bool(metaspace.get("add_prefix_space", True))

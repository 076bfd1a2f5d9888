"""LLSpace: a vocabulary in the shapes that the llguidance library and its masks need. It knows no grammar."""

from __future__ import annotations

from llguidance import LLTokenizer, TokenizerWrapper

from runtime.grammar.json_schema.checks.checked import ClosingTokens
from runtime.grammar.masks.token_bits import token_bits
from runtime.grammar.missing_bytes import lacks_bytes
from runtime.protocol.vocabulary import Vocabulary

_INSIDE = r'[^"\\\x00-\x1F\x7F]'
"""What stands in strings as it is: of tokens of these characters the library allows or refuses all, or all
that are short, at once."""


class _Words:
    """A vocabulary in the shape LLTokenizer asks for. It never tokenizes: only bytes are fed back."""

    def __init__(self, tokens: list[bytes], eos: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos
        self.bos_token_id = None
        self.special_token_ids: list[int] = []
        self._of_byte = {data[0]: number for number, data in enumerate(tokens) if len(data) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._of_byte[value] for value in data]


class LLSpace:
    """A vocabulary prepared for llguidance: made once, used by every constraint. Thread-safe.

    Ids of the library are those of the vocabulary, followed by one id for each byte that no token spells and
    by one more where the vocabulary has no end, so that any text can be followed.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        silent = vocabulary.special | vocabulary.eos
        tokens = [b"" if number in silent else data for number, data in enumerate(vocabulary.tokens)]
        spelled = {data[0]: number for number, data in enumerate(tokens) if len(data) == 1}
        for value in range(256):
            if value not in spelled:
                spelled[value] = len(tokens)
                tokens.append(bytes([value]))
        self.byte_ids = [spelled[value] for value in range(256)]
        self.eos = sorted(vocabulary.eos)
        stop = self.eos or [len(tokens)]
        if not self.eos:
            tokens.append(b"")
        self.tokens = tokens
        self.words = -(-len(tokens) // 32)
        self.tokenizer = LLTokenizer(
            TokenizerWrapper(_Words(tokens, stop[0])),
            n_vocab=len(tokens),
            eos_token=stop,
            slices=[_INSIDE + "{1,10}", _INSIDE + "+"],
        )
        self.bits = token_bits(vocabulary)
        self.lacks_bytes = lacks_bytes(self.bits)
        self.closing_tokens = ClosingTokens(self.bits)

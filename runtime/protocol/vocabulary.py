"""Vocabulary: the bytes of each token id, for grammars and detokenisers. Knows no tokenizer library."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """tokens[id] = the bytes that id stands for in text; b"" for ids that stand for no text.

    special: ids that never belong to text (control tokens, padding ids up to the model's vocabulary size).
    eos: ids that end a generation. `len(tokens)` equals the width of the model's logits.
    """

    tokens: tuple[bytes, ...]
    special: frozenset[int] = field(default_factory=frozenset)
    eos: frozenset[int] = field(default_factory=frozenset)

    def __len__(self) -> int:
        return len(self.tokens)

"""Vocabulary: the bytes of each token id, for grammars and detokenisers. Knows no tokenizer library."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """tokens[id]: the bytes of an id; b"" for ids without text. `len(tokens)` is the width of the model's
    logits. special: ids that never belong to text (control tokens, padding). eos: ids that end a
    generation."""

    tokens: tuple[bytes, ...]
    special: frozenset[int] = field(default_factory=frozenset)
    eos: frozenset[int] = field(default_factory=frozenset)

    def __len__(self) -> int:
        return len(self.tokens)

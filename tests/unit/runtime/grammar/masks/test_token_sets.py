"""Sets of tokens as packed bits, and by the text they hold: the same as by looking at each token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.grammar.masks.token_bits import SPARSE, TokenBits
from runtime.grammar.tags.tag_space import TagSpace, Triggers
from runtime.protocol.vocabulary import Vocabulary
from tests.exploring import tries


def words(width: int) -> Vocabulary:
    return Vocabulary(
        (*(b"x" for _ in range(width - 1)), b""), frozenset({width - 1}), frozenset({width - 1})
    )


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 65, 96, 97, 1000, 5000])
def test_a_mask_lists_what_its_bits_say_where_it_is_sparse(width: int) -> None:
    bits = TokenBits(words(width))
    dice = np.random.default_rng(width)
    for count in sorted({0, 1, width // 40, width // SPARSE, width // SPARSE + 1, width // 2, width}):
        flags = np.zeros(width, dtype=np.bool_)
        flags[dice.choice(width, count, replace=False)] = True
        beyond = np.concatenate([bits.pack(flags), np.full(3, 0xFFFFFFFF, dtype=np.uint32)])
        if width % 32:
            beyond[bits.word_count - 1] |= np.uint32(0xFFFFFFFF << (width % 32) & 0xFFFFFFFF)
        mask = bits.seal(beyond)
        wanted = np.flatnonzero(flags).tolist()
        assert TokenBits.ids(mask.bits).tolist() == wanted
        assert TokenBits.count(mask) == count
        assert (mask.allowed is None) == (count * SPARSE >= width)
        assert mask.allowed is None or mask.allowed.tolist() == wanted
        assert not mask.bits.flags.writeable


TEXTS = st.lists(st.text("ab<}", max_size=4).map(str.encode) | st.binary(max_size=2), min_size=1, max_size=30)
WORD = st.text("ab<}", min_size=1, max_size=3).map(str.encode)


def test_equal_masks_are_one() -> None:
    """A document comes to the same set again and again: what it lists is worked out once."""
    bits = TokenBits(Vocabulary((b"a",) * 3000, frozenset(), frozenset()))
    flags = np.zeros(3000, dtype=np.bool_)
    flags[[5, 7, 2999]] = True
    first, second = bits.seal(bits.pack(flags)), bits.seal(bits.pack(flags))
    assert first is second
    assert first.allowed is not None
    assert first.allowed.tolist() == [5, 7, 2999]
    with pytest.raises(ValueError, match="read-only"):
        first.bits[0] = 1
    flags[6] = True
    other = bits.seal(bits.pack(flags))
    assert other.allowed is not None
    assert other.allowed.tolist() == [5, 6, 7, 2999]
    assert first.allowed.tolist() == [5, 7, 2999]


@settings(max_examples=tries(60))
@given(TEXTS, st.lists(WORD, min_size=1, max_size=3), st.sets(st.sampled_from(b"ab<}"), min_size=1))
def test_tokens_by_what_they_hold(texts: list[bytes], triggers: list[bytes], closers: set[int]) -> None:
    tokens = (*texts, b"")
    space = TagSpace(Vocabulary(tokens, frozenset({len(texts)}), frozenset({len(texts)})))

    def listed(bits: np.ndarray[tuple[int, ...], np.dtype[np.uint32]]) -> list[bytes]:
        return [tokens[token] for token in TokenBits.ids(bits).tolist()]

    spoken = [data for data in texts if data]
    assert listed(space.text_ids) == spoken
    assert listed(space.closing(None)) == [data for data in spoken if len(data) > 1]
    assert listed(space.closing(frozenset(closers))) == [data for data in spoken if set(data[:-1]) & closers]
    watched = Triggers(triggers)
    for state in range(len(watched.prefix)):
        rest = watched.remainders(state)
        assert listed(space.holding(watched, state)) == [
            data for data in spoken if any(word in data for word in triggers) or data.startswith(tuple(rest))
        ]
    for word in triggers:
        ends = tuple(word[:size] for size in range(1, len(word) + 1))
        wanted = [data for data in spoken if len(data) > 1 and (data.endswith(ends) or word in data)]
        assert listed(space.ending_in(word)) == wanted

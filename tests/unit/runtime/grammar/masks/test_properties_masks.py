"""Masks equal brute force over the vocabulary, forced text equals the longest unique byte path, and walks
under the mask always finish with what the constraint accepts: for every kind, backend and vocabulary.

    SLOW_EXAMPLES=300 EXPLORE=7 pytest tests/long/runtime/grammar/masks/test_properties_masks.py
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from runtime.grammar.base import Matcher
from runtime.grammar.byte_matcher import BYTES
from runtime.grammar.table import make_backend
from runtime.protocol.vocabulary import Vocabulary
from tests.unit.runtime.grammar import drawn
from tests.unit.runtime.grammar.drawn import allowed
from tests.unit.runtime.grammar.drawn_cases import PAIRS, Case, pair_id

pytestmark = pytest.mark.drawn


@cache
def bytewise(name: str) -> object:
    return make_backend(name, BYTES)


def fresh(case: Case, name: str, words: str) -> Matcher:
    made: Matcher = drawn.backend(name, words).compile(case.constraint)
    return made


def by_bytes(case: Case, name: str) -> Matcher:
    made: Matcher = bytewise(name).compile(case.constraint)  # type: ignore[attr-defined]
    return made


def offered(matcher: Matcher) -> frozenset[int]:
    return frozenset(allowed(matcher))


def brute(at: Matcher, words: Vocabulary) -> set[int]:
    """The ids whose bytes may follow one by one: `at` is over single bytes. Walks the tokens in order, so
    that what they share is followed once."""
    found: set[int] = set()
    path: list[bytes] = [b""]
    ways = {b"": offered(at)}
    for data, token in sorted((data, token) for token, data in enumerate(drawn.texts_of(words)) if data):
        while not data.startswith(path[-1]):
            at.rollback(1)
            ways.pop(path.pop(), None)
        alive = True
        for byte in data[len(path[-1]) :]:
            if path[-1] not in ways:
                ways[path[-1]] = offered(at)
            if byte not in ways[path[-1]]:
                alive = False
                break
            assert at.advance(byte)
            path.append(path[-1] + bytes([byte]))
        if alive and path[-1] == data:
            found.add(token)
    at.rollback(len(path) - 1)
    return found


CLOSERS = set(b'"}])>/;.0123456789')


def run(case: Case, name: str, words: str, walks: int, steps: int) -> None:
    vocabulary = drawn.vocabulary(words)
    texts = drawn.texts_of(vocabulary)
    start, dice = fresh(case, name, words), random.Random(drawn.SEED)
    closed = 0
    for _ in range(walks):
        matcher = start.copy()
        wanted = dice.choice([2, 6, steps])
        tokens, ended = follow(matcher, dice, vocabulary, texts, wanted)
        if not ended:
            ids = matcher.closing(400)
            if ids is None:
                tokens, ended = follow(matcher, dice, vocabulary, texts, 0, tokens, 600)
            while ids is None and not ended:
                # As the scheduler does it where going back step by step leads nowhere: to an earlier place.
                assert tokens, (case.name, "no end from the start")
                matcher.rollback(1)
                tokens.pop()
                ids = matcher.closing(400)
            if ids is not None:
                assert len(ids) <= 400
                for token in ids:
                    assert token in allowed(matcher)
                    assert matcher.advance(token)
                tokens += ids
                closed += 1
        assert matcher.may_stop()
        text = b"".join(texts[token] for token in tokens).decode()
        assert case.accepts(text), (case.name, text)
    assert allowed(start) == allowed(fresh(case, name, words)), "a copy moved the one it was made of"


def follow(
    matcher: Matcher,
    dice: random.Random,
    words: Vocabulary,
    texts: tuple[bytes, ...],
    late: int,
    tokens: list[int] | None = None,
    most: int | None = None,
) -> tuple[list[int], bool]:
    """Random steps; after `late` of them it tends to ends. The tokens that stand, and whether it ended."""
    taken = list(tokens or ())
    for number in range(late if most is None else most):
        if matcher.is_terminated() and not allowed(matcher):
            return taken, True
        ids = allowed(matcher)
        backs = 0
        while not ids:
            rejection = matcher.verdict()
            assert rejection is not None, ("a dead end", b"".join(texts[token] for token in taken))
            assert rejection.back, rejection.reason
            matcher.retract(rejection)
            del taken[len(taken) - rejection.back :]
            ids, backs = allowed(matcher), backs + 1
            assert backs < 500, "went back for ever"
        ends = [token for token in ids if token in words.eos]
        if ends and (number >= late or len(ends) == len(ids) or dice.random() < 0.15):
            assert matcher.may_stop()
            assert matcher.advance(dice.choice(ends))
            assert matcher.is_terminated()
            return taken, True
        ids = [token for token in ids if token not in words.eos]
        closers = [token for token in ids if set(texts[token]) <= CLOSERS]
        token = dice.choice(closers if closers and dice.random() < (0.85 if number >= late else 0.3) else ids)
        assert matcher.advance(token)
        taken.append(token)
    return taken, False


@pytest.mark.parametrize(("case", "name"), PAIRS, ids=pair_id)
def test_walks_finish_and_validate(case, name):
    run(case, name, "awkward", 8 * drawn.LOOPS, 20)


def masks_hold(case: Case, name: str, words: str, walks: int, dice: random.Random) -> None:
    vocabulary = drawn.vocabulary(words)
    texts = drawn.texts_of(vocabulary)
    complete = {data for data in texts if len(data) == 1} >= {bytes([value]) for value in range(256)}
    if not complete:
        return
    start, bytes_start = fresh(case, name, words), by_bytes(case, name)
    for _ in range(walks):
        matcher, at = start.copy(), bytes_start.copy()
        for _ in range(dice.randint(0, 12)):
            ids = [token for token in allowed(matcher) if token not in vocabulary.eos]
            if not ids:
                break
            token = dice.choice(ids)
            assert matcher.advance(token)
            assert all(at.advance(byte) for byte in texts[token]), (case.name, texts[token])
        found = set(allowed(matcher))
        if not found:
            assert matcher.verdict() is not None
            continue
        ends = vocabulary.eos if matcher.may_stop() else frozenset()
        assert matcher.may_stop() == at.may_stop()
        expected = brute(at, vocabulary) | ends
        assert found == expected, (case.name, [texts[token] for token in found ^ expected])
        for token in dice.sample(range(len(texts)), 12):
            assert matcher.copy().advance(token) == (token in found), (case.name, texts[token])


@pytest.mark.parametrize(("case", "name"), PAIRS, ids=pair_id)
def test_masks_equal_brute_force(case, name):
    masks_hold(case, name, "awkward", 2 * drawn.LOOPS, random.Random(drawn.SEED))


def unique_path(at: Matcher, most: int) -> bytes:
    """The longest unique byte path, looked for byte by byte. Leaves `at` where it was."""
    path = bytearray()
    while len(path) < most and not at.may_stop():
        ways = offered(at)
        if len(ways) != 1:
            break
        path.append(*ways)
        assert at.advance(path[-1])
    at.rollback(len(path))
    return bytes(path)


@pytest.mark.parametrize(("case", "name"), PAIRS, ids=pair_id)
def test_forced_text_is_the_longest_unique_path(case, name):
    start, dice = by_bytes(case, name), random.Random(drawn.SEED + 1)
    for _ in range(5 * drawn.LOOPS):
        matcher = start.copy()
        text = bytearray()
        for _ in range(dice.randint(0, 30)):
            ids = allowed(matcher)
            if not ids:
                break
            text.append(dice.choice(ids))
            assert matcher.advance(text[-1])
            if dice.random() < 0.4:
                forced = matcher.forced_bytes()
                longest = unique_path(matcher, len(forced) + 300)
                assert longest.startswith(forced), (case.name, bytes(text))
                if matcher.origin.exact:
                    assert forced == longest, (case.name, bytes(text))


def test_masks_of_drawn_regexes_equal_brute_force():
    dice = random.Random(drawn.SEED + 2)
    patterns = [
        r"[^\"]{0,90}\w",
        r"(?:é|日本|[a-c]{2,5}){1,40}x?",
        r"(?i)[a-fß]{3,9}|\s{0,300}z",
        r".{5,70}(?:a|ab)\d?",
    ]
    for pattern in patterns:
        case = Case(pattern, "regex", pattern, (), lambda text: True)
        for name in ("outlines", "llguidance"):
            masks_hold(case, name, "awkward", drawn.LOOPS, dice)

"""Exchanges of the pocket corpus: the shared types and the train/held-out rule.

A task module turns a random generator and a split into a group of turns that belong together.
This module knows neither the system prompts around a group nor how text becomes tokens.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar

from examples.pocket.world import PLACES, world_names

__all__ = ["HELD", "TRAIN", "Group", "Split", "Style", "Turn", "held", "invented", "pick", "words"]

Split = Literal["train", "held"]
Style = Literal["sentence", "short"]
TRAIN: Split = "train"
HELD: Split = "held"
T = TypeVar("T")


@dataclass(frozen=True)
class Turn:
    """One question (or tool result) and the reply that is right for it."""

    task: str
    user: str
    reply: str
    role: Literal["user", "tool"] = "user"
    options: tuple[str, ...] = ()
    final: str = ""
    """For arithmetic and thinking: the number the reply must end in."""


@dataclass(frozen=True)
class Group:
    """Turns that follow one another, and the tools (if any) that the first of them needs."""

    turns: tuple[Turn, ...]
    tool: dict[str, Any] | None = None


def words(text: str) -> list[str]:
    """The words of a word list."""
    return text.split()


def held(*key: object, one_in: int = 10) -> bool:
    """Whether `key` belongs to the held-out part. Stable across runs, machines and Pythons."""
    text = "\x1f".join(str(part) for part in key)
    return zlib.crc32(text.encode()) % 10007 % one_in == 0


def pick(rng: random.Random, split: Split, train: Sequence[T], held_out: Sequence[T]) -> T:
    """A template of the wanted split."""
    return rng.choice(train if split == TRAIN else held_out)


_ONSETS = words("b br c d dr f g gr h j k l m n p r s st t tr v w z")
_VOWELS = ["a", "e", "i", "o", "u"]
_CODAS = words("l m n r s t x k nd rn lt sk")


# Ordinary names, so that training has also seen words of other shapes; never part of an evaluation.
_COMMON = {
    "person": words(
        "Alice Bob Carol David Emma Frank Grace Henry Ingrid James Karen Linda Maria Nina Oliver Paul "
        "Rachel Sam Tina Ursula Victor Walter Xenia Yusuf Zoe Ada Alan John Mary Peter Anna Tom Lucy Max Sara"
    ),
    "city": words(
        "Paris London Berlin Madrid Rome Tokyo Lisbon Vienna Prague Oslo Dublin Cairo Lima Boston Delhi "
        "Munich Geneva Athens Warsaw Moscow Beijing Sydney Toronto Denver Milan Kyoto Nairobi Quito Havana"
    ),
}


@lru_cache(maxsize=1)
def _taken() -> frozenset[str]:
    return world_names().union(*_COMMON.values())


def _syllables(rng: random.Random) -> str:
    parts = [rng.choice(_ONSETS), rng.choice(_VOWELS)]
    shape = rng.random()
    if shape < 0.75:
        parts += [rng.choice(_ONSETS[:3] + list("dlmnrtvk")), rng.choice(_VOWELS)]
    if shape > 0.25:
        parts.append(rng.choice(_CODAS))
    return "".join(parts)


def _letters(rng: random.Random) -> str:
    """A string of letters that mostly looks like no name at all."""
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 8)))


def invented(rng: random.Random, split: Split, kind: Literal["person", "city"]) -> str:
    """A name for a slot; the names of the two splits are disjoint, and held-out ones are all made up."""
    if split == TRAIN and rng.random() < 0.12:
        if kind == "city" and rng.random() < 0.5:
            place = rng.choice(PLACES)
            return rng.choice((place.name, place.capital))
        return rng.choice(_COMMON[kind])
    while True:
        wild = split == TRAIN and rng.random() < 0.12
        name = (_letters(rng) if wild else _syllables(rng)).capitalize()
        if name not in _taken() and len(name) > 2 and held("name", name, one_in=8) == (split == HELD):
            return name

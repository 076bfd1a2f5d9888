"""Random and mutated texts through every tool-call format, whole and in pieces: the same, and nothing lost.

PARSED_TEXTS: how many; EXPLORE: what they are drawn from, printed with a failure.
"""

from __future__ import annotations

import json
import os
import random

import pytest

from runtime.formats.tools import FORMATS, FunctionCallParser
from tests.unit.runtime.formats.tools import calling
from tests.unit.runtime.formats.tools.calling import TOOLS, added, whole
from tests.unit.runtime.formats.tools.test_formats import CASES

COUNT = int(os.environ.get("PARSED_TEXTS", "30000"))
SEED = os.environ.get("EXPLORE", "1")
PIECES = [
    *calling.MARKS,
    "get_weather",
    "search",
    "city",
    ": ",
    '"',
    ", ",
    "{",
    "[",
    "(",
    "=",
    "\n",
    " ",
    "é",
    "1.5",
    "None",
]
DROPS = ("gpt-oss", "trinity")  # marks that are no calls are left out


def random_text(dice: random.Random, key: str) -> str:
    marks = FORMATS.load(key).triggers
    return "".join(
        dice.choice(marks) if dice.random() < 0.2 else dice.choice(PIECES) for _ in range(dice.randint(0, 40))
    )


def mutated(dice: random.Random, text: str) -> str:
    for _ in range(dice.randint(1, 4)):
        at, count = dice.randint(0, len(text)), dice.choice((0, 0, 1, 1, 3, 20))
        new = dice.choice(("", dice.choice(PIECES), text[dice.randint(0, len(text)) :][:20]))
        text = text[:at] + new + text[at + count :]
    return text


def cut(dice: random.Random, text: str) -> list[str]:
    places = sorted(dice.randint(0, len(text)) for _ in range(dice.randint(0, 8)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def test_nothing_is_lost_and_no_split_matters() -> None:
    dice = random.Random(f"{SEED}/tool calls")
    parsers = {key: FunctionCallParser(TOOLS, key) for key in FORMATS.names()}
    for number in range(COUNT):
        key, text = dice.choice(CASES)
        if number % 2:
            key = dice.choice(list(parsers))
            text = random_text(dice, key)
        else:
            text = mutated(dice, text)
        found = whole(parsers[key], text)
        assert added(parsers[key], cut(dice, text)) == found, (SEED, key, text)
        if not found[1] and key not in DROPS:
            assert found[0] == text, (SEED, key)
        for _, name, arguments in found[1]:
            assert name in ("get_weather", "search", "mixed", "ping")
            assert isinstance(json.loads(arguments), dict), (SEED, key, text)

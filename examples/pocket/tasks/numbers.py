"""Sums of one and two digits, and small word problems solved between think tags.

A sum is worked in at most two steps, tens first: `47 + 38 = 77 + 8 = 85`. Pairs of two-digit numbers
are held out by hash and never asked in training; word problems add and take one-digit numbers, and
whole problems are held out by hash. All sums with a one-digit number are trained, so only their wordings
are held out. The module knows nothing of chat rendering.
"""

from __future__ import annotations

import random

from examples.pocket.tasks import HELD, TRAIN, Group, Split, Turn, held, pick, words

__all__ = ["arithmetic_group", "pair_is_held", "small_sum_group", "sum_lines", "think_group", "worked"]

_PLUS = (
    "Now add {a} and {b}.",
    "Add {a} and {b}, please.",
    "Please compute {a} + {b}.",
    "What is the sum of {a} + {b}?",
    "Please tell me {a} + {b}.",
    "Work out {a} + {b}.",
    "Give me the sum of {a} and {b}.",
    "What is {a} + {b}?",
    "{a} + {b} = ?",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "{a} + {b}",
    "How much is {a} plus {b}?",
    "Compute {a} + {b}.",
    "What is the sum of {a} and {b}?",
    "{a} plus {b}?",
    "Tell me {a} + {b}.",
    "Please add {a} and {b}.",
    "Can you work out {a} plus {b}?",
    "{a}+{b}",
    "{a}+{b}=",
    "What is {a}+{b}?",
    "What's {a} + {b}?",
    "{a} + {b} =",
    "what is {a} + {b}",
    "Calculate {a} + {b}.",
)
_PLUS_HELD = (
    "How much is {a} + {b}?",
    "Can you add {a} and {b}?",
    "Compute {a} plus {b}.",
    "Tell me the sum of {a} and {b}.",
    "Please work out {a} + {b}.",
    "What's {a}+{b}?",
    "Calculate {a} plus {b}.",
    "{a}+{b}=?",
)
_MINUS = (
    "Subtract {b} from {a}, please.",
    "Now subtract {b} from {a}.",
    "Can you subtract {b} from {a}?",
    "Please compute {a} - {b}.",
    "I want to subtract {b} from {a}.",
    "Take {b} from {a}, please.",
    "Please tell me {a} - {b}.",
    "Work out {a} - {b}.",
    "What is {a} - {b}?",
    "{a} - {b} = ?",
    "What is {a} minus {b}?",
    "Take {b} from {a}.",
    "{a} - {b}",
    "How much is {a} minus {b}?",
    "Compute {a} - {b}.",
    "Subtract {b} from {a}.",
    "{a} minus {b}?",
    "Tell me {a} - {b}.",
    "Please take {b} from {a}.",
    "Can you work out {a} minus {b}?",
    "{a}-{b}",
    "{a}-{b}=",
    "What is {a}-{b}?",
    "What's {a} - {b}?",
    "{a} - {b} =",
    "what is {a} - {b}",
    "Calculate {a} - {b}.",
)
_MINUS_HELD = (
    "How much is {a} - {b}?",
    "Can you take {b} from {a}?",
    "Compute {a} minus {b}.",
    "Please subtract {b} from {a}.",
    "Please work out {a} - {b}.",
    "What's {a}-{b}?",
    "Calculate {a} minus {b}.",
    "{a}-{b}=?",
)
_ONLY = ("Only the number.", "Just the number, please.", "Give only the number.")
_STEP = (
    "Please think.",
    "Show the steps.",
    "Please think step by step first.",
    "Show your steps, please.",
    "Think step by step.",
    "Please think step by step.",
    "Think first.",
    "Show your steps.",
)
_STEP_HELD = ("Please think first.", "Please show your steps.")

_THINGS = words("apples coins books eggs shells lamps nuts cards stones pens cups boxes")
_NAMES = words("Ann Ben Cara Dan Eva Finn Gus Hana Ivo Jo Kim Leo Mia Ned Ola Pam")
_OPEN = (
    "A bag has {a} {t}.",
    "In a box there are {a} {t}.",
    "There are {a} {t} on a table.",
    "A box holds {a} {t}.",
    "There are {a} {t} in a bag.",
    "{n} has a box of {a} {t}.",
    "{n} has {a} {t}.",
    "There are {a} {t} in a box.",
    "A shop has {a} {t}.",
    "{n} finds {a} {t}.",
)
_OPEN_HELD = ("There are {a} {t} in a shop.", "A box has {a} {t}.")
_MORE = (
    "Then {n} buys {b} more.",
    "Then {b} are found.",
    "Now {n} gets {b} more.",
    "{b} more are added.",
    "Then {n} finds {b} more.",
    "Then {b} more come.",
    "{n} gets {b} more.",
    "{b} are added.",
    "{n} buys {b} more.",
)
_MORE_HELD = ("Then {n} gets {b} more.", "Then {b} are added.")
_LESS = (
    "Then {n} loses {b}.",
    "{b} are lost.",
    "Now {n} gives away {b}.",
    "Now {b} are sold.",
    "Then {n} sells {b}.",
    "Then {b} are lost.",
    "{n} gives away {b}.",
    "{b} are sold.",
    "{n} loses {b}.",
)
_LESS_HELD = ("Then {n} gives away {b}.", "Then {b} are sold.")
_ASKS = (
    "How many {t} are that?",
    "How many {t} are there?",
    "How many {t} now?",
    "How many {t} is it now?",
    "How many {t} are there now?",
    "How many {t} are left?",
    "How many {t} is that?",
)
_ASKS_HELD = ("How many {t} are that now?", "How many {t} is that now?")


def pair_is_held(a: int, op: str, b: int) -> bool:
    """Whether `a op b` may only be asked in the held-out split."""
    return held("pair", a, op, b, one_in=10)


def worked(a: int, op: str, b: int) -> str:
    """The sum with its steps: the tens of `b` first, then its ones."""
    result, tens, ones = _apply(a, op, b), b - b % 10, b % 10
    if not tens or not ones:
        return f"{a} {op} {b} = {result}"
    return f"{a} {op} {b} = {_apply(a, op, tens)} {op} {ones} = {result}"


def _pair(rng: random.Random, split: Split) -> tuple[int, str, int]:
    while True:
        op = rng.choice("+-")
        easy = split == TRAIN and rng.random() < 0.2
        if easy:
            return _small_pair(rng)
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        if op == "-" and a < b:
            a, b = b, a
        if pair_is_held(a, op, b) == (split == HELD):
            return a, op, b


def _small_pair(rng: random.Random) -> tuple[int, str, int]:
    """Two numbers of which at least one has one digit; nothing below zero is asked for."""
    a, op, b = rng.randint(0, 9), rng.choice("+-"), rng.randint(0, 9)
    if rng.random() < 0.45:
        b = rng.randint(10, 99)
    if rng.random() < 0.5 or (op == "-" and a < b):
        a, b = b, a
    return (a, op, b) if op == "+" or a >= b else (b, op, a)


def _apply(a: int, op: str, b: int) -> int:
    return a + b if op == "+" else a - b


def small_sum_group(rng: random.Random, split: Split, count: int = 1) -> Group:
    """`count` sums in a row in which at least one number has one digit."""
    return _sums(rng, split, "small_sums", [_small_pair(rng) for _ in range(count)])


def arithmetic_group(rng: random.Random, split: Split, count: int = 1) -> Group:
    """`count` sums in a row; the reply restates the sum, then gives its result."""
    return _sums(rng, split, "arithmetic", [_pair(rng, split) for _ in range(count)])


def _sums(rng: random.Random, split: Split, task: str, pairs: list[tuple[int, str, int]]) -> Group:
    turns = []
    for a, op, b in pairs:
        train, fresh = (_PLUS, _PLUS_HELD) if op == "+" else (_MINUS, _MINUS_HELD)
        text = pick(rng, split, train, fresh).format(a=a, b=b)
        result = str(_apply(a, op, b))
        reply = worked(a, op, b)
        if split == TRAIN and rng.random() < 0.04:
            text, reply = f"{text} {rng.choice(_ONLY)}", result
        turns.append(Turn(task, text, reply, final=result))
    return Group(tuple(turns))


def sum_lines(rng: random.Random, split: Split, count: int) -> list[tuple[str, str]]:
    """Bare lines `a + b = ` with their results, for plain completion text."""
    rows = []
    for _ in range(count):
        a, op, b = _pair(rng, split)
        question = f"{a} {op} {b} ="
        rows.append((question, worked(a, op, b).removeprefix(question) + "\n"))
    return rows


def _steps(rng: random.Random, split: Split, count: int) -> list[tuple[int, str, int]]:
    """A chain of sums with one-digit steps; the chains of the two splits are disjoint."""
    while True:
        total, chain = rng.randint(10, 80), []
        for _ in range(count):
            op, b = rng.choice("+-"), rng.randint(2, 9)
            chain.append((total, op, b))
            total = _apply(total, op, b)
        if min(a for a, _, _ in chain) >= 10 and held("chain", chain, one_in=6) == (split == HELD):
            return chain


def think_group(rng: random.Random, split: Split, asked: bool = True) -> Group:
    """A word problem; `asked` says whether the question itself asks for steps."""
    chain = _steps(rng, split, rng.choice((1, 2, 2)))
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    parts = [pick(rng, split, _OPEN, _OPEN_HELD).format(n=name, a=chain[0][0], t=thing)]
    for _, op, b in chain:
        train, fresh = (_MORE, _MORE_HELD) if op == "+" else (_LESS, _LESS_HELD)
        parts.append(pick(rng, split, train, fresh).format(n=name, b=b))
    parts.append(pick(rng, split, _ASKS, _ASKS_HELD).format(t=thing))
    if asked:
        parts.append(pick(rng, split, _STEP, _STEP_HELD))
    result = str(_apply(*chain[-1]))
    steps = " ".join(f"{a} {op} {b} = {_apply(a, op, b)}." for a, op, b in chain)
    return Group((Turn("think", " ".join(parts), f"<think>{steps}</think>{result}", final=result),))

"""System prompts of the pocket corpus: none, plain, persona, few-shot and noise.

Knows which reply style a prompt asks for ("sentence" or "short"), not what is asked after it.
"""

from __future__ import annotations

import random

from examples.pocket.tasks import HELD, TRAIN, Split, Style, Turn, words
from examples.pocket.tasks.classify import classify_group
from examples.pocket.tasks.facts import fact_group
from examples.pocket.tasks.numbers import arithmetic_group

__all__ = ["THINK_SYSTEM", "system_prompt"]

_PLAIN = (
    "You are a helpful assistant.",
    "You answer questions.",
    "You are an assistant. Be brief.",
    "Answer the questions.",
    "You are a small and friendly model.",
    "You help people with short answers.",
    "You are a careful assistant. Answer truthfully.",
    "Answer in one short sentence.",
)
_PERSONA = (
    "You are {n}, a guide to the lands.",
    "You are {n}, a friendly {j}.",
    "Your name is {n}.",
    "You are {n}, a wise {j} who answers questions.",
    "{n} is an assistant who knows the lands.",
    "You are a {j}. People ask you questions.",
)
_SHORT = (
    "Answer in one word.",
    "Answer with one word only.",
    "Give only names and numbers.",
    "You answer as shortly as you can.",
    "Only give the answer itself.",
)
_FEW = ("Here are examples.", "Examples:", "Answer like this:", "You answer as in these examples.", "")
_NAMES = words("Pip Mo Tess Bo Wim Fay Rudi Lune Pocket")
_NAMES_HELD = ["Tim", "Lu", "Mofa", "Wil"]
_JOBS = words("guide teacher sailor robot clerk poet librarian helper")
_NOISE = words(
    "the a of to and in is it you that was for on are with as they be at one have this from by "
    "not but what all were when we there can an your which their said if do will each about how "
    "up out them then she many some so these would other into has more her two like him see time "
    "could no make than first been its who now people my made over did down only way find use may "
    "water long little very after words called just where most know user always never help answer "
    "reply short clear polite kind fact facts world question questions please write text language "
    "list example rules follow every must should before sure careful expert professional company "
    "support customer service today date year day work good new please concise tone style format "
    "output response"
)
THINK_SYSTEM = (
    "Think step by step.",
    "Think before you answer.",
    "You think first and then answer.",
    "You are a helpful assistant. Think step by step.",
)


def _examples(rng: random.Random, style: Style) -> list[Turn]:
    turns: list[Turn] = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.random()
        if kind < 0.6:
            turns.append(fact_group(rng, TRAIN, style).turns[0])
        elif kind < 0.8:
            turns.append(arithmetic_group(rng, TRAIN).turns[0])
        else:
            turns.append(classify_group(rng, TRAIN).turns[0])
    return turns


def _noise(rng: random.Random) -> str:
    sentences = []
    for _ in range(rng.randint(1, 4)):
        words = [rng.choice(_NOISE) for _ in range(rng.randint(3, 10))]
        sentences.append(" ".join(words).capitalize() + rng.choice(".!."))
    return " ".join(sentences)


def _lead(rng: random.Random, split: Split) -> str:
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(_PLAIN)
    if kind < 0.75:
        names = _NAMES_HELD if split == HELD else _NAMES
        return rng.choice(_PERSONA).format(n=rng.choice(names), j=rng.choice(_JOBS))
    return _noise(rng)


def system_prompt(rng: random.Random, split: Split) -> tuple[str, Style]:
    """A system prompt ("" for none) and the reply style it asks for."""
    kind = rng.random()
    if kind < 0.3:
        return "", "sentence"
    if kind < 0.6:
        return _lead(rng, split), "sentence"
    # More often in training: that a prompt asks for short replies is learnt late.
    if kind < (0.8 if split == TRAIN else 0.7):
        lead = _lead(rng, split) + " " if rng.random() < 0.5 else ""
        return lead + rng.choice(_SHORT), "short"
    style: Style = "short" if rng.random() < (0.4 if split == TRAIN else 0.25) else "sentence"
    parts = [_lead(rng, split) if rng.random() < 0.8 else "", rng.choice(_FEW)]
    if style == "short":
        parts[0] = rng.choice(_SHORT)
    marks = rng.choice(
        (("Q: ", "A: "), ("Q: ", "A: "), ("User: ", "Assistant: "), ("Question: ", "Answer: "))
    )
    lines = [f"{marks[0]}{turn.user}\n{marks[1]}{turn.reply}" for turn in _examples(rng, style)]
    head = " ".join(part for part in parts if part)
    return "\n".join([head, *lines] if head else lines), style

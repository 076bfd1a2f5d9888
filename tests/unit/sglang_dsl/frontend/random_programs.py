"""Random programs: made from a seed, played on either face of a state, and foretold by a reference on plain
strings. A program is a list of steps; a step is a tuple that begins with its word.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import random
from typing import Any

import sglang_dsl as sgl
from sglang_dsl.backends.base import Call, ChoiceCall
from sglang_dsl.backends.mock import _flat
from sglang_dsl.interpreter.joins import MODES, joined_values

Steps = list[tuple[Any, ...]]
NAMES = "abcde"
OPTIONS = ("yes", "no", "maybe so", "north", "northwest")
CHOOSING = ("race", "first_valid", "best_of", "vote", "map", "cancel", "leave")
METHODS = (
    "token_length_normalized",
    "greedy_token_selection",
    "unconditional_likelihood_normalized",
    "exact_string_likelihood",
)


class Boom(Exception):
    """A program's own exception."""


def _digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def reply_to(text: str, index: int = 0) -> str:
    """What the model says after `text`."""
    number = _digest(text, index)
    return "".join("abcdef gh"[(number >> 4 * at) % 9] for at in range(2 + number % 9))


def score_of(text: str, option: str) -> float:
    return -(_digest(text, option) % 10_000) / 1000 - 0.001


def plain_mock(seed: int = 0) -> sgl.MockBackend:
    rng = random.Random(seed)

    def reply(call: Call) -> list[str]:
        text = _flat(call.prompt)
        if call.constraint is not None:
            return ["42"] * call.n
        return [reply_to(text, index) for index in range(call.n)]

    def score(call: ChoiceCall, option: str) -> list[float]:
        return [score_of(_flat(call.prompt), option)]

    return sgl.MockBackend(replies=reply, scores=score, split=rng.randint(1, 6))


class Maker:
    """`safe`: only steps whose outcome is certain, for the reference."""

    def __init__(self, seed: int, *, safe: bool = False) -> None:
        self.rng, self.safe = random.Random(seed), safe
        self.left = self.rng.randint(3, 14)

    def steps(self, role: str | None = None, depth: int = 0) -> Steps:
        return [self.step(role, depth) for _ in range(self.rng.randint(1, 4)) if self.left > 0]

    def step(self, role: str | None, depth: int) -> tuple[Any, ...]:
        self.left -= 1
        rng = self.rng
        words = ["text"] * 4 + ["gen"] * 8 + ["select"] * 3 + ["read"] * 2 + ["set"]
        if depth < 3:
            words += ["fork"] * 4 + ["scope", "copy", "back", "nested"] + ([] if role else ["turn", "turn"])
            if not self.safe:
                words += ["guard", "guard", "choose", "choose", "choose"]
        if not self.safe:
            words += ["cancel", "whole", "usage", "raise", "sleep", "iterate"]
        word = rng.choice(words)
        name = rng.choice(NAMES)
        match word:
            case "text":
                return ("text", f"t{rng.randint(0, 99)} ")
            case "gen":
                return ("gen", name if rng.random() < 0.9 else None, self.words())
            case "select":
                options = rng.sample(OPTIONS, rng.randint(1, 4))
                method = rng.choice(METHODS[:2] if self.safe else METHODS)
                drawn = not self.safe and method != METHODS[1] and rng.random() < 0.3
                return ("select", name, options, method, 1.0 if drawn else 0.0)
            case "set":
                return ("set", name, rng.randint(0, 9))
            case "turn":
                who = rng.choice(("user", "assistant", "system"))
                if rng.random() < 0.5:
                    return ("said", who, f"q{rng.randint(0, 9)}", name)
                return ("turn", who, self.steps(who, depth + 1))
            case "scope" | "guard" | "copy" | "back":
                return (word, name, self.steps(role, depth + 1), rng.random() < 0.4)
            case "nested":
                return ("nested", name, self.steps(None, depth + 1))
            case "fork":
                parts = [self.steps(role, depth + 1) for _ in range(rng.randint(1, 3))]
                modes = [mode for mode in MODES if mode != "error" or not self.safe]
                return ("fork", parts, rng.choice(modes), rng.random() < 0.1 and not self.safe)
            case "choose":
                parts = [self.steps(role, depth + 1) for _ in range(rng.randint(1, 4))]
                return ("choose", parts, rng.choice(CHOOSING), name, rng.random() < 0.5)
            case _:
                return (word, name)

    def words(self) -> dict[str, Any]:
        rng, found = self.rng, dict[str, Any]()
        if rng.random() < 0.15:
            found["n"] = rng.randint(2, 3)
        if rng.random() < 0.1 and not self.safe:
            found["regex"] = r"\d\d"
        elif rng.random() < 0.1 and not self.safe:
            found["dtype"] = int
        if rng.random() < 0.15 and not self.safe:
            found["timeout"] = 0.01
        if rng.random() < 0.1 and not self.safe and "n" not in found:
            found["stop"] = " "
        return found


async def given(value: Any) -> Any:
    """A value of either face."""
    return await value if inspect.isawaitable(value) else value


def driven(work: Any) -> Any:
    """The result of playing on an ordinary state, where nothing is awaited."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("an ordinary state gave something to await")


def program_of(steps: Steps, *, is_async: bool) -> Any:
    if is_async:

        @sgl.function
        async def aprogram(s: Any) -> str:
            await play(s, steps)
            return "ended"

        return aprogram

    @sgl.function
    def program(s: Any) -> str:
        driven(play(s, steps))
        return "ended"

    return program


async def play(s: Any, steps: Steps) -> None:
    for step in steps:
        await play_one(s, step)


async def play_one(s: Any, step: tuple[Any, ...]) -> None:
    match step:
        case ("text", text):
            s += text
        case ("gen", name, words):
            s += sgl.gen(name, **words)
        case ("select", name, options, method, temperature):
            s += sgl.select(name, options, temperature, method)
        case ("set", name, value):
            s[name] = value
        case ("said", role, text, name):
            s += s.role(role, text + sgl.gen(name))
        case ("turn", role, inner):
            with s.role(role):
                await play(s, inner)
        case ("scope", name, inner, _):
            with s.var_scope(name):
                await play(s, inner)
        case ("guard", _, inner, _):
            with contextlib.suppress(sgl.SglError, Boom):
                await play(s, inner)
        case ("copy", _, inner, _):
            if isinstance(s, sgl.AsyncProgramState):
                async with s.copy() as other:
                    await play(other, inner)
            else:
                with s.copy() as other:
                    await play(other, inner)
        case ("back", name, inner, cancelled):
            if cancelled:
                await given(s.sync())  # what was said before is not to be cancelled
            there = s.checkpoint()
            try:
                await play(s, inner)
            finally:
                if cancelled:
                    s.cancel()
                s.rollback(there)
        case ("nested", name, inner):
            program = program_of(inner, is_async=isinstance(s, sgl.AsyncProgramState))
            made = await given(program())
            s[name] = await given(made.text())
        case ("fork", parts, mode, cancelled):
            forks = s.fork(len(parts))
            for fork, inner in zip(forks, parts, strict=True):
                await play(fork, inner)
            if cancelled:
                forks.cancel()
            await given(forks.join(mode))
        case ("choose", parts, how, name, adopted):
            await choose(s, parts, how, name, adopted)
        case ("read", name):
            if name in s:
                await given(s[name])
        case _:
            await look(s, *step)


async def look(s: Any, word: str, name: str) -> None:
    match word:
        case "cancel":
            s.cancel()
        case "whole":
            await given(s.text())
            await given(s.messages())
        case "usage":
            await given(s.usage())
        case "sleep":
            if isinstance(s, sgl.AsyncProgramState):
                await asyncio.sleep(0.001)
        case "raise":
            raise Boom(name)
        case "iterate":
            if name not in s:
                return
            if isinstance(s, sgl.AsyncProgramState):
                async for _ in s.text_iter(name):
                    break
            else:
                next(s.text_iter(name), None)


async def choose(s: Any, parts: list[Steps], how: str, name: str, adopted: bool) -> None:
    if how == "map":
        await given(s.map(_mapped if isinstance(s, sgl.AsyncProgramState) else _mapped_here, parts))
        return
    forks = s.fork(len(parts), budget=sgl.Budget(calls=3) if adopted else None)
    try:
        for fork, inner in zip(forks, parts, strict=True):
            await play(fork, inner)
    except BaseException:
        forks.cancel()
        raise
    winner = None
    match how:
        case "race":
            winner = await given(forks.race(timeout=0.5))
        case "first_valid":
            winner = await given(forks.first_valid(lambda one: name in one, timeout=0.5))
        case "best_of":
            winner = await given(forks.best_of(lambda one: float(name in one), timeout=0.5))
        case "vote":
            await given(forks.vote(name, key=str))
        case "cancel":
            forks.cancel()
    if winner is not None and adopted:
        await given(s.adopt(winner))


async def _mapped(fork: Any, steps: Steps) -> None:
    await play(fork, steps)
    await fork.sync()


def _mapped_here(fork: Any, steps: Steps) -> None:
    driven(play(fork, steps))
    fork.sync()


# -- what a safe program must say ---------------------------------------------------------------------------


class Reference:
    """The same on plain strings."""

    def __init__(self, text: str = "", values: dict[str, Any] | None = None) -> None:
        self.text, self.values = text, values or {}

    def play(self, steps: Steps) -> Reference:
        for step in steps:
            self.one(step)
        return self

    def one(self, step: tuple[Any, ...]) -> None:
        match step:
            case ("text", text):
                self.text += text
            case ("gen", name, words):
                texts = [reply_to(self.text, index) for index in range(words.get("n", 1))]
                self.text += texts[0]
                if name is not None:
                    self.values[name] = texts if "n" in words else texts[0]
            case ("select", name, options, _, _):
                self.values[name] = max(options, key=lambda option: score_of(self.text, option))
                self.text += self.values[name]
            case ("set", name, value):
                self.values[name] = value
            case ("said", role, text, name):
                self.play([("turn", role, [("text", text), ("gen", name, {})])])
            case ("turn", role, inner):
                self.text += f"{role.upper()}: "
                self.play(inner)
                self.text += "\n"
            case ("scope", name, inner, _):
                begin = len(self.text)
                self.values[name] = self.play(inner).text[begin:]
            case ("back", _, inner, _):
                pass
            case ("nested", name, inner):
                self.values[name] = Reference().play(inner).text
            case ("copy", _, inner, _):
                self.join([inner], "gather_variable")
            case ("fork", parts, mode, _):
                self.join(parts, mode)

    def join(self, parts: list[Steps], mode: str) -> None:
        ends = [Reference(self.text, dict(self.values)).play(inner) for inner in parts]
        if mode == "concate_and_append":
            self.text += "".join(end.text[len(self.text) :] for end in ends)
        else:
            own = [set_by(inner) for inner in parts]
            found = [{n: end.values[n] for n in names} for end, names in zip(ends, own, strict=True)]
            self.values.update(joined_values(mode, found, self.values))


def set_by(steps: Steps) -> list[str]:
    """The names that steps set, in order."""
    found: dict[str, None] = {}
    for step in steps:
        match step:
            case ("gen" | "select" | "set" | "nested", str() as name, *_):
                found[name] = None
            case ("said", _, _, name):
                found[name] = None
            case ("turn", _, inner):
                found |= dict.fromkeys(set_by(inner))
            case ("scope", name, inner, _):
                found |= dict.fromkeys([*set_by(inner), name])
            case ("copy", _, inner, _):
                found |= dict.fromkeys(set_by(inner))
            case ("fork", parts, mode, _) if mode != "concate_and_append":
                found |= dict.fromkeys(name for inner in parts for name in set_by(inner))
    return list(found)

"""The generated corpus: conversations that mix all tasks, and a little completion text.

A document is a list of (text, learn) pieces. The module knows the mix of tasks; the wordings live
in `tasks/`, the system prompts in `systems.py`, and tokens nowhere here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from examples.pocket.chat import Message, segments
from examples.pocket.systems import THINK_SYSTEM, system_prompt
from examples.pocket.tasks import TRAIN, Group, Split, Style, Turn, invented
from examples.pocket.tasks.classify import classify_group
from examples.pocket.tasks.extract import extract_group
from examples.pocket.tasks.facts import fact_group, record_group
from examples.pocket.tasks.numbers import arithmetic_group, small_sum_group, sum_lines, think_group
from examples.pocket.tasks.talk import greeting_group, identity_group
from examples.pocket.tasks.tools import TOOLS, tool_group
from examples.pocket.tasks.unknown import unknown_group

__all__ = ["MIX", "Conversation", "conversation", "document", "documents"]

Document = list[tuple[str, bool]]

MIX: dict[str, float] = {
    # kinds of document
    "doc_tools": 0.13,
    "doc_sums": 0.1,
    "doc_completion": 0.04,
    "doc_copies": 0.1,
    "doc_styles": 0.12,
    # kinds of group inside a conversation
    "facts": 0.25,
    "arithmetic": 0.25,
    "classify": 0.13,
    "extract": 0.22,
    "think": 0.15,
    "record": 0.1,
    "small_sums": 0.06,
    "greeting": 0.08,
    "identity": 0.1,
    "unknown": 0.2,
    "repeat": 0.03,
}


@dataclass
class Conversation:
    """Messages with the turns they came from (`turns[i]` is answered by the i-th assistant message)."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def add(self, group: Group) -> None:
        """Appends a group's questions and replies."""
        for turn in group.turns:
            self.messages.append({"role": turn.role, "content": turn.user})
            self.messages.append({"role": "assistant", "content": turn.reply})
            self.turns.append(turn)


def _repeat_group(rng: random.Random, split: Split) -> Group:
    names = " ".join(invented(rng, split, "person") for _ in range(rng.randint(1, 3)))
    asked = rng.choice(("Repeat {n}.", "Say {n}.", "Please repeat: {n}.", "Write {n}."))
    return Group((Turn("repeat", asked.format(n=names), names),))


def _group(
    rng: random.Random, split: Split, kind: str, style: Style, think: bool = False, tools: bool = False
) -> Group:
    if kind == "facts":
        return fact_group(rng, split, style)
    if kind == "arithmetic":
        return arithmetic_group(rng, split, rng.choice((1, 1, 2, 4)))
    if kind == "small_sums":
        return small_sum_group(rng, split, rng.choice((1, 1, 2)))
    if kind == "unknown":
        return unknown_group(rng, split, style, tools)
    if kind == "repeat":
        return _repeat_group(rng, split)
    if kind == "think":
        return think_group(rng, split, asked=not think or rng.random() < 0.3)
    plain: dict[str, Callable[[random.Random, Split], Group]] = {
        "classify": classify_group,
        "extract": extract_group,
        "record": record_group,
        "greeting": greeting_group,
        "identity": identity_group,
    }
    return plain[kind](rng, split)


KINDS = tuple(kind for kind in MIX if not kind.startswith("doc_"))


def conversation(
    rng: random.Random,
    split: Split,
    groups: int,
    tools: bool = False,
    mix: dict[str, float] | None = None,
    first: str | None = None,
) -> Conversation:
    """A conversation of some groups of tasks; `first` fixes the kind of the last one."""
    weights = mix or MIX
    system, style = system_prompt(rng, split)
    think = not tools and rng.random() < 0.08
    if think:
        system = rng.choice(THINK_SYSTEM)
        style = "sentence"
    made = Conversation()
    if system:
        made.messages.append({"role": "system", "content": system})
    names: list[str] = rng.sample(list(TOOLS), rng.randint(1, 3)) if tools else []
    made.tools = [TOOLS[name] for name in names]
    for index in range(groups):
        last = index == groups - 1
        if last and first:
            kind = first
        elif tools and rng.random() < 0.7:
            kind = "tool"
        elif think and rng.random() < 0.5:
            kind = "think"
        else:
            kind = rng.choices(KINDS, [weights[k] for k in KINDS])[0]
        if kind == "tool":
            made.add(tool_group(rng, split, rng.choice(names)))
        else:
            made.add(_group(rng, split, kind, style, think, tools))
    return made


def _completion(rng: random.Random) -> Document:
    """Plain `Q: ... A: ...` text outside the chat format."""
    marks = rng.choice((("Q: ", "A: "), ("Question: ", "Answer: ")))
    pieces: Document = []
    for _ in range(rng.randint(2, 5)):
        kind = rng.choice(("facts", "facts", "arithmetic", "classify"))
        turn = _group(rng, TRAIN, kind, "sentence").turns[0]
        pieces += [(f"{marks[0]}{turn.user}\n{marks[1].rstrip()}", False), (f" {turn.reply}\n", True)]
    return [*pieces, ("<|endoftext|>", True)]


def _sums(rng: random.Random) -> Document:
    """Bare sums, one a line: the densest practice in carrying."""
    pieces: Document = []
    for question, result in sum_lines(rng, TRAIN, rng.randint(8, 16)):
        pieces += [(question, False), (result, True)]
    return [*pieces, ("<|endoftext|>", False)]


def _copies(rng: random.Random) -> Document:
    """A list of made-up names written two to four times: practice in copying what was never seen."""
    names = [invented(rng, TRAIN, "person") for _ in range(rng.randint(1, 9))]
    mark = rng.choice((", ", " ", "\n", '", "'))
    text = mark.join(names) + "\n"
    pieces: Document = [(text, False), (text, True)]
    while rng.random() < 0.4 and len(pieces) < 4:
        names = rng.sample(names, len(names))
        pieces.append((mark.join(names) + "\n", True))
    return [*pieces, ("<|endoftext|>", False)]


def _styles(rng: random.Random) -> Document:
    """One question behind a system prompt, which alone says how long the reply is: the densest practice in
    telling "Answer in one word." from "Answer in one short sentence."."""
    system, style = system_prompt(rng, TRAIN)
    while style == "sentence" and rng.random() < 0.6:  # both lengths about as often
        system, style = system_prompt(rng, TRAIN)
    turn = fact_group(rng, TRAIN, style, people=0.4).turns[0]
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": turn.user})
    return segments([*messages, {"role": "assistant", "content": turn.reply}])


def document(rng: random.Random, mix: dict[str, float] | None = None) -> Document:
    """One training document."""
    weights = mix or MIX
    kind = rng.random()
    if kind < weights["doc_sums"]:
        return _sums(rng)
    kind -= weights["doc_sums"]
    if kind < weights["doc_completion"]:
        return _completion(rng)
    kind -= weights["doc_completion"]
    if kind < weights["doc_copies"]:
        return _copies(rng)
    kind -= weights["doc_copies"]
    if kind < weights["doc_styles"]:
        return _styles(rng)
    kind -= weights["doc_styles"]
    tools = kind < weights["doc_tools"]
    # A list of tools is long, so more is asked after it.
    groups = rng.randint(3, 9) if tools else rng.randint(1, 5)
    if rng.random() < 0.012:
        groups = rng.randint(10, 18)
    made = conversation(rng, TRAIN, groups, tools, weights)
    return segments(made.messages, made.tools)


def documents(seed: int, mix: dict[str, float] | None = None) -> Iterator[Document]:
    """An endless, seeded stream of training documents."""
    rng = random.Random(seed)
    while True:
        yield document(rng, mix)

"""Held-out evaluation items for any seed, and how a reply is judged.

An item is a prompt (a conversation without its last reply) and the right reply. The module does not
know what answers the prompts; see `evaluate.py`.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from examples.pocket.chat import Message, render
from examples.pocket.corpus import conversation
from examples.pocket.tasks import HELD, Turn

__all__ = ["TARGETS", "Item", "correct", "items"]

TARGETS: dict[str, float] = {
    "facts": 0.95,
    "followup": 0.90,
    "arithmetic": 0.95,
    "sentiment": 0.95,
    "topic": 0.95,
    "extract": 0.90,
    "tool_call": 0.90,
    "tool_answer": 0.90,
    "think": 0.90,
    "record": 0.90,
    "small_sums": 0.95,
    "greeting": 0.95,
    "identity": 0.95,
    "unknown": 0.95,
}
_FIRST = {"followup": "facts", "sentiment": "classify", "topic": "classify"}


@dataclass(frozen=True)
class Item:
    """One question with its context, as messages and as the text to be continued."""

    turn: Turn
    messages: tuple[Message, ...]
    prompt: str

    @property
    def task(self) -> str:
        """The task the reply is counted under."""
        return self.turn.task


def _item(rng: random.Random, task: str) -> Item | None:
    tools = task.startswith("tool") or rng.random() < 0.15
    groups = rng.choice((1, 1, 1, 2, 3))
    first = "tool" if task.startswith("tool") else _FIRST.get(task, task)
    made = conversation(rng, HELD, groups, tools, first=first)
    where = [i for i, turn in enumerate(made.turns) if turn.task == task]
    if not where:
        return None
    turn = made.turns[where[-1]]
    lead = len(made.messages) - 2 * len(made.turns)
    messages = made.messages[: lead + 2 * where[-1] + 1]
    if lead and len(turn.reply) > 3 and turn.reply in str(messages[0]["content"]):
        return None  # a few-shot example that gives the answer away
    return Item(turn, tuple(messages), render(messages, made.tools))


def items(seed: int, per_task: int, tasks: tuple[str, ...] = tuple(TARGETS)) -> list[Item]:
    """`per_task` held-out items of every task; the same list for the same seed."""
    found: list[Item] = []
    for task in tasks:
        rng, count = random.Random(f"{seed}/{task}"), 0
        while count < per_task:
            item = _item(rng, task)
            if item is not None:
                found.append(item)
                count += 1
    return found


def correct(item: Item, reply: str) -> bool:
    """Numbers are judged by the last number of the reply, everything else by exact text."""
    if item.turn.final:
        numbers = re.findall(r"\d+", reply)
        return bool(numbers) and numbers[-1] == item.turn.final
    return reply.strip() == item.turn.reply

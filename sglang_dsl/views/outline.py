"""What views show: a snapshot's turns, loose text, and forks where they were joined; and what a generation
must match. Knows no way of showing it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.ir import Gen, Select
from sglang_dsl.views.snapshot import ForkSnapshot, Snapshot


@dataclass(frozen=True, slots=True)
class Block:
    """A turn of `role`, or loose text (None): its texts and media, in order; never empty."""

    role: str | None
    entries: tuple[Transcript, ...]


@dataclass(frozen=True, slots=True)
class Branches:
    """What each branch of a fork said. `states`: how each stands."""

    branches: tuple[tuple[Block | Branches, ...], ...]
    states: tuple[Snapshot, ...]


def outline(state: Snapshot) -> tuple[Block | Branches, ...]:
    """All that was said after `state.since`, in order, what is under way last. Forks that were joined stand
    where that was, the others where they were forked; where that is not among what was said, at the end."""
    parts: list[Block | Branches] = []
    held: list[Transcript] = []
    role = state.since.role
    waiting: dict[int, list[ForkSnapshot]] = {}
    for fork in state.forks:
        waiting.setdefault(id(fork.at), []).append(fork)
    said = state.transcript.say(state.partial, chosen="") if state.partial else state.transcript

    def release() -> None:
        if any(entry.plain or entry.chosen is not None for entry in held):
            parts.append(Block(role, tuple(held)))
        held.clear()

    def branches_here(at: Transcript) -> None:
        if (forks := waiting.pop(id(at), None)) is not None:
            release()
            parts.extend(map(_branches, forks))

    branches_here(state.since)
    for entry in said.entries(state.since):
        if entry.kind in ("open", "close"):
            release()
            role = entry.role
        else:
            held.append(entry)
        branches_here(entry)
    release()
    parts += map(_branches, (fork for forks in waiting.values() for fork in forks))
    return tuple(parts)


def _branches(fork: ForkSnapshot) -> Branches:
    return Branches(tuple(map(outline, fork.branches)), fork.branches)


class Constraint(NamedTuple):
    """kind: int, regex, json_schema, a type's name, ...; text: the pattern, schema or options, "" where the
    kind says it all."""

    kind: str
    text: str = ""


def constraint_of(node: Gen[Any] | Select | None) -> Constraint | None:
    """None where the text is free."""
    if node is None:
        return None
    if isinstance(node, Select):
        return Constraint("select", " | ".join(node.choices))
    held = next(
        (
            Constraint(word, value)
            for word in ("regex", "json_schema", "ebnf", "structural_tag")
            if (value := getattr(node, word)) is not None
        ),
        None,
    )
    if held is None and node.choices is not None:
        held = Constraint("choices", " | ".join(node.choices))
    if node.typed is not None:
        return Constraint(node.typed.name, "" if held is None else held.text)
    return Constraint(node.dtype) if node.dtype is not None and held is None else held

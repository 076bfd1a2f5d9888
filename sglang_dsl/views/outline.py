"""A snapshot as what is shown of it: turns, loose text, and forks where they were joined. Knows no way of
showing it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dsl.conversation.transcript import Transcript
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

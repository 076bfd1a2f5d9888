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
    """What each branch of a fork said."""

    branches: tuple[tuple[Block | Branches, ...], ...]


def outline(state: Snapshot) -> tuple[Block | Branches, ...]:
    """All that was said after `state.since`, in order. Forks that were joined stand where that was, those
    that still run at the end."""
    parts: list[Block | Branches] = []
    held: list[Transcript] = []
    role = state.since.role
    waiting = [fork for fork in state.forks if fork.joined]
    running = [fork for fork in state.forks if not fork.joined and any(b.running for b in fork.branches)]

    def release() -> None:
        if any(entry.plain or entry.chosen is not None for entry in held):
            parts.append(Block(role, tuple(held)))
        held.clear()

    def branches_here(at: Transcript) -> None:
        while waiting and waiting[0].at is at:
            release()
            parts.append(_branches(waiting.pop(0)))

    branches_here(state.since)
    for entry in state.transcript.entries(state.since):
        if entry.kind in ("open", "close"):
            release()
            role = entry.role
        else:
            held.append(entry)
        branches_here(entry)
    release()
    parts += map(_branches, (*waiting, *running))
    return tuple(parts)


def _branches(fork: ForkSnapshot) -> Branches:
    return Branches(tuple(map(outline, fork.branches)))

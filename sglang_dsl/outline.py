"""A state's transcript as what is shown of it: turns, loose text, and forks where they were joined. Knows no
way of showing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_dsl.feed import Mark
from sglang_dsl.transcript import Transcript

Joined = Sequence[tuple[Mark, list[tuple[Transcript, Transcript]]]]
"""Where branches were joined, with each one's transcript at its fork and at its end."""


@dataclass(frozen=True, slots=True)
class Block:
    """A turn of `role`, or loose text (None): its texts and media, in order; never empty."""

    role: str | None
    entries: tuple[Transcript, ...]


@dataclass(frozen=True, slots=True)
class Branches:
    """What each branch of a fork said."""

    branches: tuple[tuple[Block | Branches, ...], ...]


def outline(
    transcript: Transcript, since: Transcript = Transcript.EMPTY, joined: Joined = ()
) -> tuple[Block | Branches, ...]:
    """All that was said after `since`, in order."""
    parts: list[Block | Branches] = []
    held: list[Transcript] = []
    role = since.role
    waiting = list(joined)

    def release() -> None:
        if any(entry.plain or entry.chosen is not None for entry in held):
            parts.append(Block(role, tuple(held)))
        held.clear()

    def branches_here(at: Transcript) -> None:
        while waiting and waiting[0][0].transcript is at:
            release()
            parts.append(_branches(waiting.pop(0)[1]))

    branches_here(since)
    for entry in transcript.entries(since):
        if entry.kind in ("open", "close"):
            release()
            role = entry.role
        else:
            held.append(entry)
        branches_here(entry)
    release()
    parts += [_branches(rest) for _, rest in waiting]
    return tuple(parts)


def _branches(branches: list[tuple[Transcript, Transcript]]) -> Branches:
    return Branches(tuple(outline(end, begin) for begin, end in branches))

"""TagMatcher: the Matcher of tagged text, over the parser threads of `runtime.grammar.tags.tagged_text`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from runtime.grammar.backtracking import BacktrackingMatcher
from runtime.grammar.base import Origin
from runtime.grammar.masks.token_bits import Cache
from runtime.grammar.tags.tag_space import TagSpace
from runtime.grammar.tags.tagged_text import (
    Candidates,
    InLeaf,
    InLiteral,
    InText,
    Machine,
    Part,
    Runs,
    Threads,
)
from runtime.plan import TokenMask
from runtime.protocol.errors import BadConstraint

_FORCED = 4096
_MASKS = 1024


class TagProgram:
    """What all matchers of one tag share, with the masks of states outside of constrained parts."""

    def __init__(self, part: Part, space: TagSpace, origin: Origin) -> None:
        self.part, self.space, self.origin = part, space, origin
        self.candidates = Candidates(space)
        self.masks: Cache[TokenMask] = Cache(_MASKS)


class _State(NamedTuple):
    """The threads, whether the text has ended, and the number of runs."""

    now: Threads
    stopped: bool
    runs: int


class TagMatcher(BacktrackingMatcher[_State]):
    """A position in tagged text. After an eos only an eos may follow, which changes nothing."""

    def __init__(self, program: TagProgram, machine: Machine, now: Threads) -> None:
        super().__init__(program.space.bits)
        self._program, self._machine, self._now = program, machine, now
        self._stopped = False
        self.origin = program.origin

    @classmethod
    def start(cls, program: TagProgram) -> TagMatcher:
        """A matcher at the beginning, with its first mask. Raises BadConstraint if nothing can match."""
        machine = Machine(Runs())
        matcher = cls(program, machine, machine.begin(program.part))
        if not program.space.bits.count(matcher.mask()) and not matcher.may_stop():
            raise BadConstraint("nothing that the vocabulary spells matches", where="structural_tag")
        return matcher

    def advance(self, token: int) -> bool:
        bits = self._program.space.bits
        if token in self._forbidden or not 0 <= token < bits.width:
            return False
        if token in bits.vocabulary.eos:
            return self._go(self._now, token, stopped=True) if self.may_stop() else False
        data = bits.texts[token]
        return bool(data) and self._follow(data, token)

    def advance_bytes(self, data: bytes) -> bool:
        return self._follow(data, None)

    def _follow(self, data: bytes, token: int | None) -> bool:
        if self._stopped:
            return self._go(self._now, token, stopped=True) if not data else False
        mark = self._machine.runs.next
        after = self._machine.follow(self._now, data)
        return False if after is None else self._go(after, token, mark=mark)

    def _go(self, now: Threads, token: int | None, *, stopped: bool = False, mark: int | None = None) -> bool:
        runs = self._machine.runs.next if mark is None else mark
        kept = self._mask if now is self._now and not stopped and not self._forbidden else None
        self._done(_State(self._now, self._stopped, runs), token)
        self._now, self._stopped, self._mask = now, stopped, kept
        return True

    def _allowed(self) -> TokenMask:
        if self._stopped:
            return self._bits.stop_only
        if any(isinstance(thread, InLeaf) for thread in self._now.threads):
            return self._compute()
        return self._program.masks.get(self._now, self._compute)

    def _compute(self) -> TokenMask:
        space, machine, now = self._program.space, self._machine, self._now
        sure = np.zeros(space.bits.word_count, dtype=np.uint32)
        unsure = np.zeros(space.bits.word_count, dtype=np.uint32)
        for thread in now.threads:
            for some in self._program.candidates.look(thread, machine.runs, sure):
                unsure |= some
        unsure &= ~sure
        for token in machine.sift(now, space.in_order(unsure)) if unsure.any() else ():
            sure[token >> 5] |= np.uint32(1 << (token & 31))
        if now.whole:
            sure |= space.bits.stop_only.bits
        return space.bits.seal(sure)

    def forced_bytes(self) -> bytes:
        return b"" if self._stopped or self._forbidden else self._machine.forced(self._now, _FORCED)

    def likely_bytes(self) -> bytes:
        """The rest of the literal, or the end of the free text, after which the fewest parts follow."""
        ways: dict[int, bytes] = {}
        for thread in () if self._stopped else self._now.threads:
            left, rest = 0, thread.rest
            while rest is not None:
                left, rest = left + 1, rest.after
            match thread:
                case InText(text=text) if text.exits and not text.may_end:
                    ways[left] = text.exits[0].data
                case InLiteral(data=data, at=at):
                    ways[left] = data[at:]
        return ways[min(ways)] if ways else b""

    def may_stop(self) -> bool:
        return self._stopped or self._now.whole

    def is_terminated(self) -> bool:
        return self._stopped or (self._now.whole and not self._now.threads)

    def _return(self, state: _State, steps: int) -> None:
        self._machine.runs.restore(state.now)
        self._machine.runs.forget(state.runs)
        self._now, self._stopped = state.now, state.stopped

    def copy(self) -> TagMatcher:
        twin = TagMatcher(self._program, Machine(self._machine.runs.copy()), self._now)
        twin._stopped = self._stopped
        return twin._with_steps_of(self)

    def undoable(self) -> int:
        """The steps since the beginning of the current part whose language is wider than its constraint."""
        wide = [
            thread.depth
            for thread in self._now.threads
            if isinstance(thread, InLeaf) and not thread.leaf.first.origin.exact
        ]
        return max(wide) + 1 if wide else 0

    def _reason(self) -> str:
        return "no valid content of this tag goes on from here"

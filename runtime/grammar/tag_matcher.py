"""TagMatcher: the Matcher of tagged text, over the threads of `runtime.grammar.tagged_text`."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np

from runtime.grammar.base import Matcher, Origin, Rejection, earliest
from runtime.grammar.tag_space import TagSpace
from runtime.grammar.tagged_text import Candidates, InLeaf, Machine, Now, Part, Runs
from runtime.plan import TokenMask
from runtime.protocol.errors import BadConstraint

_FORCED = 4096
_MASKS = 1024


class TagProgram:
    """What all matchers of one text share. Masks of places outside of constrained parts are kept, at most
    _MASKS of them."""

    def __init__(self, part: Part, space: TagSpace, origin: Origin) -> None:
        self.part, self.space, self.origin = part, space, origin
        self.candidates = Candidates(space)
        self._masks: OrderedDict[Hashable, TokenMask] = OrderedDict()
        self._lock = threading.Lock()

    def mask(self, place: Hashable, make: Callable[[], TokenMask]) -> TokenMask:
        """The mask of `place`, which `make` makes if it is not kept."""
        with self._lock:
            found = self._masks.get(place)
        if found is None:
            found = make()
            with self._lock:
                self._masks[place] = found
                if len(self._masks) > _MASKS:
                    self._masks.popitem(last=False)
        return found


class _Step(NamedTuple):
    """What was before one successful call. `token` it took (None: text), `mask` then, if it was asked for,
    `forbidden` there, `runs` that existed."""

    now: Now
    stopped: bool
    token: int | None
    mask: TokenMask | None
    forbidden: frozenset[int]
    runs: int
    before: _Step | None


class TagMatcher(Matcher):
    """A place in tagged text. After an eos only an eos may follow, which changes nothing."""

    def __init__(self, program: TagProgram, machine: Machine, now: Now) -> None:
        self._program, self._machine, self._now = program, machine, now
        self.vocabulary = self._program.space.bits.vocabulary
        self._last: _Step | None = None
        self._stopped = False
        self._mask: TokenMask | None = None
        self._forbidden: frozenset[int] = frozenset()
        self.origin = program.origin

    @classmethod
    def start(cls, program: TagProgram) -> TagMatcher:
        """At the beginning, its first mask made. Raises BadConstraint where nothing can match."""
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
            return self._done(self._now, token, stopped=True) if self.may_stop() else False
        data = bits.texts[token]
        return bool(data) and self._follow(data, token)

    def advance_bytes(self, data: bytes) -> bool:
        return self._follow(data, None)

    def _follow(self, data: bytes, token: int | None) -> bool:
        if self._stopped:
            return self._done(self._now, token, stopped=True) if not data else False
        mark = self._machine.runs.next
        after = self._machine.follow(self._now, data)
        return False if after is None else self._done(after, token, mark=mark)

    def _done(self, now: Now, token: int | None, *, stopped: bool = False, mark: int | None = None) -> bool:
        runs = self._machine.runs.next if mark is None else mark
        step = _Step(self._now, self._stopped, token, self._mask, self._forbidden, runs, self._last)
        self._last, self._stopped = step, stopped
        if now is not self._now or self._forbidden:
            self._mask = None
        self._now, self._forbidden = now, frozenset()
        return True

    def mask(self) -> TokenMask:
        bits = self._program.space.bits
        if self._stopped:
            return bits.stop_only
        if self._mask is None:
            mask = self._shared_mask()
            self._mask = bits.without(mask, self._forbidden) if self._forbidden else mask
        return self._mask

    def _shared_mask(self) -> TokenMask:
        """The mask of this place; kept for others where no constrained part is under way."""
        if any(isinstance(thread, InLeaf) for thread in self._now.threads):
            return self._compute()
        return self._program.mask(self._now, self._compute)

    def _compute(self) -> TokenMask:
        space, machine, now = self._program.space, self._machine, self._now
        sure = np.zeros(space.bits.words, dtype=np.uint32)
        unsure = np.zeros(space.bits.words, dtype=np.uint32)
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

    def may_stop(self) -> bool:
        return self._stopped or self._now.whole

    def is_terminated(self) -> bool:
        return self._stopped or (self._now.whole and not self._now.threads)

    def rollback(self, steps: int) -> None:
        oldest = earliest(self._last, steps)
        if oldest is None:
            return
        self._machine.runs.restore(oldest.now)
        self._machine.runs.forget(oldest.runs)
        self._now, self._stopped, self._last = oldest.now, oldest.stopped, oldest.before
        self._mask, self._forbidden = oldest.mask, oldest.forbidden

    def copy(self) -> TagMatcher:
        twin = TagMatcher(self._program, Machine(self._machine.runs.copy()), self._now)
        twin._last, twin._stopped = self._last, self._stopped
        twin._mask, twin._forbidden = self._mask, self._forbidden
        return twin

    def undoable(self) -> int:
        """The steps since the part under way began whose language is wider than its constraint."""
        wide = [
            thread.depth
            for thread in self._now.threads
            if isinstance(thread, InLeaf) and not thread.leaf.first.origin.exact
        ]
        return max(wide) + 1 if wide else 0

    def verdict(self) -> Rejection | None:
        bits = self._program.space.bits
        if bits.count(self.mask()):
            return None
        reason = "no valid content of this tag goes on from here"
        back, step = 0, self._last
        while step is not None:
            back += 1
            if step.token is not None and (step.mask is None or bits.count(step.mask) > 1):
                return Rejection(back, reason)
            step = step.before
        return Rejection(0, reason)

    def retract(self, rejection: Rejection) -> None:
        step = self._last
        for _ in range(rejection.back - 1):
            step = step.before if step is not None else None
        if step is None or step.token is None:
            raise ValueError(f"there is no choice {rejection.back} steps back")
        self.rollback(rejection.back)
        self._forbidden |= {step.token}
        self._mask = None

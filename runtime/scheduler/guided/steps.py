"""The steps of a request's matcher, with the tokens of each, and how they are undone. The KV and the matcher
itself are the caller's."""

from __future__ import annotations

import time

from runtime.scheduler.requests.components import Guide, Mark, Replaced
from runtime.scheduler.requests.request import Request


def guide_of(request: Request) -> Guide:
    assert request.guide is not None, "a constrained request that runs has a guide"
    return request.guide


def mark(request: Request, token: int = -1) -> None:
    """The matcher made a step, by a sampled `token` or forced text; its tokens are appended next."""
    step = Mark(len(request.tokens), request.seen, request.decode_steps, request.jumped, token)
    guide_of(request).marks.append(step)


def drop_last(request: Request) -> None:
    """Take the last output token back; it has not been computed or sent. Other tokens for its text and the
    text forced behind it are appended next; cut() restores it."""
    guide = guide_of(request)
    if guide.marks:
        score = None if request.logprobs is None else request.logprobs.last()
        guide.replaced.append(Replaced(len(guide.marks), request.tokens[-1], score))
    _shorten(request, len(request.tokens) - 1)


def cut(request: Request, back: int) -> int:
    """Take the output of the last `back` steps back; returns how many tokens that were."""
    guide, before = guide_of(request), len(request.tokens)
    for _ in range(back):
        number = len(guide.marks)
        last = guide.marks.pop()
        _shorten(request, last.length)
        if guide.replaced and guide.replaced[-1].step == number:
            replaced = guide.replaced.pop()
            _shorten(request, last.length - 1)
            request.tokens.append(replaced.token)
            if request.logprobs is not None and replaced.score is not None:
                request.logprobs.restore(replaced.score)
        request.seen, request.decode_steps, request.jumped = last.seen, last.decode_steps, last.jumped
    if guide.missed[0] > len(guide.marks):
        guide.missed = (-1, 0)  # that step is another one now
    guide.pending = []
    for number in [one for one in guide.banned if one > len(guide.marks)]:
        del guide.banned[number]
    return before - len(request.tokens)


def _shorten(request: Request, length: int) -> None:
    guide = guide_of(request)
    request.shorten(length)
    guide.valid_length = min(guide.valid_length, length)


class Costs:
    """Divides CPU time among requests by the clock: reading a thread's CPU time is costly."""

    def __init__(self) -> None:
        self._cpu, self._at = time.thread_time(), time.perf_counter()
        self._seconds: list[tuple[Request, float]] = []

    @property
    def any(self) -> bool:
        """Whether anything was done."""
        return bool(self._seconds)

    def add(self, request: Request) -> None:
        """The work since the last call was for `request`."""
        now = time.perf_counter()
        self._seconds.append((request, now - self._at))
        self._at = now

    def charge(self) -> None:
        whole = sum([seconds for _, seconds in self._seconds])
        if whole > 0:
            share = (time.thread_time() - self._cpu) / whole
            for request, seconds in self._seconds:
                if request.guide is not None:
                    request.guide.seconds += seconds * share

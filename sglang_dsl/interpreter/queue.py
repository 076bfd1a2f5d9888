"""One state's queue, and the coroutine that does what is queued.

The user's thread only appends; the coroutine runs on the background loop while there is work and ends when
there is none, so that an idle state, or a dropped one, holds nothing. After a failure later nodes are skipped
and whoever reads one of their values gets the failure. What doing a node means is evaluator.py's.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Any

from sglang_dsl.concurrency.loop import background
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.interpreter.evaluator import Evaluator
from sglang_dsl.interpreter.run import Body, Item, RunInfo
from sglang_dsl.interpreter.variables import Mark
from sglang_dsl.ir import Gen, Node, Select


class Queue:
    """What an Executor queues for its evaluator. `body`: the user's function, where that runs beside the
    reader."""

    __slots__ = (
        "_active", "_at", "_cancel_to", "_cancelled_at", "_evaluator", "_lead", "_lock", "_queue", "_task",
        "_waits_since", "body", "run",
    )  # fmt: skip

    def __init__(self, run: RunInfo, evaluator: Evaluator, body: Body | None) -> None:
        self.run, self.body, self._evaluator = run, body, evaluator
        self._active = False
        # Constant text waits here for company: it goes into the queue with what comes next.
        self._lead: list[Node] = []
        self._queue: deque[Item] = deque()
        self._lock = threading.Lock()
        self._task: asyncio.Task[Any] | None = None
        # Which item of the queue is being done, counted from 0; those before `_cancel_to` are cancelled.
        self._at, self._cancel_to, self._waits_since = -1, 0, 0
        self._cancelled_at = -1  # whose cancelling was the last

    def mark(self) -> Mark:
        """A mark after everything queued so far; reached at once where nothing is under way."""
        mark = Mark(self._evaluator.output if self.run.stream else None)
        self.put_mark(mark)
        return mark

    def put_mark(self, mark: Mark) -> None:
        with self._lock:
            self._put(Item(mark=mark))
            self._kick()

    def so_far(self) -> Transcript:
        """What has been said by now; does not wait."""
        return self._evaluator.transcript

    def _put(self, item: Item) -> None:
        """Into the queue, behind the text before it. The lock is held."""
        if self._lead:
            item.lead, self._lead = tuple(self._lead), []
        self._queue.append(item)

    def _cancel_queued(self) -> None:
        """Stop what is queued by now: what is added later is not meant."""
        with self._lock:
            self._cancel_to = self._at + 1 + len(self._queue)
            if not self._active:
                return
        background().call(self._cancel_task)

    def _cancel_task(self) -> None:
        # By now what was to be stopped may have ended, and what was added later have begun. Once: a second
        # time would break off how it ends, such as the closing of its connection.
        if self._task is not None and self._cancelled_at < self._at < self._cancel_to:
            self._cancelled_at = self._at
            self._task.cancel()

    def _is_cancelled(self, item: Item) -> bool:
        """Whether what is to be done now is not to be done. Text costs nothing: it is said, so that a
        rollback finds its checkpoint."""
        ahead = self._evaluator.ahead
        held = ahead is not None and bool(ahead.held)
        if not held:
            self._waits_since = self._at
        if not self.run.stop.stopped and self._waits_since >= self._cancel_to:
            return False
        return held or isinstance(item.node, Gen | Select)

    # -- on the loop -----------------------------------------------------------------------------------------

    def _kick(self) -> None:
        """Begin the coroutine unless it runs. The lock is held."""
        if self._active:
            return
        evaluator, queue = self._evaluator, self._queue
        waits = evaluator.ahead is not None and bool(evaluator.ahead.held)
        if evaluator.begun and not waits and all(item.node is None for item in queue):
            # Nothing to wait for: text is said and marks are reached here and now.
            while queue:
                self._at += 1
                item = queue.popleft()
                if item.lead and evaluator.error is None:
                    evaluator.say(item.lead)
                self._reach(item)
            return
        self._active = True
        background().start(self._drain)

    async def _drain(self) -> None:
        self._task = asyncio.current_task()
        evaluator, queue, lock = self._evaluator, self._queue, self._lock
        while True:
            with lock:
                if not queue:
                    self._active, self._task = False, None
                    # From Python 3.13 on, the frames of an error's traceback hold this one even after its
                    # end: whoever keeps the error must not keep the state with it.
                    del self, evaluator
                    return
                item = queue.popleft()
                self._at += 1
            try:
                if not evaluator.begun:
                    await evaluator.begin()
                if item.lead and evaluator.error is None:
                    evaluator.say(item.lead)
                if evaluator.error is None:
                    if self._is_cancelled(item):
                        raise asyncio.CancelledError
                    if evaluator.ahead is not None:
                        await evaluator.ahead.evaluate(item, evaluator)
                    elif item.node is not None:
                        await evaluator.do(item.node, item)
            except asyncio.CancelledError as error:
                evaluator.cancelled(error, item)
            except BaseException as error:  # noqa: BLE001 - answered to whoever reads; SystemExit too
                evaluator.fail(error, item)
            if evaluator.error is not None:
                self._skip(item, evaluator.error)
            if item.node is not None:
                continue
            with lock:
                # Whoever is woken by the last mark finds the state at rest.
                if at_rest := not queue:
                    self._active, self._task = False, None
                self._reach(item)
            if at_rest:
                del self, evaluator
                return

    def _skip(self, item: Item, error: BaseException) -> None:
        """Nothing comes of an item: its readers are told why."""
        for made in (item.variable, item.reasoning):
            if made is not None and not made.done:
                made.fail(error)
        if self._evaluator.ahead is not None:
            self._evaluator.ahead.drop(error)

    def _reach(self, item: Item) -> None:
        evaluator = self._evaluator
        if item.back is not None:
            if evaluator.ahead is not None:
                evaluator.ahead.ahead.forget()
            if item.back.error is None:
                evaluator.go_back(item.back.transcript)
        if item.mark is not None:
            body = self.body
            error: BaseException | None = evaluator.error
            if body is not None and body.end is item.mark and body.error is not None:
                error = body.error
            item.mark.reach(evaluator.transcript, error, len(evaluator.output.pieces))

"""BatchRequest: one or many requests of a caller, each with an answer or an error of its own. Waiter: a
coroutine that waits for their outputs.

Of several samples of a prompt, the prompt is computed first and alone: a request for no new tokens leaves it
in the prefix cache.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, ref

import msgspec

from runtime.processes.checkpoint.tokenizer import LONG
from runtime.processes.frontend.client import CLIENT
from runtime.processes.frontend.embedding import prepare_embedding
from runtime.processes.frontend.encoding import PER_ITEM
from runtime.processes.frontend.prepare import Job, Preparer
from runtime.processes.frontend.prompt import has_media, size_of_turns
from runtime.processes.frontend.request_state import ENTRY_BYTES, AnswerBudget, RequestState
from runtime.protocol.errors import Aborted, BadRequest, RuntimeFault
from runtime.protocol.io_struct import EmbeddingReqInput, OutputDelta
from runtime.protocol.request_base import count_ids, new_rid
from runtime.protocol.requests.generate import GenerateReqInput, SingleGenerateReq, resolve, typed_items
from runtime.protocol.sampling import SamplingParams

Requests: TypeAlias = GenerateReqInput | EmbeddingReqInput | Sequence[GenerateReqInput]
"""A request for one or several items, or single requests."""
Item: TypeAlias = SingleGenerateReq | EmbeddingReqInput
Outcome: TypeAlias = OutputDelta | RuntimeFault
"""The new output of an item (all of it if the request does not stream), or its error."""
AT_ONCE = 1 << 16
"""Ids of prompts that are sent at once; a request counts as ONE at least. The rest goes with the next take():
many samples of a long prompt would block the event loop for seconds."""
ONE = 512
COMMIT = SamplingParams(max_new_tokens=0, temperature=0.0)
SEEDS = 2**63


Send: TypeAlias = Callable[[Item, Job, Callable[[], None], AnswerBudget], RequestState]
"""Registers and sends a request; the third argument is called whenever it has new output."""


class BatchRequest:
    """The items of a normalised request, or single requests. Call prepare() and begin() once, then take()
    until `done`, and leave() in any case.

    send, forget  begin and end a request at the frontend
    budget        of the answers of all items
    frontend      its name, if there are several
    cumulative    see SingleGenerateReq
    """

    def __init__(
        self,
        preparer: Preparer,
        requests: Requests,
        send: Send,
        forget: Callable[[RequestState], None],
        budget: AnswerBudget,
        *,
        frontend: str | None = None,
        stream: bool = False,
        cumulative: bool = False,
    ) -> None:
        self._preparer, self._requests, self._frontend = preparer, requests, frontend
        self._open, self._forget, self._budget = send, forget, budget
        self._prompts = len(requests) if isinstance(requests, Sequence) else requests.batch_size
        self._stream, self._cumulative = stream, cumulative
        self._items: list[Item | RuntimeFault] = []
        # Requests by (whether it only computes the prompt, index).
        self._to_send: deque[tuple[bool, int]] = deque()
        self._notify: Callable[[], None] = lambda: None
        self._states: dict[tuple[bool, int], RequestState] = {}
        self._jobs: dict[int, Job] = {}
        self._changed: deque[tuple[bool, int]] = deque()
        self._outcomes: list[tuple[int, Any]] = []
        self._waiting: dict[str, int] = {}
        self._lock = threading.Lock()
        self._timed = False
        self.left = len(requests)
        self._group = new_rid() if len(requests) > 1 else None
        self._planned = 0
        self.client = CLIENT.get().name

    @property
    def done(self) -> bool:
        return self.left == 0

    @property
    def has_more(self) -> bool:
        return bool(self._to_send)

    # -- driving it ------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Read, render and tokenise, once per prompt: slow. An item's error is its answer."""
        requests, self._requests = self._requests, ()  # not kept as long as this object
        match requests:
            case GenerateReqInput():
                self._items = [*typed_items(requests)]
            case EmbeddingReqInput():
                self._items = [*requests]
            case _:
                self._items = [_resolved(one) for one in requests]
        for index, item in enumerate(self._items):
            if not isinstance(item, RuntimeFault):
                self._complete(index, item)
        for index in range(self._prompts):
            item = self._items[index]
            if isinstance(item, RuntimeFault):
                continue
            try:
                if isinstance(item, SingleGenerateReq):
                    job = self._preparer.prepare(item)
                    self._check_size(job, len(self._samples(index)))
                else:
                    job = prepare_embedding(self._preparer, item)
                self._jobs[index] = job
            except RuntimeFault as fault:
                for sample in self._samples(index):
                    self._items[sample] = fault

    def _check_size(self, job: Job, samples: int) -> None:
        """Raise BadRequest for an answer whose log-probabilities are sure to be too large."""
        if self._budget.most is None:
            return
        for part in job.requests:
            if not part.return_logprob:
                continue
            start, params = part.logprob_start_len, part.sampling_params
            new = params.max_new_tokens if params.ignore_eos else params.min_new_tokens
            positions = new + (len(part.input_ids) - start if start >= 0 else 0)
            each = 1 + part.top_logprobs_num + len(part.token_ids_logprob or ())
            self._planned += samples * positions * each * ENTRY_BYTES
        if self._planned > self._budget.most:
            raise BadRequest(
                f"the requested log-probabilities take about {self._planned} bytes; at most "
                f"{self._budget.most}",
                where="top_logprobs_num",
                hint="ask for fewer tokens, samples or log-probabilities; max_answer_bytes",
            )

    def begin(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        for index, item in enumerate(self._items):
            if isinstance(item, RuntimeFault):
                self._settle(index, item)
            else:
                self._waiting[str(item.rid)] = index
        shared = len(self._items) > self._prompts
        for index in range(self._prompts):
            if index in self._jobs:
                if not shared:
                    self._to_send.append((False, index))
                elif self._jobs[index].requests[0].bootstrap is not None:
                    # A prefill engine would wait for a decode engine that computes no prompts.
                    self._to_send.extend((False, sample) for sample in self._samples(index))
                else:
                    self._to_send.append((True, index))

    def take(self) -> list[tuple[int, Any]]:
        """New outcomes by item (those of an EmbeddingReqInput are EmbeddingOutputs); an item's last output
        has its finish_reason. Also sends requests (see `has_more`)."""
        while self._changed:
            self._take(*self._changed.popleft())
        left = AT_ONCE
        while self._to_send and left > 0:
            is_commit, index = self._to_send.popleft()
            job = self._jobs[index % self._prompts]
            left -= sum(max(ONE, len(part.input_ids)) for part in job.parts)
            if is_commit:
                self._commit(index)
            else:
                self._send(index)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def time_left(self) -> float | None:
        """Seconds until the first request is overdue; None: none has a deadline."""
        if not self._timed:
            return None
        times = [state.time_left() for state in self._states.values()]
        return min((left for left in times if left is not None), default=None)

    def expire(self) -> None:
        for (is_commit, index), state in list(self._states.items()):
            if state.time_left() == 0:
                self._fail(is_commit, index, state.overdue())

    def abort(self, matches: Callable[[str], bool]) -> None:
        """Refuse the items that were not sent yet and whose ids match."""
        with self._lock:
            for rid, index in list(self._waiting.items()):
                if matches(rid):
                    self._items[index] = Aborted("aborted before it was sent")

    def leave(self) -> None:
        """The caller stops waiting: cancel the unfinished requests."""
        for state in self._states.values():
            self._forget(state)
        self._states.clear()
        self._to_send.clear()
        self._waiting.clear()
        self._notify = lambda: None  # no reference cycle through the waiter

    # -- steps -----------------------------------------------------------------------------------------------

    def _complete(self, index: int, item: Item) -> None:
        """Set the batch's fields of an item. A sample has its own seed, derived from the request's."""
        item.http_worker_ipc = self._frontend
        if isinstance(item, EmbeddingReqInput):
            return
        item.stream, item.cumulative = self._stream, self._cumulative
        seed, sample = item.sampling_params.seed, index // self._prompts
        if sample and seed is not None:
            item.sampling_params = msgspec.structs.replace(item.sampling_params, seed=(seed + sample) % SEEDS)

    def _samples(self, prompt: int) -> range:
        return range(prompt, len(self._items), self._prompts)

    def _commit(self, prompt: int) -> None:
        job, samples = self._jobs[prompt], [self._items[index] for index in self._samples(prompt)]
        item = next((one for one in samples if isinstance(one, SingleGenerateReq)), None)
        if item is None:  # all were cancelled meanwhile
            self._to_send.extend((False, index) for index in self._samples(prompt))
            return
        request = msgspec.structs.replace(
            item, rid=new_rid(), stream=False, return_hidden_states=False, log_metrics=False
        )
        tokens = msgspec.structs.replace(
            job.requests[0],
            rid=self._preparer.wire_rid(request),
            sampling_params=COMMIT,
            constraint=None,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            return_hidden_states=False,
            session_params=None,
            stream=False,
        )
        self._begin(True, prompt, request, Job((tokens,), deadline=job.deadline, shares_prompt=True))

    def _send(self, index: int) -> None:
        with self._lock:
            item = self._items[index]
        if isinstance(item, RuntimeFault):
            self._settle(index, item)
            return
        job = self._jobs[index % self._prompts]
        if index >= self._prompts and isinstance(item, SingleGenerateReq):
            job = self._preparer.again(job, item)
        for part in job.requests:
            part.group = self._group
        if self._begin(False, index, item, job):
            self._waiting.pop(str(item.rid), None)

    def _begin(self, is_commit: bool, index: int, request: Item, job: Job) -> bool:
        """Whether it could be sent."""

        def notify() -> None:
            self._changed.append((is_commit, index))
            self._notify()

        try:
            state = self._open(request, job, notify, self._budget)
        except RuntimeFault as fault:
            self._fail(is_commit, index, fault)
            return False
        self._states[is_commit, index] = state
        self._timed = self._timed or state.time_left() is not None
        return True

    def _take(self, is_commit: bool, index: int) -> None:
        state = self._states.get((is_commit, index))
        if state is None:
            return
        try:
            output = state.take()
        except RuntimeFault as fault:
            self._fail(is_commit, index, fault)
            return
        if output is None:
            return
        if is_commit:
            self._forget(self._states.pop((True, index)))
            self._to_send.extend((False, sample) for sample in self._samples(index))
        elif isinstance(output, OutputDelta) and not output.finished:
            self._outcomes.append((index, output))
        else:
            self._settle(index, output)

    def _fail(self, is_commit: bool, index: int, fault: RuntimeFault) -> None:
        """Settle an item, or all samples of a prompt, with `fault`."""
        if not is_commit:
            self._settle(index, fault)
            return
        if (commit := self._states.pop((True, index), None)) is not None:
            self._forget(commit)
        for sample in self._samples(index):
            self._settle(sample, fault)

    def _settle(self, index: int, outcome: object) -> None:
        """The item's last outcome."""
        state = self._states.pop((False, index), None)
        if state is not None:
            self._forget(state)
        self._outcomes.append((index, outcome))
        self.left -= 1


def _resolved(request: GenerateReqInput) -> SingleGenerateReq | RuntimeFault:
    try:
        return resolve(request)
    except RuntimeFault as fault:
        return fault


def characters_of(request: Requests) -> int:
    """How many characters take about as long to tokenise as the request takes to prepare."""
    if isinstance(request, Sequence):
        return sum(map(characters_of, request))
    size = _characters(request.text) + count_ids(request.input_ids)
    size += PER_ITEM * (len(request) if request.is_normalized else 1)
    if isinstance(request, EmbeddingReqInput):
        return size
    size += size_of_turns(request.messages or ())
    if request.image_data or has_media(request.messages or ()):
        size += LONG + 1  # they are decoded, or even fetched
    size += sum(_as_json(one) for one in (request.tools, request.template_kwargs, request.sampling_params))
    return size * (1 + len(request.choices or ()))


def _characters(text: Any) -> int:
    """Of a text, a list of texts, or a list of pairs of texts."""
    if isinstance(text, list):
        return sum(map(_characters, text))
    return len(text) if isinstance(text, str) else 0


def _as_json(value: Any) -> int:
    """Bytes of the value as JSON; LONG if it cannot be written as JSON."""
    try:
        return len(msgspec.json.encode(value)) if value else 0
    except (TypeError, ValueError, RecursionError):
        return LONG


class Waker:
    """Wakes the coroutines of one event loop from any thread. All that are notified before the loop runs are
    woken together: a step with many streams costs one system call, not one each."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # the table of wakers must not keep the loop alive
        self._notified: deque[Waiter] = deque()
        self._called = False

    def wake(self, waiter: Waiter) -> None:
        """Raises RuntimeError when the loop is closed."""
        self._notified.append(waiter)
        loop = self._loop()
        if loop is None:
            raise RuntimeError("the event loop is gone")
        if not self._called or loop.is_closed():
            self._called = True
            loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        self._called = False  # first, so that a waiter that is notified now calls again
        while self._notified:
            self._notified.popleft().wake()


_WAKERS: WeakKeyDictionary[asyncio.AbstractEventLoop, Waker] = WeakKeyDictionary()
_LOCK = threading.Lock()


class Waiter:
    """A coroutine of the running event loop that waits to be notified."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        with _LOCK:
            self._waker = _WAKERS.setdefault(self.loop, Waker(self.loop))
        self._woken = False
        self._waiting: asyncio.Future[None] | None = None

    def notifier(self, on_closed: Callable[[], None]) -> Callable[[], None]:
        """A function that wakes the coroutine from any thread, or calls `on_closed` if its loop is closed."""

        def notify() -> None:
            try:
                self._waker.wake(self)
            except RuntimeError:
                on_closed()

        return notify

    def wake(self) -> None:
        """Called by its loop."""
        self._woken = True
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def wait(self, timeout: float | None) -> bool:
        """False when `timeout` seconds pass without a notification."""
        if not self._woken:
            # A future of its own: wait_for() loses a cancellation that comes together with the waking.
            self._waiting = self.loop.create_future()
            timer = None if timeout is None else self.loop.call_later(timeout, self._stop_waiting)
            try:
                await self._waiting
            finally:
                self._waiting = None
                if timer is not None:
                    timer.cancel()
        woken, self._woken = self._woken, False
        return woken

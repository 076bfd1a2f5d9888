"""BatchRequest: many requests at once, each with an answer or an error of its own.

With several samples of a prompt, the prompt is computed first and alone (a request for no new tokens leaves
it in the prefix cache), then its samples are sent. It does not wait itself: `notify` is called when there may
be something to take.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from runtime.processes.frontend.client import CLIENT
from runtime.processes.frontend.prepare import Job, Preparer
from runtime.processes.frontend.request_state import ENTRY_BYTES, AnswerRoom, RequestState
from runtime.protocol.errors import Aborted, BadRequest, RuntimeFault
from runtime.protocol.io_struct import OutputDelta
from runtime.protocol.request_base import new_rid
from runtime.protocol.requests.generate import GenerateReqInput
from runtime.protocol.requests.single import SingleGenerateReq, resolve, typed_items
from runtime.protocol.sampling import SamplingParams

Outcome: TypeAlias = OutputDelta | RuntimeFault
"""What is new of an item, the whole of it where the request does not stream; or why it failed."""
AT_ONCE = 1 << 16
"""Ids of prompts that are sent in one go; a request without any counts as ONE. The rest goes with the next
take(): many samples of a long prompt would keep the event loop for seconds."""
ONE = 512
COMMIT = SamplingParams(max_new_tokens=0, temperature=0.0)
SEEDS = 2**63


Send: TypeAlias = Callable[[SingleGenerateReq, Job, Callable[[], None], AnswerRoom], RequestState]
"""Registers and sends a request; the third argument is called whenever there is something new of it."""


class BatchRequest:
    """The items of a normalised request, or single ones. prepare() and begin() once, then take() until
    `done`, and leave() in any case.

    send, forget  how the frontend begins and ends a request
    room          for the answers of all items
    frontend      its name, if there are several
    cumulative    see SingleGenerateReq
    """

    def __init__(
        self,
        preparer: Preparer,
        requests: GenerateReqInput | Sequence[GenerateReqInput],
        send: Send,
        forget: Callable[[RequestState], None],
        room: AnswerRoom,
        *,
        frontend: str | None = None,
        stream: bool = False,
        cumulative: bool = False,
    ) -> None:
        self._preparer, self._requests, self._frontend = preparer, requests, frontend
        self._open, self._forget, self._room = send, forget, room
        self._prompts = requests.batch_size if isinstance(requests, GenerateReqInput) else len(requests)
        self._stream, self._cumulative = stream, cumulative
        self._items: list[SingleGenerateReq | RuntimeFault] = []
        self._to_send: deque[tuple[bool, int]] = deque()
        self._notify: Callable[[], None] = lambda: None
        self._states: dict[int, RequestState] = {}
        self._commits: dict[int, RequestState] = {}
        self._jobs: dict[int, Job] = {}
        self._changed: deque[tuple[bool, int]] = deque()
        self._outcomes: list[tuple[int, Outcome]] = []
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
        """Whether take() has more to send: it need not be waited for."""
        return bool(self._to_send)

    # -- driving it ------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """The part that may take long: the types of all fields, templates and tokenising, once per prompt.
        What is wrong with an item is its own answer."""
        if isinstance(self._requests, GenerateReqInput):
            self._items = typed_items(self._requests)
        else:
            self._items = [_resolved(one) for one in self._requests]
        self._requests = ()  # this object may be kept for longer than long prompts should be
        for index, item in enumerate(self._items):
            if isinstance(item, SingleGenerateReq):
                self._complete(index, item)
        for index in range(self._prompts):
            item = self._items[index]
            if isinstance(item, RuntimeFault):
                continue
            try:
                job = self._preparer.prepare(item)
                self._check_size(job, len(self._samples(index)))
                self._jobs[index] = job
            except RuntimeFault as fault:
                self._refuse(index, fault)

    def _check_size(self, job: Job, samples: int) -> None:
        """Refuse what is sure to be too large before it is computed: log-probabilities of the prompt, and of
        as many tokens as there will be at least. Raises BadRequest."""
        if self._room.most is None:
            return
        for part in job.requests:
            if not part.return_logprob:
                continue
            start, params = part.logprob_start_len, part.sampling_params
            new = params.max_new_tokens if params.ignore_eos else params.min_new_tokens
            places = new + (len(part.input_ids) - start if start >= 0 else 0)
            each = 1 + part.top_logprobs_num + len(part.token_ids_logprob or ())
            self._planned += samples * places * each * ENTRY_BYTES
        if self._planned > self._room.most:
            raise BadRequest(
                f"the requested log-probabilities take about {self._planned} bytes; at most "
                f"{self._room.most}",
                where="top_logprobs_num",
                hint="ask for fewer tokens, samples or log-probabilities; max_answer_bytes",
            )

    def begin(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        for index, item in enumerate(self._items):
            if isinstance(item, RuntimeFault):
                self._settle(index, item)
            else:
                self._waiting[item.rid] = index
        shared = len(self._items) > self._prompts
        for index in range(self._prompts):
            if index in self._jobs:
                if not shared:
                    self._to_send.append((False, index))
                elif self._jobs[index].requests[0].bootstrap is not None:
                    # Who computes prompts has one wait for the other, who decodes computes none.
                    self._to_send.extend((False, sample) for sample in self._samples(index))
                else:
                    self._to_send.append((True, index))

    def take(self) -> list[tuple[int, Outcome]]:
        """What is new: outputs (an item's last has its finish_reason) and errors, by item. Sends what is to
        be sent, or a part of it (see `has_more`)."""
        while self._changed:
            is_commit, index = self._changed.popleft()
            if is_commit:
                self._take_commit(index)
            else:
                self._take_item(index)
        room = AT_ONCE
        while self._to_send and room > 0:
            is_commit, index = self._to_send.popleft()
            job = self._jobs[index % self._prompts]
            room -= sum(max(ONE, len(part.input_ids)) for part in job.requests)
            if is_commit:
                self._commit(index)
            else:
                self._send(index)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def time_left(self) -> float | None:
        """Seconds until some request is overdue; None: none ever is."""
        if not self._timed:
            return None
        times = [state.time_left() for state in (*self._states.values(), *self._commits.values())]
        return min((left for left in times if left is not None), default=None)

    def expire(self) -> None:
        """Answer those that are overdue."""
        for index, state in list(self._commits.items()):
            if state.time_left() == 0:
                self._forget(self._commits.pop(index))
                self._samples_fail(index, state.overdue())
        for index, state in list(self._states.items()):
            if state.time_left() == 0:
                self._settle(index, state.overdue())

    def abort(self, matches: Callable[[str], bool]) -> None:
        """Refuse the items that were not sent yet and whose ids match."""
        with self._lock:
            found = [rid for rid in self._waiting if matches(rid)]
            for rid in found:
                self._items[self._waiting[rid]] = Aborted("aborted before it was sent")

    def leave(self) -> None:
        """Nobody waits any more: cancel what is not finished."""
        for state in (*self._states.values(), *self._commits.values()):
            self._forget(state)
        self._states.clear()
        self._commits.clear()
        self._to_send.clear()
        self._waiting.clear()
        self._notify = lambda: None  # no circle by way of the waiter: what this holds is freed at once

    # -- steps -----------------------------------------------------------------------------------------------

    def _complete(self, index: int, item: SingleGenerateReq) -> None:
        """What the batch knows of an item. A sample has its own seed, derived from the request's."""
        item.http_worker_ipc = self._frontend
        item.stream, item.cumulative = self._stream, self._cumulative
        seed, sample = item.sampling_params.seed, index // self._prompts
        if sample and seed is not None:
            item.sampling_params = msgspec.structs.replace(item.sampling_params, seed=(seed + sample) % SEEDS)

    def _samples(self, prompt: int) -> range:
        return range(prompt, len(self._items), self._prompts)

    def _commit(self, prompt: int) -> None:
        """Have the prompt computed."""
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
        try:
            state = self._open(
                request,
                Job((tokens,), deadline=job.deadline, shares_prompt=True),
                self._notifier(True, prompt),
                self._room,
            )
        except RuntimeFault as fault:
            self._samples_fail(prompt, fault)
            return
        self._commits[prompt] = state
        self._timed = self._timed or state.time_left() is not None

    def _take_commit(self, prompt: int) -> None:
        state = self._commits.get(prompt)
        if state is None:
            return
        try:
            if state.take() is None:
                return
        except RuntimeFault as fault:
            self._forget(self._commits.pop(prompt))
            self._samples_fail(prompt, fault)
            return
        self._forget(self._commits.pop(prompt))
        self._to_send.extend((False, index) for index in self._samples(prompt))

    def _send(self, index: int) -> None:
        with self._lock:
            item = self._items[index]
        if isinstance(item, RuntimeFault):
            self._settle(index, item)
            return
        job = self._jobs[index % self._prompts]
        if index >= self._prompts:
            job = self._preparer.again(job, item)
        for part in job.requests:
            part.group = self._group
        try:
            state = self._open(item, job, self._notifier(False, index), self._room)
        except RuntimeFault as fault:
            self._settle(index, fault)
            return
        self._states[index] = state
        self._timed = self._timed or state.time_left() is not None
        self._waiting.pop(item.rid, None)

    def _take_item(self, index: int) -> None:
        state = self._states.get(index)
        if state is None:
            return
        try:
            output = state.take()
        except RuntimeFault as fault:
            self._settle(index, fault)
            return
        if output is None:
            return
        if output.meta["finish_reason"] is None:
            self._outcomes.append((index, output))
        else:
            self._settle(index, output)

    def _settle(self, index: int, outcome: Outcome) -> None:
        """The item's last word."""
        state = self._states.pop(index, None)
        if state is not None:
            self._forget(state)
        self._outcomes.append((index, outcome))
        self.left -= 1

    def _refuse(self, prompt: int, fault: RuntimeFault) -> None:
        for index in self._samples(prompt):
            self._items[index] = fault

    def _samples_fail(self, prompt: int, fault: RuntimeFault) -> None:
        for index in self._samples(prompt):
            self._settle(index, fault)

    def _notifier(self, is_commit: bool, index: int) -> Callable[[], None]:
        def notify() -> None:
            self._changed.append((is_commit, index))
            self._notify()

        return notify


def _resolved(request: GenerateReqInput) -> SingleGenerateReq | RuntimeFault:
    try:
        return resolve(request)
    except RuntimeFault as fault:
        return fault

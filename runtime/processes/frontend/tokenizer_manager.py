"""TokenizerManager: the frontend. It takes requests and returns their text or vectors; meanwhile each is a
RequestState.

Usable from any thread and any event loop. A request is aborted when its caller leaves; when the engine dies,
all callers get the reason. It does not know what is behind its mailboxes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, closing, contextmanager
from functools import lru_cache
from typing import Any

import msgspec

from runtime.ipc.mailbox import MailboxClosed, Outbox
from runtime.processes.checkpoint.tokenizer import LONG
from runtime.processes.frontend.batch_request import (
    BatchRequest,
    Item,
    Outcome,
    Requests,
    Waiter,
    characters_of,
)
from runtime.processes.frontend.client import Observer
from runtime.processes.frontend.encoding import MOST_CHARACTERS, EncodingPool
from runtime.processes.frontend.output_accumulator import Facts
from runtime.processes.frontend.prepare import RID_END, Job, Preparer
from runtime.processes.frontend.request_state import AnswerBudget, RequestState, again
from runtime.protocol.errors import BadRequest, DeadlineExceeded, EngineDead, QueueFull, RuntimeFault
from runtime.protocol.io_struct import (
    AbortReq,
    BatchEmbeddingOutput,
    BatchStrOutput,
    BatchTokenizedGenerateReqInput,
    ControlOutput,
    EmbeddingOutput,
    EmbeddingReqInput,
    GenerateOutput,
    GenerateReqInput,
    GroupFailed,
    OutputDelta,
    SingleReq,
    TokenOutput,
)
from runtime.protocol.model_info import ModelInfo

MAX_LIVE = 65_536
"""The most live requests."""
CONTROL_TIMEOUT_S = 120.0


class TokenizerManager:
    """`outbox` leads to the scheduler; `handle` takes the messages of the detokeniser.

    name: of this frontend among several, for the way back. model: facts for callers. max_encode_chars: of all
    prompts that wait to be encoded.
    """

    def __init__(
        self,
        preparer: Preparer,
        outbox: Outbox,
        *,
        name: str | None = None,
        model: ModelInfo | None = None,
        max_live: int = MAX_LIVE,
        max_encode_chars: int = MOST_CHARACTERS,
        max_answer_bytes: int | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._preparer, self._outbox, self._name, self._model = preparer, outbox, name, model
        self._max_live, self._max_answer_bytes = max_live, max_answer_bytes
        self._facts = _facts(preparer, model)
        self._lock = threading.Lock()
        self._states: dict[str, RequestState] = {}
        self._requests: dict[str, RequestState] = {}
        self._batches: dict[int, BatchRequest] = {}
        self._controls: dict[str, Future[ControlOutput]] = {}
        self._observers = tuple(observers)
        self.encoding = EncodingPool(max_encode_chars)
        self.tokenizer, self.reasoning = preparer.tokenizer, preparer.marks
        self.fault: RuntimeFault | None = None
        """Why the engine is dead; None while it lives."""
        self.messages = 0
        """Messages received from the engine: it grows while the engine works."""

    @property
    def live(self) -> int:
        """Requests whose callers wait."""
        return len(self._requests)

    @property
    def hides_reasoning(self) -> bool:
        """Whether the marks of the reasoning are control tokens, and not part of the text."""
        marks = self.reasoning
        if marks is None or not marks.close_ids:
            return False
        bytes_of = self.tokenizer.text_table.bytes_of
        return b"".join(bytes_of(marks.close_ids, False)) != b"".join(bytes_of(marks.close_ids, True))

    @property
    def model(self) -> ModelInfo:
        """Facts about the served model. Raises EngineDead if there are none."""
        if self._model is None:
            raise EngineDead("this TokenizerManager was not given the model's facts")
        return self._model

    def prompt_ids(self, request: GenerateReqInput) -> list[int]:
        """The ids of a request's prompt. Raises BadRequest and its kinds."""
        return self._preparer.prompt_ids(request)

    def observe(self, observer: Observer) -> None:
        """Notify `observer` of every request from now on."""
        self._observers = (*self._observers, observer)

    # -- one request -----------------------------------------------------------------------------------------

    async def submit(self, request: GenerateReqInput) -> GenerateOutput:
        """The whole answer. Cancelling the task aborts the request. Raises BadRequest and its kinds."""
        return _raised((await self.submit_batch([request]))[0])

    async def stream(
        self, request: GenerateReqInput, *, cumulative: bool = False
    ) -> AsyncGenerator[OutputDelta, None]:
        """The deltas; the last one has a `finish_reason` in its meta. Leaving early (aclose) aborts the
        request. cumulative: each output holds all so far."""
        async with aclosing(self.stream_batch([request], cumulative=cumulative)) as outcomes:
            async for _, outcome in outcomes:
                yield _raised(outcome)

    def generate(self, request: GenerateReqInput) -> GenerateOutput:
        """submit() for threads: blocks."""
        return _raised(self.batch([request])[0])

    def texts(self, request: GenerateReqInput) -> Generator[GenerateOutput, None, None]:
        """stream(cumulative=True) for code that is not async; closing the generator aborts the request."""
        with closing(self._outcomes([request], True, True)) as outcomes:
            for _, outcome in outcomes:
                yield _raised(outcome)

    # -- several ---------------------------------------------------------------------------------------------

    async def submit_batch(self, request: Requests) -> list[Outcome]:
        """Answers of all items (with several samples p1, p2, ..., p1, p2, ...), or an item's error in place
        of its answer. Cancelling the task aborts them all. A sequence is a batch of single requests."""
        async with aclosing(self.stream_batch(request, stream=False)) as outcomes:
            by_index = {index: outcome async for index, outcome in outcomes}
        return [by_index[index] for index in range(len(by_index))]

    def batch(self, request: Requests) -> list[Outcome]:
        """submit_batch() for threads: blocks."""
        by_index = dict(self._outcomes(request, False))
        return [by_index[index] for index in range(len(by_index))]

    def _outcomes(
        self, request: Requests, stream: bool, cumulative: bool = False
    ) -> Generator[tuple[int, Outcome], None, None]:
        event = threading.Event()
        with self._batch(request, stream, cumulative) as batch:
            batch.prepare()
            batch.begin(event.set)
            while True:
                yield from batch.take()
                if batch.done:
                    return
                if not batch.has_more and not event.wait(batch.time_left()):
                    batch.expire()
                event.clear()

    async def stream_batch(
        self, request: Requests, *, stream: bool = True, cumulative: bool = False
    ) -> AsyncGenerator[tuple[int, Outcome], None]:
        """(item, its delta) as they come; each item's last is one with a finish_reason, or an error. Leaving
        early (aclose) aborts the unfinished items. cumulative: each output holds all so far. Without
        `stream` each item comes once, whole."""
        waiter = Waiter()
        with self._batch(request, stream, cumulative) as batch:
            size = characters_of(request)
            if size > LONG:
                await self.encoding.run(size, batch.prepare)
            else:
                batch.prepare()
            # A closed loop will never take the answers.
            batch.begin(waiter.notifier(batch.leave))
            while True:
                for pair in batch.take():
                    yield pair
                if batch.done:
                    return
                if batch.has_more:
                    await asyncio.sleep(0)
                elif not await waiter.wait(batch.time_left()):
                    batch.expire()

    @contextmanager
    def _batch(self, request: Requests, stream: bool, cumulative: bool) -> Iterator[BatchRequest]:
        self._check_alive()
        vectors = isinstance(request, EmbeddingReqInput)
        if not vectors and self._model is not None and not self._model.is_generation:
            raise BadRequest(
                f"{self._model.served_name} computes vectors and does not generate", where="model",
                hint="use the embedding endpoints",
            )  # fmt: skip
        if not isinstance(request, Sequence):
            request.normalize_batch_and_arguments()
        batch = BatchRequest(
            self._preparer,
            request,
            self.open,
            self.leave,
            AnswerBudget(self._max_answer_bytes),
            frontend=self._name,
            stream=stream,
            cumulative=cumulative,
        )
        with self._lock:
            self._batches[id(batch)] = batch
        try:
            yield batch
        finally:
            with self._lock:
                self._batches.pop(id(batch), None)
            batch.leave()

    # -- vectors ---------------------------------------------------------------------------------------------

    async def embed(self, request: EmbeddingReqInput) -> list[EmbeddingOutput | RuntimeFault]:
        """submit_batch() of vectors; but the error of a single item is raised."""
        outcomes: list[Any] = await self.submit_batch(request)
        if request.is_single and isinstance(outcomes[0], RuntimeFault):
            raise outcomes[0]
        return outcomes

    # -- control ---------------------------------------------------------------------------------------------

    def abort(self, rid: str | None, prefix: bool = False, client: str | None = None) -> None:
        """Cancel the request with this id, those whose ids begin with it (`prefix`), or all (None). Their
        callers get Aborted from the scheduler; unknown ids are no error. client: only requests that this
        client sent to this frontend."""

        def matches(candidate: str) -> bool:
            return rid is None or (candidate.startswith(rid) if prefix else candidate == rid)

        with self._lock:
            states = list(self._requests.values())
            batches = [one for one in self._batches.values() if client in (None, one.client)]
        for batch in batches:
            batch.abort(matches)
        for state in states:
            if matches(state.rid) and client in (None, state.client.name):
                self._cancel(state)
        if self._name is not None and client is None:
            # Requests of other frontends.
            wire = "" if rid is None else rid if prefix else rid + RID_END
            self._try_post(AbortReq(rid=wire, abort_all=rid is None, prefix=rid is not None))

    def control(self, request: SingleReq, timeout: float = CONTROL_TIMEOUT_S) -> ControlOutput:
        """Send a control verb and wait for its answer. Raises DeadlineExceeded, EngineDead."""
        with self._sent(request) as answer:
            try:
                return answer.result(timeout)
            except TimeoutError:
                raise _no_answer(timeout) from None

    async def control_async(self, request: SingleReq, timeout: float = CONTROL_TIMEOUT_S) -> ControlOutput:
        """The same for event loops."""
        with self._sent(request) as answer:
            try:
                async with asyncio.timeout(timeout):
                    return await asyncio.wrap_future(answer)
            except TimeoutError:
                raise _no_answer(timeout) from None

    @contextmanager
    def _sent(self, request: SingleReq) -> Iterator[Future[ControlOutput]]:
        """The answer to come."""
        answer: Future[ControlOutput] = Future()
        request.http_worker_ipc = self._name
        with self._lock:
            self._check_alive()
            self._controls[request.rid] = answer
        try:
            self._post(request)
            yield answer
        finally:
            with self._lock:
                self._controls.pop(request.rid, None)

    # -- the engine's side -----------------------------------------------------------------------------------

    def handle(self, item: BatchStrOutput | BatchEmbeddingOutput | ControlOutput | GroupFailed) -> None:
        """Take a message from the detokeniser. Outputs of unknown rids are dropped."""
        if not isinstance(item, GroupFailed):
            self.messages += 1
        match item:
            case BatchStrOutput() | BatchEmbeddingOutput():
                self._handle_outputs(item)
            case ControlOutput():
                with self._lock:
                    answer = self._controls.pop(item.rid, None)
                if answer is not None and answer.set_running_or_notify_cancel():
                    answer.set_result(item)
            case GroupFailed():
                self.fail_all(EngineDead(item.message, where=item.where, hint="send the request again"))

    def _handle_outputs(self, item: BatchStrOutput | BatchEmbeddingOutput) -> None:
        outputs: Sequence[TokenOutput | EmbeddingOutput] = item.outputs
        changed: dict[int, RequestState] = {}
        with self._lock:
            states = [self._states.get(output.rid) for output in outputs]
        for state, output in zip(states, outputs, strict=True):
            if state is not None:
                state.put(output)
                changed[id(state)] = state
        for state in changed.values():
            state.notify()

    def fail_all(self, fault: RuntimeFault) -> None:
        """The engine is dead: all requests, also later ones, fail with `fault`."""
        with self._lock:
            self.fault = self.fault or fault
            states = list(self._requests.values())
            controls, self._controls = self._controls, {}
        for state in states:
            state.fail(fault)
            state.notify()
        for answer in controls.values():
            if answer.set_running_or_notify_cancel():
                answer.set_exception(self._engine_dead())

    # -- for batches ---------------------------------------------------------------------------------------

    def open(
        self, request: Item, job: Job, notify: Callable[[], None], budget: AnswerBudget | None = None
    ) -> RequestState:
        """Register the request and send it. Raises BadRequest, QueueFull, EngineDead."""
        state = RequestState(request, job, notify, self._facts, self._observers, budget)
        with self._lock:
            self._check_alive()
            if state.rid in self._requests:
                raise BadRequest(f"a request with the id {request.rid!r} is still running", where="rid")
            if len(self._states) + len(state.index) > self._max_live:
                raise QueueFull(
                    f"The request queue is full. {len(self._states)} requests are pending here, "
                    f"at most {self._max_live}",
                    hint="try again later",
                )
            self._requests[state.rid] = state
            self._states.update(dict.fromkeys(state.index, state))
        state.start()
        self._send(state)
        return state

    def leave(self, state: RequestState) -> None:
        """The caller leaves: forget the request, and cancel it if it is not finished."""
        with self._lock:
            if self._requests.get(state.rid) is state:
                del self._requests[state.rid]
            for rid in state.index:
                self._states.pop(rid, None)
        state.leave()
        # A request that failed here may still run there.
        self._abort_all(list(state.open) if state.fault is None else list(state.index))

    def _send(self, state: RequestState) -> None:
        parts, deadline = state.job.parts, state.job.deadline
        for part in parts:
            part.flow = state.client.flow
        if deadline is not None:
            left = max(0.0, deadline - time.monotonic())
            for part in parts:
                part.time_left_s = left
        try:
            if len(parts) == 1:
                self._post(parts[0])
            else:
                requests = list(state.job.requests)
                self._post(
                    BatchTokenizedGenerateReqInput(rids=[one.rid for one in requests], requests=requests)
                )
        except RuntimeFault:
            self.leave(state)
            raise
        if state.cancelled:  # while it was being sent
            self._cancel(state)

    def _cancel(self, state: RequestState) -> None:
        state.cancelled = True
        self._abort_all(list(state.open))

    def _abort_all(self, rids: Sequence[str]) -> None:
        for rid in rids:
            self._try_post(AbortReq(rid=rid))

    def _try_post(self, item: msgspec.Struct) -> None:
        try:
            self._outbox.send(item)
        except MailboxClosed:
            return  # then nothing runs there

    def _post(self, item: msgspec.Struct) -> None:
        try:
            self._outbox.send(item)
        except MailboxClosed:
            raise self._engine_dead() from None

    def _check_alive(self) -> None:
        if self.fault is not None:
            raise self._engine_dead()

    def _engine_dead(self) -> RuntimeFault:
        return EngineDead("the engine was closed") if self.fault is None else again(self.fault)


def _facts(preparer: Preparer, model: ModelInfo | None) -> Facts:
    table = preparer.tokenizer.text_table

    @lru_cache(maxsize=1 << 16)
    def text_of(token: int) -> str:
        return decode([token], False)

    def decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
        return b"".join(table.bytes_of(ids, skip_special_tokens)).decode("utf-8", "replace")

    if model is None:
        return Facts(text_of, decode, preparer.marks)
    return Facts(text_of, decode, preparer.marks, model.force_reasoning, model.weight_version)


def _no_answer(timeout: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the scheduler did not answer within {timeout:g} s")


def _raised(outcome: Outcome) -> OutputDelta:
    if isinstance(outcome, RuntimeFault):
        raise outcome
    return outcome

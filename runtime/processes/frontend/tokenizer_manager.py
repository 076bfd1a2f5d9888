"""TokenizerManager: the frontend. It takes requests and gives out deltas of their text; meanwhile each is a
RequestState.

Usable from any thread and any event loop. A request ends when its caller goes away; when the engine dies, all
callers get the reason. It knows mailboxes, not what is behind them.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec

from runtime.formats.reasoning.marks import ReasoningMarks
from runtime.ipc.mailbox import MailboxClosed, Outbox
from runtime.processes.checkpoint.tokenizer import LONG, Tokenizer
from runtime.processes.frontend.batch_request import BatchRequest, Outcome
from runtime.processes.frontend.embedding import Embedded, EmbeddingFrontend
from runtime.processes.frontend.encoding import MOST_CHARACTERS, PER_ITEM, EncodingPool
from runtime.processes.frontend.images.placing import has_media
from runtime.processes.frontend.observe import Observer, Observers
from runtime.processes.frontend.output_accumulator import Facts
from runtime.processes.frontend.prepare import RID_END, Job, Preparer
from runtime.processes.frontend.prompt import size_of_turns
from runtime.processes.frontend.request_state import AnswerRoom, RequestState, again
from runtime.processes.frontend.waiting import Answer, Waiter
from runtime.protocol.errors import BadRequest, EngineDead, QueueFull, RuntimeFault
from runtime.protocol.io_struct import (
    AbortReq,
    BatchEmbeddingOutput,
    BatchStrOutput,
    BatchTokenizedGenerateReqInput,
    ControlOutput,
    EmbeddingReqInput,
    GenerateOutput,
    GenerateReqInput,
    GroupFailed,
    OutputDelta,
    SingleReq,
)
from runtime.protocol.model_info import ModelInfo
from runtime.protocol.requests.batching import count_ids
from runtime.protocol.requests.single import SingleGenerateReq

Requests: TypeAlias = GenerateReqInput | Sequence[GenerateReqInput]
"""A request for one or several, or single ones."""
MAX_LIVE = 65_536
"""Requests being waited for, at most."""
CONTROL_TIMEOUT_S = 120.0


class TokenizerManager:
    """`outbox` leads to the scheduler; `handle` takes what comes back from the detokeniser.

    name: of this frontend among several, by which answers find it. model: what is served, where that
    matters to callers. max_encode_chars: of prompts that wait to be encoded.
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
        self._controls: dict[str, Answer] = {}
        self._observers = Observers(observers)
        self.encoding = EncodingPool(max_encode_chars)
        own = weakref.proxy(self)  # no circle: an engine that is dropped ends at once, not with a collection
        self._embeddings = EmbeddingFrontend(
            preparer,
            self.encoding,
            post=lambda item: own._post(item),
            abort=lambda rids: own._abort_all(rids),
            check=lambda: own._check_alive(),
            name=name,
            max_live=max_live,
            observer=self._observers,
        )
        self._dead: RuntimeFault | None = None
        self._messages = 0

    @property
    def live(self) -> int:
        """Requests that are being waited for."""
        return len(self._requests) + len(self._embeddings)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._preparer.tokenizer

    @property
    def reasoning(self) -> ReasoningMarks | None:
        """How the model marks its reasoning; None where it has none that is known."""
        return self._preparer.marks

    @property
    def hides_reasoning(self) -> bool:
        """Whether a text without control tokens lacks the marks of the reasoning."""
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

    @property
    def fault(self) -> RuntimeFault | None:
        """Why nothing can be answered any more; None while the engine lives."""
        return self._dead

    @property
    def messages(self) -> int:
        """Messages received from the engine: a number that grows while it lives and works."""
        return self._messages

    def prompt_ids(self, request: GenerateReqInput) -> list[int]:
        """The ids of a request's prompt, however many. Raises BadRequest and its kinds."""
        return self._preparer.prompt_ids(request)

    def observe(self, observer: Observer) -> None:
        """Tell `observer` of every request from now on."""
        self._observers.add(observer)

    # -- one request -----------------------------------------------------------------------------------------

    async def submit(self, request: GenerateReqInput) -> GenerateOutput:
        """The whole answer. Cancelling the task aborts the request. Raises BadRequest and its kinds."""
        async with aclosing(self._stream_batch([request], False)) as outcomes:
            return [_raised(outcome) async for _, outcome in outcomes][-1]

    async def stream(
        self, request: GenerateReqInput, *, cumulative: bool = False
    ) -> AsyncGenerator[OutputDelta, None]:
        """What is new, again and again; the last one has a `finish_reason` in its meta. Leaving early
        (aclose) aborts the request. cumulative: each output holds all so far."""
        async with aclosing(self._stream_batch([request], True, cumulative)) as outcomes:
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
        """Answers of all items, p1, p2, ..., p1, p2, ... with several samples each; an item that failed has
        its error in its place. Cancelling the task aborts them all. A sequence is a batch of single
        requests."""
        async with aclosing(self._stream_batch(request, False)) as outcomes:
            found = {index: outcome async for index, outcome in outcomes}
        return [found[index] for index in range(len(found))]

    def stream_batch(
        self, request: GenerateReqInput, *, cumulative: bool = False
    ) -> AsyncGenerator[tuple[int, Outcome], None]:
        """(item, what is new of it), as they come; each item's last is one with a finish_reason, or an error.
        Leaving early (aclose) aborts what is not finished. cumulative: each output holds all so far."""
        return self._stream_batch(request, True, cumulative)

    def batch(self, request: GenerateReqInput | Sequence[GenerateReqInput]) -> list[Outcome]:
        """submit_batch for threads: blocks. A sequence is a batch of single requests."""
        found = dict(self._outcomes(request, False))
        return [found[index] for index in range(len(found))]

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

    async def _stream_batch(
        self, request: Requests, stream: bool, cumulative: bool = False
    ) -> AsyncGenerator[tuple[int, Outcome], None]:
        waiter = Waiter()
        with self._batch(request, stream, cumulative) as batch:
            size = _size(request)
            if size > LONG:
                await self.encoding.run(size, batch.prepare)
            else:
                batch.prepare()
            # If the caller's loop is closed, the answers will never be taken.
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
        self._check_generates()
        if isinstance(request, GenerateReqInput):
            request.normalize_batch_and_arguments()
        batch = BatchRequest(
            self._preparer,
            request,
            self.open,
            self.leave,
            AnswerRoom(self._max_answer_bytes),
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

    async def embed(self, request: EmbeddingReqInput) -> list[Embedded]:
        """One vector per item, in order. Of several, one that failed has its error in its place; a single one
        raises it. Cancelling the task aborts."""
        return await self._embeddings.embed(request)

    def vectors(self, request: EmbeddingReqInput) -> list[Embedded]:
        """embed() for threads: blocks."""
        return self._embeddings.wait(request)

    # -- orders ----------------------------------------------------------------------------------------------

    def abort(self, rid: str | None, prefix: bool = False, client: str | None = None) -> None:
        """Cancel the request with this id, those whose ids begin with it (`prefix`), or all (None). Their
        callers get Aborted from the scheduler; unknown ids are no error. client: only requests that the one
        of this name sent, and only those that are waited for here."""

        def matches(own: str) -> bool:
            return rid is None or (own.startswith(rid) if prefix else own == rid)

        with self._lock:
            everything = [*self._requests.items()]
            batches = [one for one in self._batches.values() if client in (None, one.client)]
        states = [state for own, state in everything if matches(own) and client in (None, state.client.name)]
        for batch in batches:
            batch.abort(matches)
        for state in states:
            self._cancel(state)
        self._abort_all(self._embeddings.matching(matches, client))
        if self._name is not None and client is None:
            # Requests of other frontends.
            wire = "" if rid is None else rid if prefix else rid + RID_END
            self._try_post(AbortReq(rid=wire, abort_all=rid is None, prefix=rid is not None))

    def control(self, request: SingleReq, timeout: float = CONTROL_TIMEOUT_S) -> ControlOutput:
        """Ask the scheduler something and wait for its answer. Raises DeadlineExceeded, EngineDead."""
        event = threading.Event()
        with self._asked(request, event.set) as answer:
            return answer.get(event.wait(timeout), timeout, self._gone)

    async def control_async(self, request: SingleReq, timeout: float = CONTROL_TIMEOUT_S) -> ControlOutput:
        """The same for event loops."""
        waiter = Waiter()
        with self._asked(request, waiter.notifier(lambda: None)) as answer:
            return answer.get(await waiter.wait(timeout), timeout, self._gone)

    @contextmanager
    def _asked(self, request: SingleReq, notify: Callable[[], None]) -> Iterator[Answer]:
        answer = Answer(notify)
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

    # -- for the other side ----------------------------------------------------------------------------------

    def handle(self, item: BatchStrOutput | BatchEmbeddingOutput | ControlOutput | GroupFailed) -> None:
        """Take a message from the detokeniser. Outputs of unknown rids are dropped."""
        if not isinstance(item, GroupFailed):
            self._messages += 1
        match item:
            case BatchStrOutput():
                self._handle_texts(item)
            case BatchEmbeddingOutput():
                self._embeddings.handle(item)
            case ControlOutput():
                with self._lock:
                    answer = self._controls.get(item.rid)
                if answer is not None:
                    answer.give(item)
            case GroupFailed():
                self.fail_all(EngineDead(item.message, where=item.where, hint="send the request again"))

    def _handle_texts(self, item: BatchStrOutput) -> None:
        changed: dict[int, RequestState] = {}
        with self._lock:
            found = [(self._states.get(output.rid), output) for output in item.outputs]
        for state, output in found:
            if state is not None:
                state.put(output)
                changed[id(state)] = state
        for state in changed.values():
            state.notify()

    def fail_all(self, fault: RuntimeFault) -> None:
        """The engine is gone: all requests, waiting and to come, fail with `fault`."""
        with self._lock:
            self._dead = self._dead or fault
            states = list(self._requests.values())
            answers = list(self._controls.values())
        for state in states:
            state.fail(fault)
            state.notify()
        self._embeddings.fail_all(fault)
        for answer in answers:
            answer.give(None)

    # -- for batches ---------------------------------------------------------------------------------------

    def open(
        self, request: SingleGenerateReq, job: Job, notify: Callable[[], None], room: AnswerRoom | None = None
    ) -> RequestState:
        """Register the request and send it. Raises BadRequest, QueueFull, EngineDead."""
        state = RequestState(request, job, notify, self._facts, self._observers, room)
        with self._lock:
            self._check_alive()
            if request.rid in self._requests:
                raise BadRequest(f"a request with the id {request.rid!r} is still running", where="rid")
            if len(self._states) + len(state.index) > self._max_live:
                raise QueueFull(
                    f"The request queue is full. {len(self._states)} requests are pending here, "
                    f"at most {self._max_live}",
                    hint="try again later",
                )
            self._requests[request.rid] = state
            self._states.update(dict.fromkeys(state.index, state))
        state.start()
        self._send(state)
        return state

    def leave(self, state: RequestState) -> None:
        """The caller does not wait any more: forget the request, and cancel what is not finished."""
        with self._lock:
            if self._requests.get(state.request.rid) is state:
                del self._requests[state.request.rid]
            for rid in state.index:
                self._states.pop(rid, None)
        state.leave()
        # What failed here may still be running there.
        self._abort_all(list(state.open) if state.fault is None else list(state.index))

    # -- within ----------------------------------------------------------------------------------------------

    def _send(self, state: RequestState) -> None:
        requests, deadline = state.job.requests, state.job.deadline
        for part in requests:
            part.flow = state.client.flow
        if deadline is not None:
            left = max(0.0, deadline - time.monotonic())
            for part in requests:
                part.time_left_s = left
        try:
            if len(requests) == 1:
                self._post(requests[0])
            else:
                self._post(
                    BatchTokenizedGenerateReqInput(
                        rids=[part.rid for part in requests], requests=list(requests)
                    )
                )
        except RuntimeFault:
            self.leave(state)
            raise
        if state.cancelled:  # an order that overtook the request
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
            return  # then nothing runs there any more

    def _post(self, item: msgspec.Struct) -> None:
        try:
            self._outbox.send(item)
        except MailboxClosed:
            raise self._gone() from None

    def _check_generates(self) -> None:
        if self._model is not None and not self._model.is_generation:
            raise BadRequest(
                f"{self._model.served_name} computes vectors and does not generate", where="model",
                hint="use the embedding endpoints",
            )  # fmt: skip

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._gone()

    def _gone(self) -> RuntimeFault:
        return EngineDead("the engine was closed") if self._dead is None else again(self._dead)


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


def _raised(outcome: Outcome) -> OutputDelta:
    if isinstance(outcome, RuntimeFault):
        raise outcome
    return outcome


def _size(request: Requests) -> int:
    """How many characters take about as long to tokenise as the request takes to prepare."""
    if not isinstance(request, GenerateReqInput):
        return sum(map(_size, request))
    text = request.text or ""
    size = len(text) if isinstance(text, str) else sum(len(one) for one in text)
    size += count_ids(request.input_ids) + size_of_turns(request.messages or ())
    if request.image_data or has_media(request.messages or ()):
        size += LONG + 1  # to be decoded, or even fetched
    size += sum(_as_json(one) for one in (request.tools, request.template_kwargs, request.sampling_params))
    size += PER_ITEM * (len(request) if request.is_normalized else 1)
    return size * (1 + len(request.choices or ()))


def _as_json(value: Any) -> int:
    """Size of the value as JSON, in bytes; LONG for one from code that is not JSON."""
    try:
        return len(msgspec.json.encode(value)) if value else 0
    except (TypeError, ValueError, RecursionError):
        return LONG

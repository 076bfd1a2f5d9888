"""Texts whose vectors are wanted, at the frontend: checked and turned into ids, then waited for together.

It knows the tokenizer and the limits, not how vectors are made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import msgspec

from runtime.processes.checkpoint.tokenizer import LONG
from runtime.processes.frontend.client import CLIENT
from runtime.processes.frontend.encoding import PER_ITEM, EncodingPool
from runtime.processes.frontend.limits import Limits
from runtime.processes.frontend.observe import NOBODY, Begun, Observer
from runtime.processes.frontend.prepare import RID_END, Preparer
from runtime.processes.frontend.request_state import GRACE_S, again
from runtime.processes.frontend.waiting import Waiter
from runtime.protocol.adapters import check_name, no_adapters
from runtime.protocol.errors import (
    BadRequest,
    DeadlineExceeded,
    InternalFault,
    PromptTooLong,
    QueueFull,
    RuntimeFault,
    WireError,
    from_dict,
)
from runtime.protocol.io_struct import (
    BatchEmbeddingOutput,
    EmbeddingOutput,
    EmbeddingReqInput,
    TokenizedEmbeddingReqInput,
    new_rid,
)
from runtime.protocol.requests.batching import count_ids
from runtime.protocol.requests.single import cache_key

Embedded: TypeAlias = EmbeddingOutput | RuntimeFault

_UNSERVED = (
    ("image_data", "the model reads text only"),
    ("video_data", "the model reads text only"),
    ("audio_data", "the model reads text only"),
    ("lora_id", "an adapter is named by lora_path"),
)


def prepare_embedding(preparer: Preparer, request: EmbeddingReqInput) -> TokenizedEmbeddingReqInput:
    """One item of a normalised request as ids, framed as the checkpoint's tokenizer frames a whole text.
    Raises BadRequest and its kinds."""
    for name, why in _UNSERVED:
        if getattr(request, name) not in (None, [], [None]):
            raise BadRequest(f"{name} is not supported: {why}", where=name)
    if request.dimensions is not None and request.dimensions < 1:
        raise BadRequest(f"must be at least 1, got {request.dimensions}", where="dimensions")
    if request.timeout_s is not None and not 0 < request.timeout_s < float("inf"):
        raise BadRequest(f"must be a positive number of seconds, got {request.timeout_s}", where="timeout_s")
    if not isinstance(request.rid, str) or not request.rid or RID_END in request.rid:
        raise BadRequest(f"must be a non-empty string, got {request.rid!r}", where="rid")
    if request.lora_path is not None:
        check_name(request.lora_path)
        if not preparer.limits.adapters:
            raise no_adapters("lora_path")
    ids, kinds = _ids(preparer, request)
    limits = preparer.limits
    if len(ids) > limits.context and limits.auto_truncate:
        ids, kinds = ids[: limits.context], kinds[: limits.context]
    if len(ids) > limits.context:
        raise PromptTooLong(
            f"the text has {len(ids)} tokens; the context length is {limits.context}",
            where="input_ids" if request.text is None else "text",
            hint="shorten it",
        )
    return TokenizedEmbeddingReqInput(
        rid=f"{request.rid}{RID_END}{new_rid()}",
        http_worker_ipc=request.http_worker_ipc,
        input_ids=ids,
        token_type_ids=kinds if any(kinds) else None,
        dimensions=request.dimensions,
        cross_encoder=request.is_cross_encoder_request,
        priority=request.priority,
        extra_key=cache_key(request.extra_key, request.cache_salt),
        lora_path=request.lora_path if isinstance(request.lora_path, str) else None,
        time_left_s=request.timeout_s,
    )


def _ids(preparer: Preparer, request: EmbeddingReqInput) -> tuple[list[int], list[int]]:
    """Ids, and which of two texts each belongs to."""
    pair, text = request.pair, request.text
    most = preparer.limits.context * preparer.tokenizer.longest
    if pair is not None:
        return preparer.tokenizer.encode_whole(*(_fitting(preparer.limits, one, most) for one in pair))
    if isinstance(text, str):
        if not text:
            raise BadRequest("is empty", where="text")
        return preparer.tokenizer.encode_whole(_fitting(preparer.limits, text, most))
    vocab = preparer.limits.vocab_size
    ids: list[int] = []
    for index, token in enumerate(request.input_ids or ()):
        if type(token) is not int or not 0 <= token < vocab:
            raise BadRequest(
                f"must be a token id from 0 to {vocab - 1}, got {token!r}", where=f"input_ids[{index}]"
            )
        ids.append(token)
    if not ids:
        raise BadRequest("is empty", where="input_ids")
    return ids, [0] * len(ids)


def _fitting(limits: Limits, text: str, most: int) -> str:
    """Raises PromptTooLong for a text that cannot be few enough tokens, before it is encoded."""
    if len(text) > most and not limits.auto_truncate:
        raise PromptTooLong(
            f"the text has {len(text)} characters; the context's {limits.context} tokens hold at most {most}",
            where="text",
            hint="shorten it",
        )
    return text[:most]


class Embeddings:
    """The vectors of one call, as they come: one outcome per item, its vector or its own error. `notify` is
    called, from any thread, when all are there. Items that cannot be sent have their error from the start."""

    def __init__(
        self,
        requests: Sequence[EmbeddingReqInput],
        prepare: Callable[[EmbeddingReqInput], TokenizedEmbeddingReqInput],
        notify: Callable[[], None],
        observer: Observer = NOBODY,
        client: str = "",
    ) -> None:
        self._notify, self.client = notify, client
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self.sent: list[TokenizedEmbeddingReqInput] = []
        self._observed: dict[str, tuple[Observer, Begun]] = {}
        self._found: list[Embedded | None] = []
        for request in requests:
            try:
                made = prepare(request)
            except RuntimeFault as fault:
                self._found.append(fault)
                continue
            self.sent.append(made)
            self._found.append(None)
            begun = Begun(
                str(request.rid), len(made.input_ids), False, self._began, request.custom_labels or {}
            )
            self._observed[made.rid] = (observer if request.log_metrics else NOBODY, begun)
        places = [at for at, found in enumerate(self._found) if found is None]
        self.index = {one.rid: at for one, at in zip(self.sent, places, strict=True)}
        self.open = set(self.index)
        now = time.monotonic()
        self._deadlines = {one.rid: now + one.time_left_s for one in self.sent if one.time_left_s is not None}
        self._deadline = min(self._deadlines.values(), default=None)

    def start(self) -> None:
        """They are on their way."""
        now, client = time.monotonic(), CLIENT.get()
        for one in self.sent:
            one.flow = client.flow
            if one.rid in self._deadlines:
                one.time_left_s = max(0.0, self._deadlines[one.rid] - now)
        for observer, begun in self._observed.values():
            observer.on_begin(begun)
        client.spend(sum(len(one.input_ids) for one in self.sent))

    def leave(self) -> list[str]:
        """Nobody waits any more: the ids behind the frontend of those that did not come."""
        with self._lock:
            gone, self.open = sorted(self.open), set()
        for rid in gone:
            observer, begun = self._observed[rid]
            observer.on_abort(begun, None, time.monotonic() - self._began)
        return gone

    def put(self, output: EmbeddingOutput) -> None:
        finish = output.finish
        if finish is None or finish.type != "abort":
            self._settle({output.rid: output})
            return
        fault: RuntimeFault = InternalFault("the vector could not be made, without a reason")
        if finish.error:
            fault = from_dict(finish.error)
            if fault.where == output.rid:  # the caller knows it by another id
                fault.where = output.rid.partition(RID_END)[0]
        self._settle({output.rid: fault})

    def fail(self, fault: RuntimeFault) -> None:
        """All that did not come yet end with `fault`."""
        with self._lock:
            rids = list(self.open)
        self._settle(dict.fromkeys(rids, fault))

    def fail_one(self, rid: str, fault: RuntimeFault) -> None:
        self._settle({rid: fault})

    def expire(self) -> list[str]:
        """Those that did not come in time fail; their ids behind the frontend."""
        with self._lock:
            late = sorted(self.open)
        self.fail(DeadlineExceeded("no answer within the time allowed", where="timeout_s"))
        return late

    def _settle(self, outcomes: Mapping[str, Embedded]) -> None:
        with self._lock:
            settled = {rid: outcome for rid, outcome in outcomes.items() if rid in self.open}
            for rid, outcome in settled.items():
                self.open.discard(rid)
                self._found[self.index[rid]] = outcome
            over = not self.open
        for rid, outcome in settled.items():
            self._observe_end(rid, outcome)
        if over:
            self._notify()

    def _observe_end(self, rid: str, outcome: Embedded) -> None:
        observer, begun = self._observed[rid]
        seconds = time.monotonic() - self._began
        match outcome:
            case EmbeddingOutput():
                counters = {
                    "prompt_tokens": outcome.prompt_tokens,
                    "cached_tokens": outcome.cached_tokens,
                    "completion_tokens": 0,
                }
                observer.on_finish(
                    begun, {**counters, **outcome.meta, "finish_reason": {"type": "stop"}}, seconds
                )
            case RuntimeFault():
                observer.on_abort(begun, outcome, seconds)

    def take(self) -> list[Embedded] | None:
        """All of them, with the ids of the user's items; None: not all are there."""
        with self._lock:
            if self.open:
                return None
            found = [one for one in self._found if one is not None]
        elapsed = time.monotonic() - self._began
        return [_told(one, elapsed) for one in found]

    def time_left(self) -> float | None:
        if self._deadline is None:
            return None
        return max(0.0, self._deadline + GRACE_S - time.monotonic())


def _told(outcome: Embedded, elapsed: float) -> Embedded:
    match outcome:
        case EmbeddingOutput():
            outcome.rid = outcome.rid.partition(RID_END)[0]
            outcome.meta = {**outcome.meta, "e2e_latency": elapsed}
            return outcome
        case RuntimeFault():
            return again(outcome)


class EmbeddingFrontend:
    """The part of a frontend that waits for vectors. `post` sends to the scheduler, `abort` cancels there,
    `check` raises when nothing can be answered any more; name: the frontend's among several."""

    def __init__(
        self,
        preparer: Preparer,
        encoding: EncodingPool,
        *,
        post: Callable[[msgspec.Struct], None],
        abort: Callable[[Sequence[str]], None],
        check: Callable[[], None],
        name: str | None,
        max_live: int,
        observer: Observer = NOBODY,
    ) -> None:
        self._observer, self._encoding = observer, encoding
        self._prepare = partial(prepare_embedding, preparer)
        self._post, self._abort, self._check = post, abort, check
        self._name, self._max_live = name, max_live
        self._lock = threading.Lock()
        self._waiting: dict[str, Embeddings] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def embed(self, request: EmbeddingReqInput) -> list[Embedded]:
        """See TokenizerManager.embed."""
        self._check()
        request.normalize_batch_and_arguments()
        waiter = Waiter()
        make = partial(self._made, request, waiter.notifier(lambda: None), CLIENT.get().name)
        if (size := _text_size(request)) > LONG:
            waiting = await self._encoding.run(size, make)
        else:
            waiting = make()
        with self._sent(waiting):
            while (found := waiting.take()) is None:
                if not await waiter.wait(waiting.time_left()):
                    self._abort(waiting.expire())
            return _single_raises(request, found)

    def wait(self, request: EmbeddingReqInput) -> list[Embedded]:
        """The same for threads: blocks."""
        self._check()
        request.normalize_batch_and_arguments()
        event = threading.Event()
        waiting = self._made(request, event.set, CLIENT.get().name)
        with self._sent(waiting):
            while (found := waiting.take()) is None:
                if not event.wait(waiting.time_left()):
                    self._abort(waiting.expire())
                event.clear()
            return _single_raises(request, found)

    def _made(self, request: EmbeddingReqInput, notify: Callable[[], None], client: str) -> Embeddings:
        items = [request[index] for index in range(len(request))]
        for item in items:
            item.http_worker_ipc = self._name
        return Embeddings(items, self._prepare, notify, self._observer, client)

    @contextmanager
    def _sent(self, waiting: Embeddings) -> Iterator[None]:
        """Send it; whatever is still open at the end is cancelled."""
        with self._lock:
            if len(self._waiting) + len(waiting.sent) > self._max_live:
                raise QueueFull(
                    f"The request queue is full. {len(self._waiting)} vectors are pending here, "
                    f"at most {self._max_live}",
                    hint="try again later",
                )
            self._waiting.update(dict.fromkeys(waiting.index, waiting))
        try:
            # After they are registered: who ends the engine in between fails them, or is seen here.
            self._check()
            waiting.start()
            for one in waiting.sent:
                try:
                    self._post(one)
                except WireError as fault:  # this one cannot travel, the others can
                    waiting.fail_one(one.rid, fault)
            yield
        finally:
            with self._lock:
                for rid in waiting.index:
                    self._waiting.pop(rid, None)
            self._abort(waiting.leave())

    def matching(self, matches: Callable[[str], bool], client: str | None) -> list[str]:
        """The ids behind the frontend of the items whose own ids match, of one client or (None) of all."""
        with self._lock:
            return [
                rid
                for rid, waiting in self._waiting.items()
                if matches(rid.partition(RID_END)[0]) and client in (None, waiting.client)
            ]

    def handle(self, item: BatchEmbeddingOutput) -> None:
        with self._lock:
            found = [(self._waiting.get(output.rid), output) for output in item.outputs]
        for waiting, output in found:
            if waiting is not None:
                waiting.put(output)

    def fail_all(self, fault: RuntimeFault) -> None:
        with self._lock:
            everybody = {id(waiting): waiting for waiting in self._waiting.values()}
        for waiting in everybody.values():
            waiting.fail(fault)


def _single_raises(request: EmbeddingReqInput, found: list[Embedded]) -> list[Embedded]:
    for outcome in found:
        if request.is_single and isinstance(outcome, RuntimeFault):
            raise outcome
    return found


def _text_size(request: EmbeddingReqInput) -> int:
    """Characters to tokenise, or other work of about the same length."""
    text, items = request.text or "", PER_ITEM * len(request)
    if request.input_ids:
        return items + count_ids(request.input_ids)
    if isinstance(text, str):
        return items + len(text)
    return items + sum(len(one) if isinstance(one, str) else sum(map(len, one)) for one in text)

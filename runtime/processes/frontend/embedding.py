"""Embedding requests at the frontend: texts are checked and tokenised, sent, and waited for together.

It knows the tokenizer and the limits, not how vectors are computed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Text:
    """An item that was sent. index: its place in the request."""

    index: int
    tokens: TokenizedEmbeddingReqInput
    begun: Begun
    observer: Observer


class Embeddings:
    """The outcomes of one request: a vector or an error per item. `notify` is called, from any thread, when
    all are there. Items that cannot be sent have their error from the start. texts: the others, by their ids
    behind the frontend."""

    def __init__(
        self,
        requests: Sequence[EmbeddingReqInput],
        prepare: Callable[[EmbeddingReqInput], TokenizedEmbeddingReqInput],
        notify: Callable[[], None],
        observer: Observer,
    ) -> None:
        self._notify, self._began = notify, time.monotonic()
        self._lock = threading.Lock()
        self.texts: dict[str, _Text] = {}
        self._outcomes: dict[int, Embedded] = {}
        for index, request in enumerate(requests):
            try:
                tokens = prepare(request)
            except RuntimeFault as fault:
                self._outcomes[index] = fault
                continue
            size, labels = len(tokens.input_ids), request.custom_labels or {}
            begun = Begun(str(request.rid), size, False, self._began, labels)
            told = observer if request.log_metrics else NOBODY
            self.texts[tokens.rid] = _Text(index, tokens, begun, told)
        self._open = set(self.texts)
        seconds = [text.tokens.time_left_s for text in self.texts.values()]
        allowed = min((one for one in seconds if one is not None), default=None)
        self._deadline = None if allowed is None else time.monotonic() + allowed
        self.client = CLIENT.get()

    @property
    def done(self) -> bool:
        return not self._open

    @property
    def open(self) -> list[str]:
        with self._lock:
            return sorted(self._open)

    def start(self) -> None:
        """It is about to be sent."""
        for text in self.texts.values():
            text.tokens.flow = self.client.flow
            if self._deadline is not None:
                text.tokens.time_left_s = max(0.0, self._deadline - time.monotonic())
            text.observer.on_begin(text.begun)
        self.client.spend(sum(len(text.tokens.input_ids) for text in self.texts.values()))

    def put(self, output: EmbeddingOutput) -> None:
        finish = output.finish
        if finish is None or finish.type != "abort":
            self._settle(output.rid, output)
            return
        fault: RuntimeFault = InternalFault("the vector could not be made, without a reason")
        if finish.error:
            fault = from_dict(finish.error)
            if fault.where == output.rid:  # the caller knows it by another id
                fault.where = output.rid.partition(RID_END)[0]
        self._settle(output.rid, fault)

    def fail(self, fault: RuntimeFault, rid: str | None = None) -> None:
        """Those that did not come yet, or only `rid`, end with `fault`."""
        for one in self.open if rid is None else (rid,):
            self._settle(one, fault)

    def expire(self) -> list[str]:
        """Those that did not come in time fail; which ones those are."""
        late = self.open
        self.fail(DeadlineExceeded("no answer within the time allowed", where="timeout_s"))
        return late

    def leave(self) -> list[str]:
        """The caller does not wait any more; those that did not come."""
        with self._lock:
            left, self._open = sorted(self._open), set()
        for rid in left:
            self.texts[rid].observer.on_abort(self.texts[rid].begun, None, self._elapsed())
        return left

    def _settle(self, rid: str, outcome: Embedded) -> None:
        with self._lock:
            if rid not in self._open:
                return
            self._open.discard(rid)
            text, done = self.texts[rid], not self._open
            self._outcomes[text.index] = outcome
        match outcome:
            case EmbeddingOutput():
                meta = {
                    "prompt_tokens": outcome.prompt_tokens,
                    "cached_tokens": outcome.cached_tokens,
                    "completion_tokens": 0,
                    **outcome.meta,
                    "finish_reason": {"type": "stop"},
                }
                text.observer.on_finish(text.begun, meta, self._elapsed())
            case RuntimeFault():
                text.observer.on_abort(text.begun, outcome, self._elapsed())
        if done:
            self._notify()

    def outcomes(self) -> list[Embedded]:
        """All of them in order, with the ids of the user's items."""
        elapsed = self._elapsed()
        return [_for_caller(self._outcomes[index], elapsed) for index in sorted(self._outcomes)]

    def time_left(self) -> float | None:
        """Seconds until the caller need not wait any more; None: there is no limit."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline + GRACE_S - time.monotonic())

    def _elapsed(self) -> float:
        return time.monotonic() - self._began


def _for_caller(outcome: Embedded, elapsed: float) -> Embedded:
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
        begin = partial(self._begin, request, waiter.notifier(lambda: None))
        size = _text_size(request)
        call = begin() if size <= LONG else await self._encoding.run(size, begin)
        with self._sent(call):
            while not call.done:
                if not await waiter.wait(call.time_left()):
                    self._abort(call.expire())
            return _single_raises(request, call.outcomes())

    def wait(self, request: EmbeddingReqInput) -> list[Embedded]:
        """The same for threads: blocks."""
        self._check()
        request.normalize_batch_and_arguments()
        event = threading.Event()
        call = self._begin(request, event.set)
        with self._sent(call):
            while not call.done:
                if not event.wait(call.time_left()):
                    self._abort(call.expire())
                event.clear()
            return _single_raises(request, call.outcomes())

    def _begin(self, request: EmbeddingReqInput, notify: Callable[[], None]) -> Embeddings:
        items = [request[index] for index in range(len(request))]
        for item in items:
            item.http_worker_ipc = self._name
        return Embeddings(items, self._prepare, notify, self._observer)

    @contextmanager
    def _sent(self, call: Embeddings) -> Iterator[None]:
        """Send it; what is still open at the end is cancelled."""
        with self._lock:
            if len(self._waiting) + len(call.texts) > self._max_live:
                raise QueueFull(
                    f"The request queue is full. {len(self._waiting)} vectors are pending here, "
                    f"at most {self._max_live}",
                    hint="try again later",
                )
            self._waiting.update(dict.fromkeys(call.texts, call))
        try:
            # After they are registered: an engine that ends in between fails them, or is noticed here.
            self._check()
            call.start()
            for rid, text in call.texts.items():
                try:
                    self._post(text.tokens)
                except WireError as fault:  # this one cannot travel, the others can
                    call.fail(fault, rid)
            yield
        finally:
            with self._lock:
                for rid in call.texts:
                    self._waiting.pop(rid, None)
            self._abort(call.leave())

    def matching(self, matches: Callable[[str], bool], client: str | None) -> list[str]:
        """The ids behind the frontend of the items whose own ids match, of one client or (None) of all."""
        with self._lock:
            return [
                rid
                for rid, waiting in self._waiting.items()
                if matches(rid.partition(RID_END)[0]) and client in (None, waiting.client.name)
            ]

    def handle(self, item: BatchEmbeddingOutput) -> None:
        with self._lock:
            found = [(self._waiting.get(output.rid), output) for output in item.outputs]
        for waiting, output in found:
            if waiting is not None:
                waiting.put(output)

    def fail_all(self, fault: RuntimeFault) -> None:
        with self._lock:
            waiting = list(self._waiting.items())
        for rid, call in waiting:
            call.fail(fault, rid)


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

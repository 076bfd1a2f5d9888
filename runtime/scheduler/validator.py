"""Request validator: what a request must get past before it lives: its id, its session, its numbers, the
queue's length, its adapter. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized

import msgspec

from runtime.cache.manager import CacheManager
from runtime.config.scheduler import SchedulerConfig
from runtime.protocol.errors import BadRequest, PromptTooLong, QueueFull
from runtime.protocol.io_struct import TokenizedGenerateReqInput
from runtime.protocol.sampling import SamplingParams
from runtime.scheduler.queues import WaitingQueue
from runtime.scheduler.requests.adapters import AdapterRegistry
from runtime.scheduler.requests.images import ImageRegistry
from runtime.scheduler.requests.request import Request
from runtime.scheduler.requests.stop import search_of
from runtime.scheduler.running_batch import Fail
from runtime.scheduler.sessions import Sessions


class RequestValidator:
    """`live`: all requests there are; `compiling`: those that wait for their grammar. `cancel`: ends a turn
    that is replaced. `fail`: ends one that makes way. `verify_params`: see Scheduler."""

    def __init__(
        self,
        manager: CacheManager,
        vocab_size: int,
        live: Mapping[str, Request],
        waiting: WaitingQueue,
        compiling: Sized,
        sessions: Sessions,
        *,
        cancel: Callable[[str], object],
        fail: Fail,
        adapters: AdapterRegistry,
        images: ImageRegistry,
        verify_params: Callable[[SamplingParams], None] | None = None,
    ) -> None:
        self._manager, self._vocab_size, self._live = manager, vocab_size, live
        self._waiting, self._compiling, self._sessions = waiting, compiling, sessions
        self._cancel, self._fail, self._verify_params = cancel, fail, verify_params
        self._adapters, self._images = adapters, images

    def accept(
        self, req: TokenizedGenerateReqInput, config: SchedulerConfig, now: float
    ) -> TokenizedGenerateReqInput:
        """The request with its whole prompt, its adapter's number and the key that goes with it. Raises
        BadRequest for what makes it impossible, whatever else runs, ModelNotFound for an adapter that is not
        loaded, and QueueFull."""
        if req.rid in self._live:
            raise BadRequest("a request with this id is already running", where="rid", hint="use a new id")
        if req.lora_path is not None:
            number, key = self._adapters.key_of(req.lora_path, req.extra_key)
            req = msgspec.structs.replace(req, adapter=number, extra_key=key)
        if req.images:
            if req.session_params is not None:
                raise BadRequest(
                    "a session's turns are text, this one has pictures",
                    where="session_params",
                    hint="send the whole conversation instead: what it begins with is in the cache",
                )
            req = msgspec.structs.replace(req, images=self._images.numbered(req.images, len(req.input_ids)))
        dropped: list[str] = []
        whole = req
        if req.session_params is not None:
            self._sessions.expire(now)
            limit = min(self._manager.slots, config.context_length or self._manager.slots)
            whole, dropped = self._sessions.compose(req, self._live, now, limit)
        verify(whole, config, self._manager.slots, self._vocab_size)
        if self._verify_params is not None:
            self._verify_params(whole.sampling_params)
        if len(self._waiting) + len(self._compiling) >= config.max_waiting_requests:
            self._make_way(whole, config)
        if req.session_params is not None:
            for rid in dropped:
                self._cancel(rid)
            self._sessions.begin(whole, len(req.input_ids))
        return whole

    def _make_way(self, req: TokenizedGenerateReqInput, config: SchedulerConfig) -> None:
        """The queue is full. With the policy `priority` somebody of lower priority is given up; else somebody
        of the flow that fills it, if that is not the request's own."""
        full = QueueFull(
            "The request queue is full.",
            where=f"max_waiting_requests = {config.max_waiting_requests}",
            hint="try again later",
        )
        if config.policy == "priority":
            chosen = self._waiting.lowest()
            if chosen is not None and chosen.source.priority >= req.priority:
                chosen = None
        else:
            chosen = self._waiting.crowding(req.flow)
        if chosen is None:
            raise full
        self._fail(chosen, full)


def verify(req: TokenizedGenerateReqInput, config: SchedulerConfig, slots: int, vocab_size: int) -> None:
    """Raise BadRequest, naming the field, for what makes the request impossible. `slots`: the KV pool's."""
    if not req.input_ids:
        raise BadRequest("the prompt has no tokens", where="input_ids")
    req.sampling_params.verify()
    if not (min(req.input_ids) >= 0 and max(req.input_ids) < vocab_size):
        raise BadRequest(f"ids must be in [0, {vocab_size})", where="input_ids")
    prompt, new = len(req.input_ids), req.sampling_params.max_new_tokens
    if not -1 <= req.logprob_start_len <= prompt:
        raise BadRequest(
            f"must be -1 (none) or in the prompt of {prompt} tokens, got {req.logprob_start_len}",
            where="logprob_start_len",
        )
    if req.top_logprobs_num < 0:
        raise BadRequest(f"must be at least 0, got {req.top_logprobs_num}", where="top_logprobs_num")
    if any(not 0 <= token < vocab_size for token in req.sampling_params.logit_bias):
        raise BadRequest(f"ids must be in [0, {vocab_size})", where="sampling_params.logit_bias")
    if req.sampling_params.stop_regex:
        search_of(req.sampling_params.stop_regex)
    if any(not 0 <= token < vocab_size for token in req.token_ids_logprob or ()):
        raise BadRequest(f"ids must be in [0, {vocab_size})", where="token_ids_logprob")
    for limit, what in ((config.context_length, "the context length"), (slots, "the KV pool")):
        if limit is not None and prompt + new > limit:
            raise PromptTooLong(
                f"{prompt} prompt tokens + max_new_tokens {new} = {prompt + new},"
                f" but {what} is {limit} tokens",
                where="input_ids",
                hint="shorten the prompt or lower max_new_tokens",
            )

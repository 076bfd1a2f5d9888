"""Whether a request can run at all, whatever else runs. Knows no queues and no other request."""

from __future__ import annotations

from runtime.config.scheduler import SchedulerConfig
from runtime.protocol.errors import BadRequest, PromptTooLong
from runtime.protocol.io_struct import TokenizedGenerateReqInput
from runtime.scheduler.requests.stop import search_of


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

"""What OpenAI's generating routes share: the parameters of a body under OpenAI's, sglang's and vLLM's names,
as the runtime's; usage and finish reasons of an answer. Extensions are top-level fields, as `extra_body`
sends them. A known field without effect is listed in NO_EFFECT; an unknown one is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from runtime.formats.reply import ReplyParser
from runtime.protocol.errors import BadRequest, ModelNotFound
from runtime.protocol.requests.generate import GenerateReqInput
from runtime.protocol.sampling import SamplingParams, set_fields
from runtime.server.context import ServerContext
from runtime.server.http.body import check_range
from runtime.server.http.ignored import refuse_unsupported
from runtime.server.http.openapi import Operation
from runtime.server.openai.logprobs import prompt_entries
from runtime.server.output_format import OutputFields, constraint_of

TOKEN_RULES = "token_rules"
"""The logit processor of allowed_token_ids and bad_words."""
MAX_BAD_WORDS, MAX_BAD_WORD = 256, 256
"""Texts in bad_words, and characters of one."""
MAX_TOP_LOGPROBS = 20
DEFAULT_MODEL = "default"
NO_MODEL = "dummy"
"""The model that Hugging Face's InferenceClient sends if it was given only an address."""
NO_EFFECT = frozenset(
    {
        "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "verbosity",
    }
)  # fmt: skip
"""Fields about a provider's accounts and storage, which this server does not have."""
NAMES = {
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "text": "prompt", "input_ids": "prompt",
}  # fmt: skip
"""The runtime's names of fields -> those of these routes."""
_REFUSED = {
    "moderation": "there is no moderation",
    "bootstrap_pair_key": "a pair is named by bootstrap_host, bootstrap_port and bootstrap_room",
}
openai_operation = partial(Operation, errors=(404, 501, 504), tag="openai")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """include_usage: a last chunk with the whole usage; continuous_usage_stats: usage so far in every one."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Sampled(OutputFields, kw_only=True):
    """rid and request_id name the request, thinking_token_budget is another name of max_thinking_tokens,
    include_stop_str_in_output of no_stop_trim. allowed_token_ids: no others are generated. bad_words: texts
    that are not generated, as tokenized at the beginning of a text and after a space. truncate_prompt_tokens:
    see GenerateReqInput. include_reasoning: false = the answer has no reasoning."""

    model: str = DEFAULT_MODEL
    stream: bool | None = None
    user: str | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    moderation: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: str | list[str] | None = None
    custom_logit_processor: str | None = None
    custom_params: dict[str, Any] | None = None
    rid: str | None = None
    request_id: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    timeout_s: float | None = None
    include_reasoning: bool | None = None
    require_reasoning: bool | None = None
    max_thinking_tokens: int | None = None
    thinking_token_budget: int | None = None

    @property
    def named(self) -> str | None:
        """The request's id, if the client set one."""
        return self.rid or self.request_id or None


class Generating(Sampled, kw_only=True, forbid_unknown_fields=True):
    """Fields of both completions and chat completions; the second block are extensions.

    return_token_ids: the ids of prompt and output. prompt_logprobs: so many of the likeliest tokens at each
    position of the prompt, with the prompt's own.
    """

    n: int | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, Any] | None = None
    verbosity: str | None = None

    session_params: dict[str, Any] | None = None
    jump_forward: bool | None = None
    return_hidden_states: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    session_id: str | None = None
    custom_labels: dict[str, str] | None = None
    no_logs: bool | None = None
    log_metrics: bool | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    lora_path: str | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None
    bootstrap_pair_key: str | None = None

    @property
    def samples(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def streaming(self) -> StreamOptions:
        return self.stream_options or StreamOptions()


_SPECIAL = {"custom_logit_processor", "max_thinking_tokens", "rid", "stream", "bootstrap_pair_key"}
_SAMPLING = {*Sampled.__struct_fields__} & {*SamplingParams.__struct_fields__} - _SPECIAL
"""Fields that sampling_params have under the same name."""
_FIELDS = {*Generating.__struct_fields__} & {*GenerateReqInput.__struct_fields__} - _SPECIAL
_FIELDS -= {*OutputFields.__struct_fields__}
"""Fields that a GenerateReqInput has under the same name."""


def generation_of(ctx: ServerContext, body: Sampled) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The sampling_params and the other fields of a GenerateReqInput that are set, and the runtime's names of
    fields -> this body's, if those differ. Raises BadRequest."""
    values, constraint = set_fields(body), constraint_of(body)
    names = dict(constraint.names)
    sampling = {name: value for name, value in values.items() if name in _SAMPLING}
    fields = {name: value for name, value in values.items() if name in _FIELDS}
    if body.min_tokens is not None:
        sampling["min_new_tokens"] = body.min_tokens
    if body.include_stop_str_in_output:
        sampling["no_stop_trim"] = True
    sampling |= _token_rules(ctx, body) | constraint.sampling
    if body.custom_logit_processor:
        fields["custom_logit_processor"] = body.custom_logit_processor
    if body.rid and body.request_id and body.rid != body.request_id:
        raise BadRequest("must be the same as rid, which also names the request", where="request_id")
    if body.named is not None or body.rid is not None:
        fields["rid"] = body.named or ""  # an empty one is refused as such
        if body.rid is None:
            names["rid"] = "request_id"
    budgets = {body.max_thinking_tokens, body.thinking_token_budget} - {None}
    if len(budgets) > 1:
        raise BadRequest(
            "must be the same as max_thinking_tokens, which means the same", where="thinking_token_budget"
        )
    if budgets:
        fields["max_thinking_tokens"] = budgets.pop()
        if body.max_thinking_tokens is None:
            names["max_thinking_tokens"] = "thinking_token_budget"
    return sampling, fields, names


def _token_rules(ctx: ServerContext, body: Sampled) -> dict[str, Any]:
    """sampling_params with the logit processor for allowed_token_ids and bad_words."""
    rules: dict[str, Any] = {}
    if body.allowed_token_ids:
        for token in body.allowed_token_ids:
            if not 0 <= token < (size := ctx.model.vocab_size):
                raise BadRequest(f"{token} is not in the vocabulary of {size}", where="allowed_token_ids")
        rules["allowed_token_ids"] = sorted(set(body.allowed_token_ids))
    texts = [body.bad_words] if isinstance(body.bad_words, str) else body.bad_words or []
    if len(texts) > MAX_BAD_WORDS:
        raise BadRequest(f"has {len(texts)} texts; at most {MAX_BAD_WORDS}", where="bad_words")
    if any(texts):
        rules["bad_words_ids"] = [spelling for text in texts for spelling in _spellings(ctx, text)]
    if not rules:
        return {}
    name = "allowed_token_ids" if body.allowed_token_ids else "bad_words"
    if body.custom_logit_processor or body.custom_params:
        raise BadRequest("cannot be combined with custom_logit_processor", where=name)
    return {"custom_logit_processor": TOKEN_RULES, "custom_params": rules}


def _spellings(ctx: ServerContext, text: str) -> list[list[int]]:
    """The ids of a text at the beginning and after a space."""
    if not text.strip() or len(text) > MAX_BAD_WORD:
        raise BadRequest(
            f"must contain strings of 1 to {MAX_BAD_WORD} characters that are not only whitespace",
            where="bad_words",
        )
    encode = ctx.manager.tokenizer.encode_plain
    spellings = {tuple(encode(one)) for one in (text.lstrip(), f" {text.lstrip()}", text)}
    return sorted(list(ids) for ids in spellings if ids)


def check_model(ctx: ServerContext, name: str) -> str | None:
    """The adapter in a `name` MODEL:ADAPTER; None for the model alone. Raises ModelNotFound unless MODEL is
    one of the served names, the model's path, "default" or empty, or the server accepts any name."""
    known = (*ctx.served_names, ctx.model.path, DEFAULT_MODEL, NO_MODEL)
    if name in known or not name:
        return None
    adapters = [name.removeprefix(f"{model}:") for model in known if name.startswith(f"{model}:")]
    if adapters and adapters[0] and ctx.model.takes_adapters:
        return adapters[0]
    if ctx.config.any_model_name:
        return None
    raise ModelNotFound(
        f"the model {name[:200]!r} does not exist",
        where="model",
        hint=f"this server has {', '.join(map(repr, ctx.served_names))}",
    )


def fields_of(ctx: ServerContext, body: Generating, max_tokens: int) -> tuple[dict[str, Any], dict[str, str]]:
    """The body's part of a GenerateReqInput, without its prompt; and the runtime's names of fields -> this
    body's. `max_tokens`: if the body has none. The checkpoint's generation_config comes before the server's
    defaults. Raises BadRequest, NotSupported."""
    adapter = check_model(ctx, body.model)
    refuse_unsupported(body, _REFUSED)
    if body.stream_options is not None and not body.stream:
        raise BadRequest("needs stream: true", where="stream_options")
    check_range(body.n, "n", 1)
    sampling, fields, names = generation_of(ctx, body)
    names = {**NAMES, **names}
    sampling = {**ctx.model.default_sampling, "max_new_tokens": max_tokens, **sampling}
    if body.n is not None:
        sampling["n"] = body.n
    if body.return_token_ids:
        fields["return_prompt_token_ids"] = True
    if body.prompt_logprobs is not None:
        if body.stream:
            raise BadRequest("are not available in streams", where="prompt_logprobs", hint="leave out stream")
        check_range(body.prompt_logprobs, "prompt_logprobs", 0)
        fields = {**with_logprobs(fields, body.prompt_logprobs), "logprob_start_len": 0}
        names["top_logprobs_num"] = "prompt_logprobs"
    if body.lora_path == "":
        del fields["lora_path"]
    elif adapter is not None and body.lora_path not in (None, adapter):
        raise BadRequest(
            f"is {body.lora_path!r}, but the model's name selects {adapter!r}", where="lora_path"
        )
    if adapter is not None:
        fields["lora_path"] = adapter
    return {"sampling_params": sampling, **fields}, names


def with_logprobs(fields: Mapping[str, Any], top: int) -> dict[str, Any]:
    """The same, with log-probabilities of the output, and of at least `top` tokens at each position."""
    most = max(top, fields.get("top_logprobs_num") or 0)
    return {**fields, "return_logprob": True, "return_text_in_logprobs": True, "top_logprobs_num": most}


def prompt_logprobs_of(
    body: Generating, reply: ReplyParser
) -> list[dict[str, Any] | None] | msgspec.UnsetType:
    """Of an answer, if the body asks for them."""
    return msgspec.UNSET if (top := body.prompt_logprobs) is None else prompt_entries(reply.meta, top)


def new_ids_of(reply: ReplyParser) -> list[int]:
    """The ids of the last delta, without those that replace ids sent before."""
    return [] if reply.output is None else list(reply.output.output_ids[reply.output.replaced :])


def prompts_of(prompt: str | list[Any], path: str) -> dict[str, Any]:
    """{"text": ...} or {"input_ids": ...} of a text, ids, or a list of either. Raises BadRequest for a list
    of several kinds, naming `path`."""
    match prompt:
        case str():
            return {"text": prompt}
        case []:
            raise BadRequest("is empty", where=path)
        case [*items] if all(isinstance(item, str) for item in items):
            return {"text": items}
        case [*items] if any(all(isinstance(item, kind) for item in items) for kind in (int, list)):
            return {"input_ids": items}
        case _:
            raise BadRequest(
                "must be a string, a list of strings, ids, or a list of lists of ids", where=path
            )


def finish_of(reply: ReplyParser) -> tuple[str | None, str | int | None]:
    """finish_reason and the stop that matched; None while the reply goes on."""
    reason = reply.meta.get("finish_reason") or {}
    matched = reason.get("matched")
    return reason.get("type"), matched if isinstance(matched, str | int) else None


def extras_of(reply: ReplyParser) -> dict[str, Any]:
    """Optional fields of a choice: hidden_states, prompt_token_ids."""
    return {name: reply.meta[name] for name in ("hidden_states", "prompt_token_ids") if name in reply.meta}


def usage_of(ctx: ServerContext, replies: Sequence[ReplyParser], prompts: int) -> dict[str, Any]:
    """Tokens of one request; every prompt counts once, however many samples it has."""

    def total(name: str, some: Iterable[ReplyParser] = replies) -> int:
        return sum(int(reply.meta.get(name) or 0) for reply in some)

    prompt, completion = total("prompt_tokens", replies[:prompts]), total("completion_tokens")
    reasoning = total("reasoning_tokens")
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "reasoning_tokens": reasoning,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
    if ctx.config.enable_cache_report:
        usage["prompt_tokens_details"] = {"cached_tokens": total("cached_tokens", replies[:prompts])}
    return usage

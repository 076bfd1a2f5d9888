"""What OpenAI's generating routes share: the sampling words of a body, its answers' usage and finish reasons.

Extensions stand beside OpenAI's own fields, as `extra_body` sends them. A field that is known and has no
effect here is listed in NO_EFFECT; one that is not known is refused. Nothing here knows prompts or messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from runtime.formats.reply import ReplyParser
from runtime.protocol.errors import BadRequest, ModelNotFound
from runtime.protocol.sampling import set_fields
from runtime.server.context import ServerContext
from runtime.server.http.errors import FieldNames
from runtime.server.http.ignored import refuse_unsupported
from runtime.server.openai.logprobs import prompt_entries
from runtime.server.output_format import OutputFields, asked

TOKEN_RULES = "token_rules"
"""The logit processor of allowed_token_ids and bad_words."""
MAX_BAD_WORDS, MAX_BAD_WORD = 256, 256
"""Texts in bad_words, and characters of one."""


class Sampled(OutputFields, kw_only=True):
    """rid and request_id name the request, thinking_token_budget is another name of max_thinking_tokens,
    include_stop_str_in_output of no_stop_trim. allowed_token_ids: no others are generated. bad_words: texts
    that are not generated, as the tokenizer writes them at the beginning of a text and after a blank.
    truncate_prompt_tokens: see GenerateReqInput. include_reasoning: false = thoughts are left out."""

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
        """The request's id, where the client gave one."""
        return self.rid or self.request_id or None


_SAMPLING = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
        "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "stop_regex", "no_stop_trim",
        "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "stream_interval",
        "custom_params",
    }
)  # fmt: skip
"""Fields that sampling_params have under the same name."""
_FIELDS = frozenset(
    {
        "extra_key", "cache_salt", "priority", "truncate_prompt_tokens", "truncation_side", "timeout_s",
        "require_reasoning", "session_params", "session_id", "jump_forward", "return_hidden_states",
        "return_prompt_token_ids", "custom_labels", "no_logs", "log_metrics", "routed_dp_rank",
        "data_parallel_rank", "lora_path", "bootstrap_host", "bootstrap_port", "bootstrap_room",
    }
)  # fmt: skip
"""Fields that a GenerateReqInput has under the same name."""


def generation_of(ctx: ServerContext, body: Sampled) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sampling_params and the other fields of a GenerateReqInput that are set. Raises BadRequest."""
    sampling: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for name, value in set_fields(body).items():
        if name in _SAMPLING:
            sampling[name] = value
        elif name in _FIELDS:
            fields[name] = value
    if body.min_tokens is not None:
        sampling["min_new_tokens"] = body.min_tokens
    if body.include_stop_str_in_output:
        sampling["no_stop_trim"] = True
    sampling |= _token_rules(ctx, body) | asked(body).sampling
    if body.custom_logit_processor:
        fields["custom_logit_processor"] = body.custom_logit_processor
    if body.rid and body.request_id and body.rid != body.request_id:
        raise BadRequest("must be the same as rid, which also names the request", where="request_id")
    if body.rid == "":
        fields["rid"] = ""  # refused as such
    if body.named is not None:
        fields["rid"] = body.named
    budgets = {body.max_thinking_tokens, body.thinking_token_budget} - {None}
    if len(budgets) > 1:
        raise BadRequest(
            "must be the same as max_thinking_tokens, which means the same", where="thinking_token_budget"
        )
    if budgets:
        fields["max_thinking_tokens"] = budgets.pop()
    return sampling, fields


def field_names_of(body: Sampled) -> FieldNames:
    """The runtime's names of fields -> this body's, where those differ. Raises BadRequest."""
    names = dict(asked(body).names)
    if body.request_id is not None and body.rid is None:
        names["rid"] = "request_id"
    if body.thinking_token_budget is not None and body.max_thinking_tokens is None:
        names["max_thinking_tokens"] = "thinking_token_budget"
    return names


def _token_rules(ctx: ServerContext, body: Sampled) -> dict[str, Any]:
    """sampling_params with the logit processor for allowed_token_ids and bad_words."""
    rules: dict[str, Any] = {}
    if body.allowed_token_ids:
        _check_ids(ctx, body.allowed_token_ids)
        rules["allowed_token_ids"] = sorted(set(body.allowed_token_ids))
    words = [body.bad_words] if isinstance(body.bad_words, str) else body.bad_words or []
    if len(words) > MAX_BAD_WORDS:
        raise BadRequest(f"has {len(words)} texts; at most {MAX_BAD_WORDS}", where="bad_words")
    if any(words):
        rules["bad_words_ids"] = [spelling for word in words for spelling in _spellings(ctx, word)]
    if not rules:
        return {}
    name = "allowed_token_ids" if body.allowed_token_ids else "bad_words"
    if body.custom_logit_processor or body.custom_params:
        raise BadRequest("cannot be combined with custom_logit_processor", where=name)
    return {"custom_logit_processor": TOKEN_RULES, "custom_params": rules}


def _check_ids(ctx: ServerContext, ids: list[int]) -> None:
    for token in ids:
        if not 0 <= token < ctx.model.vocab_size:
            raise BadRequest(
                f"{token} is not in the vocabulary of {ctx.model.vocab_size}", where="allowed_token_ids"
            )


def _spellings(ctx: ServerContext, word: str) -> list[list[int]]:
    """The ids of a text at the beginning and after a blank."""
    if not word.strip() or len(word) > MAX_BAD_WORD:
        raise BadRequest(
            f"must contain strings of 1 to {MAX_BAD_WORD} characters that are not only whitespace",
            where="bad_words",
        )
    encode = ctx.manager.tokenizer.encode_plain
    found = {tuple(encode(text)) for text in (word.lstrip(), f" {word.lstrip()}", word)}
    return sorted(list(ids) for ids in found if ids)


DEFAULT_MODEL = "default"
NO_MODEL = "dummy"
"""What Hugging Face's InferenceClient sends where it was given an address and no model."""
NO_EFFECT = frozenset(
    {
        "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "verbosity",
    }
)  # fmt: skip
"""Fields that concern a provider's accounts and storage; a server of one's own has none."""
NAMES = {
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "text": "prompt", "input_ids": "prompt",
}  # fmt: skip
"""What the runtime's fields are called here, where they have another name."""
_REFUSED = {
    "moderation": "there is no moderation",
    "bootstrap_pair_key": "a pair is named by bootstrap_host, bootstrap_port and bootstrap_room",
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """include_usage: a last chunk with the whole usage; continuous_usage_stats: usage so far in every one."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Generating(Sampled, kw_only=True, forbid_unknown_fields=True):
    """Fields of both completions and chat completions; the second block are extensions.

    return_token_ids: the ids of prompt and output. prompt_logprobs: so many of the likeliest tokens at each
    place of the prompt, with the prompt's own. guided_decoding_backend has no effect: which backend keeps a
    constraint changes nothing of what it allows.
    """

    model: str = DEFAULT_MODEL
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    moderation: dict[str, Any] | None = None
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
    def tells_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def always_sends_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


def check_model(ctx: ServerContext, name: str) -> str | None:
    """The adapter that `name` asks for, in MODEL:ADAPTER; None for the model alone. Raises ModelNotFound
    unless the model is the served one: one of its names, its path, "default", or nothing; or any name may be
    used."""
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


def fields_of(ctx: ServerContext, body: Generating, max_tokens: int) -> dict[str, Any]:
    """The body's part of a GenerateReqInput, its prompt aside. `max_tokens`: where the body says none.

    What the checkpoint's generation_config says comes before this server's defaults. Raises BadRequest,
    NotSupported.
    """
    adapter = check_model(ctx, body.model)
    refuse_unsupported(body, _REFUSED)
    if body.stream_options is not None and not body.stream:
        raise BadRequest("needs stream: true", where="stream_options")
    if body.samples < 1:
        raise BadRequest(f"must be at least 1, got {body.n}", where="n")
    own, fields = generation_of(ctx, body)
    sampling = {**ctx.model.default_sampling, "max_new_tokens": max_tokens, **own}
    if body.n is not None:
        sampling["n"] = body.n
    fields |= _prompt_facts(body)
    if body.lora_path == "":
        del fields["lora_path"]
    elif adapter is not None and body.lora_path not in (None, adapter):
        raise BadRequest(
            f"is {body.lora_path!r}, but the model's name selects {adapter!r}", where="lora_path"
        )
    if adapter is not None:
        fields["lora_path"] = adapter
    return {"sampling_params": sampling, **fields}


def names_of(body: Generating) -> FieldNames:
    """What the runtime's fields are called in this body. Raises BadRequest."""
    tops = {"top_logprobs_num": "prompt_logprobs"} if body.prompt_logprobs is not None else {}
    return {**NAMES, **field_names_of(body), **tops}


def _prompt_facts(body: Generating) -> dict[str, Any]:
    """Fields of a GenerateReqInput for what is wanted of the prompt, besides what the route itself asks for
    (see `with_logprobs`)."""
    fields: dict[str, Any] = {"return_prompt_token_ids": True} if body.return_token_ids else {}
    if body.prompt_logprobs is None:
        return fields
    if body.stream:
        raise BadRequest("are not available in streams", where="prompt_logprobs", hint="leave out stream")
    if body.prompt_logprobs < 0:
        raise BadRequest(f"must be at least 0, got {body.prompt_logprobs}", where="prompt_logprobs")
    fields |= {"return_logprob": True, "return_text_in_logprobs": True, "logprob_start_len": 0}
    return {**fields, "top_logprobs_num": body.prompt_logprobs}


def with_logprobs(fields: Mapping[str, Any], top: int) -> dict[str, Any]:
    """The same, with log-probabilities of the output, and of `top` tokens at each of its places at least."""
    most = max(top, fields.get("top_logprobs_num") or 0)
    return {**fields, "return_logprob": True, "return_text_in_logprobs": True, "top_logprobs_num": most}


def prompt_facts_of(body: Generating, reply: ReplyParser) -> dict[str, Any]:
    """prompt_logprobs of an answer, where they were asked for."""
    if body.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": prompt_entries(reply.meta, body.prompt_logprobs)}


def new_ids_of(reply: ReplyParser) -> list[int]:
    """The ids of the last delta; of a stream's those that do not take the place of ids sent before."""
    return [] if reply.output is None else list(reply.output.output_ids[reply.output.replaced :])


def prompts_of(prompt: str | list[Any], where: str) -> dict[str, Any]:
    """{"text": ...} or {"input_ids": ...} of a text, ids, or a list of either. Raises BadRequest for a list
    of several kinds, naming `where`."""
    match prompt:
        case str():
            return {"text": prompt}
        case []:
            raise BadRequest("is empty", where=where)
        case [*items] if all(isinstance(item, str) for item in items):
            return {"text": items}
        case [*items] if all(isinstance(item, int) for item in items):
            return {"input_ids": items}
        case [*items] if all(isinstance(item, list) for item in items):
            return {"input_ids": items}
        case _:
            raise BadRequest(
                "must be a string, a list of strings, ids, or a list of lists of ids", where=where
            )


def place_of(index: int, prompts: int, samples: int) -> int:
    """Items come as p1, p2, ..., p1, p2, ...; choices are numbered prompt by prompt."""
    return index % prompts * samples + index // prompts


def finish_of(reply: ReplyParser) -> tuple[str | None, str | int | None]:
    """finish_reason and what was matched; None while it goes on."""
    match reply.meta.get("finish_reason"):
        case None:
            return None, None
        case {"type": str(kind), "matched": (str() | int()) as matched}:
            return kind, matched
        case {"type": str(kind)}:
            return kind, None
        case other:
            raise TypeError(f"a finish reason is an object, got {other!r}")


def extras_of(reply: ReplyParser) -> dict[str, Any]:
    """What a choice has besides, where it was asked for: hidden_states, prompt_token_ids."""
    return {name: reply.meta[name] for name in ("hidden_states", "prompt_token_ids") if name in reply.meta}


def usage_of(ctx: ServerContext, replies: Sequence[ReplyParser], prompts: int) -> dict[str, Any]:
    """Tokens of one request; every prompt counts once, however many samples were made of it."""
    prompt = _sum(replies[:prompts], "prompt_tokens")
    completion = _sum(replies, "completion_tokens")
    reasoning = _sum(replies, "reasoning_tokens")
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "reasoning_tokens": reasoning,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
    if ctx.config.enable_cache_report:
        usage["prompt_tokens_details"] = {"cached_tokens": _sum(replies[:prompts], "cached_tokens")}
    return usage


def _sum(replies: Iterable[ReplyParser], name: str) -> int:
    return sum(int(reply.meta.get(name) or 0) for reply in replies)

"""Parameters of generation that the bodies of OpenAI's generating routes share, under OpenAI's, sglang's and
vLLM's names, read as the runtime's. Knows no prompts, messages or answers.
"""

from __future__ import annotations

from typing import Any, Literal

from runtime.protocol.errors import BadRequest
from runtime.protocol.sampling import set_fields
from runtime.server.context import ServerContext
from runtime.server.http.error_mapping import FieldNames
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

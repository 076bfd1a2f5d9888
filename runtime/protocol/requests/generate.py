"""GenerateReqInput: a user's request, for one prompt or several. Knows no tokenizer and no model.

`normalize_batch_and_arguments` fills in defaults and spreads every field over the items by one table
(PER_ITEM); `req[i]` is one of the items.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

import msgspec

from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadRequest
from runtime.protocol.messages import Message
from runtime.protocol.requests import batching
from runtime.protocol.requests.batching import Spread
from runtime.protocol.requests.many import ManyReq
from runtime.protocol.sampling import set_fields


class GenerateReqInput(ManyReq, forbid_unknown_fields=True):
    """Exactly one of text, input_ids, input_embeds, messages is the prompt; a list of texts, or of lists of
    ids, is a batch. Other fields hold one value for all items, or a list with one per prompt.

    sampling_params: a SamplingParams, or a dict as SamplingParams.from_user takes it; for a batch also a
        list. n > 1 gives so many samples of every prompt.
    messages: one conversation, rendered by the checkpoint's chat template; the fields up to template_kwargs
        go with it. allow_control_tokens: read control tokens in the messages' own text as such;
        None leaves it to the engine's option of that name.
    suffix: what stands after the output, for models that fill in the middle; `text` stands before it.
    choices: score these continuations instead of generating (see ChoiceScores).
    logprob_start_len: prompt position from which prompt log-probabilities are returned; -1 = none, or all
        where no new tokens are asked for.
    return_logprob: log-probabilities of the output, and of the prompt from logprob_start_len on. To ask for
        top_logprobs_num or token_ids_logprob is to ask for it too.
    token_ids_logprob: ids whose log-probabilities are wanted at every position that has one.
    return_hidden_states: True for every token's, "last" for the last one's.
    extra_key, cache_salt: requests with different ones never share cache; a salt "" is none.
    session_params: {"id", "rid", "offset", "replace", "drop_previous_output"}; session_id: only its id.
    jump_forward: append forced text without decoding it step by step. The output is the same either way.
    token_healing: let the model choose the end of a text prompt's last word anew, together with what follows
        (see runtime.grammar.healing). Prompts of ids, turns of sessions, prompts whose log-probabilities or
        hidden states are wanted and text that ends with a control token stay as they are.
    require_reasoning: the output begins with the model's reasoning, and the constraint holds for what follows
        its end; it must come to an end. None: where the prompt opens the reasoning, or the chat template
        leaves it on. False: the constraint holds from the first token. max_thinking_tokens: after so many
        tokens of reasoning its end must follow; with a constraint or without.
    truncate_prompt_tokens: of a prompt that is longer, so many tokens are kept; -1: as many as leave room for
        the output. truncation_side: where the others are taken away.
    lora_path: the name of a loaded adapter, by which the model is changed; None: the model as it is.
    no_logs, log_metrics, custom_labels: for observers of the frontend.
    data_parallel_rank: another name of routed_dp_rank.
    bootstrap_host, bootstrap_port, bootstrap_room: where prompt and output are computed by two servers, the
        prompt's server, its bootstrap port (None: the usual one), and the number of this request among the
        two; both servers get the same. One number stands for consecutive ones.
    """

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    input_embeds: list[Any] | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None
    allow_control_tokens: bool | None = None
    suffix: str | list[str | None] | None = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    modalities: list[str | None] | None = None
    sampling_params: Any = None
    constraint: Constraint | list[Constraint | None] | None = None
    choices: list[str] | None = None
    unconditional: bool = False
    return_logprob: bool | list[bool | None] | None = None
    logprob_start_len: int | list[int | None] | None = None
    top_logprobs_num: int | list[int | None] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool = False
    return_hidden_states: bool | str | list[bool | str | None] | None = False
    return_prompt_token_ids: bool = False
    return_bytes: bool = False
    return_entropy: bool = False
    stream: bool = False
    jump_forward: bool = True
    token_healing: bool = False
    priority: int | list[int | None] | None = None
    extra_key: str | list[str | None] | None = None
    cache_salt: str | list[str | None] | None = None
    session_params: dict[str, Any] | list[dict[str, Any] | None] | None = None
    session_id: str | list[str | None] | None = None
    lora_path: str | list[str | None] | None = None
    lora_id: str | list[str | None] | None = None
    custom_logit_processor: str | list[str | None] | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int | None] | None = None
    bootstrap_pair_key: str | list[str | None] | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    routing_key: str | None = None
    background: bool = False
    require_reasoning: bool | None = False
    max_thinking_tokens: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    timeout_s: float | None = None
    log_metrics: bool = True
    no_logs: bool = False
    custom_labels: dict[str, str] | None = None

    def normalize_batch_and_arguments(self) -> None:
        """Check the fields, count prompts and samples, fill in defaults and spread the fields over the items.
        A second call changes nothing. Raises BadRequest."""
        if self.is_normalized:
            return
        self._validate()
        prompts, single = self._count()
        copies = batching.count_samples(self.sampling_params)
        if copies > 1 and self.choices is not None:
            raise BadRequest("a choice is scored, not sampled: n must be 1", where="choices")
        spread = Spread(prompts, copies, single and copies == 1)
        if not spread.single:
            self._spread_prompts(spread, single)
        self.rid = batching.rids(self.rid, spread)
        self.sampling_params = batching.params_of(self.sampling_params, spread)
        if spread.single:
            for name, field in _CHECKED:
                setattr(self, name, field.read(getattr(self, name)))
        else:
            for name, field in PER_ITEM.items():
                setattr(self, name, spread.each(name, getattr(self, name), field.read))
            for name in ("session_params", "session_id"):
                if isinstance(values := getattr(self, name), list):
                    setattr(self, name, spread.whole(name, values))
            self.image_data, kinds = batching.images(self.image_data, spread)
            self.modalities = kinds if self.modalities is None else spread.each("modalities", self.modalities)
            self.bootstrap_room = batching.rooms(self.bootstrap_room, spread)
        self.token_ids_logprob = batching.token_ids(self.token_ids_logprob, spread)
        batching.check_unique(self.rid)
        self.set_size(spread)

    def _validate(self) -> None:
        prompts = (self.text, self.input_ids, self.input_embeds)
        if prompts.count(None) == 0 or (prompts.count(None) == 3 and self.messages is None):
            raise BadRequest(batching.NO_PROMPT, where="text")
        if self.session_id is not None and self.session_params is not None:
            raise BadRequest("session_id and session_params cannot both be set.", where="session_id")
        if self.data_parallel_rank is not None:
            if self.routed_dp_rank is None:
                self.routed_dp_rank = self.data_parallel_rank
            self.data_parallel_rank = None

    def _count(self) -> tuple[int, bool]:
        if self.text is None and self.input_ids is None and self.input_embeds is None:
            return 1, True
        return batching.count_prompts(self.text, self.input_ids, self.input_embeds)

    def _spread_prompts(self, spread: Spread, one_prompt: bool) -> None:
        """Repeat the prompts for each sample. A single prompt may be a list itself, and so may its media."""
        if isinstance(self.custom_logit_processor, list) and spread.copies > 1:
            raise BadRequest(
                "A list of custom_logit_processor cannot be used with n > 1.", where="custom_logit_processor"
            )
        for name in ("text", "input_ids", "input_embeds"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, spread.whole(name, [value] if one_prompt else list(value)))
        if one_prompt:
            for name in ("image_data", "video_data", "audio_data"):
                if isinstance(value := getattr(self, name), list) and len(value) > 1:
                    setattr(self, name, [value])

    def _item(self, index: int) -> Self:
        fields = set_fields(self)
        for name, values in fields.items():
            if isinstance(values, list) and name not in WHOLE:
                fields[name] = values[index]
        item = type(self)(**fields)
        item.set_size(Spread(1, 1, True))
        return item


class _Field(NamedTuple):
    """A field with one value per item. default: stands for None. check: raises BadRequest for a value that
    is none of the field's, and returns the value."""

    default: Any = None
    check: Callable[[Any], Any] | None = None

    def read(self, value: Any) -> Any:
        if value is None:
            return self.default
        return value if self.check is None else self.check(value)


PER_ITEM = {
    "return_logprob": _Field(False),
    "logprob_start_len": _Field(-1),
    "top_logprobs_num": _Field(0),
    "priority": _Field(0),
    "return_hidden_states": _Field(False, batching.hidden_states),
    "extra_key": _Field(None, batching.extra_key),
    "cache_salt": _Field(None, batching.cache_salt),
    **dict.fromkeys(
        ("constraint", "suffix", "video_data", "audio_data", "lora_path", "lora_id", "custom_logit_processor",
         "bootstrap_host", "bootstrap_port", "bootstrap_pair_key"),
        _Field(),
    ),
}  # fmt: skip
"""Fields that hold one value for all items, or a list with one per prompt; besides these the prompts, rid,
sampling_params, image_data, bootstrap_room and token_ids_logprob, which have rules of their own."""
_CHECKED = [(name, field) for name, field in PER_ITEM.items() if field != _Field()]
"""Fields that a request for one prompt reads as well."""
WHOLE = frozenset({"messages", "tools", "choices"})
"""Lists that belong to every item as a whole."""


def copy_request(request: GenerateReqInput, **changes: Any) -> GenerateReqInput:
    """A copy with changes, normalised if the request is; the changes must not alter its size."""
    copied = msgspec.structs.replace(request, **changes)
    if request.is_normalized:
        copied.set_size(request.spread)
    return copied

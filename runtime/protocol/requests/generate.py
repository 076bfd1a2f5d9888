"""GenerateReqInput: a request as a user makes it, for one prompt or several. Knows no tokenizer and no model.

`normalize_batch_and_arguments` fills in defaults and spreads every field over the items; `req[i]` is one of
them.
"""

from __future__ import annotations

import operator
from typing import Any, Literal, Self

import msgspec

from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadRequest
from runtime.protocol.messages import Message
from runtime.protocol.requests import batching
from runtime.protocol.requests.batching import Spread
from runtime.protocol.requests.many import ManyReq


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
    no_logs, log_metrics, custom_labels: what observers of the frontend are told.
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

    def regenerate_rid(self) -> str | list[str]:
        """Also for items that were taken out already."""
        made = super().regenerate_rid()
        for index, item in self.__dict__.get("items", {}).items():
            item.rid = made[index]
        return made

    # -- the five steps --------------------------------------------------------------------------------------

    def normalize_batch_and_arguments(self) -> None:
        """Check what is given, count prompts and samples, fill in defaults and spread the fields. A second
        call changes nothing. Raises BadRequest."""
        if self.is_normalized:
            return
        self._validate()
        prompts, single = self._count()
        copies = batching.count_samples(self.sampling_params)
        if copies > 1 and self.choices is not None:
            raise BadRequest("a choice is scored, not sampled: n must be 1", where="choices")
        spread = Spread(prompts, copies, single and copies == 1)
        if spread.single:
            self._normalize_single(spread)
        else:
            self._normalize_batch(spread, single)
        batching.check_unique(self.rid)
        self.__dict__["spread"] = spread
        self.__dict__["items"] = {}

    def _validate(self) -> None:
        prompts = (self.text, self.input_ids, self.input_embeds)
        missing = [prompt is None for prompt in prompts]
        if (all(missing) and self.messages is None) or not any(missing):
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

    def _normalize_single(self, spread: Spread) -> None:
        self.rid = batching.rids(self.rid, spread)
        self.sampling_params = batching.params_of(self.sampling_params, spread)
        self.return_logprob = False if self.return_logprob is None else self.return_logprob
        self.logprob_start_len = -1 if self.logprob_start_len is None else self.logprob_start_len
        self.top_logprobs_num = self.top_logprobs_num or 0
        self.priority = self.priority or 0
        self._normalize_checked(spread)

    def _normalize_batch(self, spread: Spread, given_single: bool) -> None:
        if isinstance(self.custom_logit_processor, list) and spread.copies > 1:
            raise BadRequest(
                "A list of custom_logit_processor cannot be used with n > 1.", where="custom_logit_processor"
            )
        for name in ("text", "input_ids", "input_embeds"):
            if (value := getattr(self, name)) is not None:
                # One prompt with several samples may be a list itself, and so may its media.
                setattr(self, name, spread.whole(name, [value] if given_single else list(value)))
        if given_single:
            self._wrap_media()
        self.rid = batching.rids(self.rid, spread)
        self.sampling_params = batching.params_of(self.sampling_params, spread)
        self.image_data, kinds = batching.images(self.image_data, spread)
        self.modalities = kinds if self.modalities is None else spread.lists("modalities", self.modalities)
        self.return_logprob = _each(spread, "return_logprob", self.return_logprob, False)
        self.logprob_start_len = _each(spread, "logprob_start_len", self.logprob_start_len, -1)
        self.top_logprobs_num = _each(spread, "top_logprobs_num", self.top_logprobs_num, 0)
        self.priority = _each(spread, "priority", self.priority, 0)
        for name in _SPREAD:
            setattr(self, name, spread.lists(name, getattr(self, name)))
        self.bootstrap_room = batching.rooms(self.bootstrap_room, spread)
        for name in ("session_params", "session_id"):
            if isinstance(given := getattr(self, name), list):
                setattr(self, name, spread.whole(name, given))
        self._normalize_checked(spread)

    def _normalize_checked(self, spread: Spread) -> None:
        """Fields with rules of their own."""
        self.token_ids_logprob = batching.token_ids(self.token_ids_logprob, spread)
        self.return_hidden_states = batching.hidden_states(self.return_hidden_states, spread)
        self.extra_key = batching.keys("extra_key", self.extra_key, spread, empty_is_none=False)
        self.cache_salt = batching.keys("cache_salt", self.cache_salt, spread, empty_is_none=True)

    def _wrap_media(self) -> None:
        for name in ("image_data", "video_data", "audio_data"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) > 1:
                setattr(self, name, [value])

    # -- what it is ------------------------------------------------------------------------------------------

    def _item(self, index: int) -> Self:
        values: dict[str, Any] = {}
        for (name, default), value in zip(_FIELDS.items(), _values_of(self), strict=True):
            if value is not default:
                values[name] = value[index] if isinstance(value, list) and name not in _WHOLE else value
        item = type(self)(**values)
        item.__dict__["spread"] = Spread(1, 1, True)
        item.__dict__["items"] = {}
        return item


_FIELDS = {field.name: field.default for field in msgspec.structs.fields(GenerateReqInput)}
_values_of = operator.attrgetter(*_FIELDS)
_WHOLE = frozenset({"messages", "tools", "choices"})
"""Lists that belong to every item as a whole."""
_SPREAD = (
    "constraint", "suffix", "video_data", "audio_data", "lora_path", "lora_id", "custom_logit_processor",
    "bootstrap_host", "bootstrap_port", "bootstrap_pair_key",
)  # fmt: skip


def _each(spread: Spread, name: str, value: Any, default: Any) -> list[Any]:
    """Once per item, the default where there is none."""
    return [default if one is None else one for one in spread.lists(name, value, default)]


def copy_request(request: GenerateReqInput, **changes: Any) -> GenerateReqInput:
    """A copy with changes that takes over whether it is normalised; the changes must not alter its size."""
    made = msgspec.structs.replace(request, **changes)
    if request.is_normalized:
        made.__dict__.update(spread=request.__dict__["spread"], items={})
    return made

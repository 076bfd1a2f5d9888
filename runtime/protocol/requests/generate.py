"""GenerateReqInput: a user's request, for one prompt or several. SingleGenerateReq: one prompt, one sample,
with checked types, as `typed_items` and `resolve` make it. A field that cannot be served is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec

from runtime.protocol import request_base
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, BadRequest, RuntimeFault
from runtime.protocol.messages import ImageData, Message
from runtime.protocol.request_base import MAX_NAME_BYTES, ManyReq, Spread, new_rid
from runtime.protocol.sampling import SamplingParams, set_fields

MAX_CHOICES = 4096
"""Options of one request: the prompt is read with each of them."""
SALT = "\0salt:"
"""The beginning of a cache key that holds a salt; keys of users hold no NUL."""


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

    WHOLE = frozenset({"messages", "tools", "choices"})

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
        copies = request_base.count_samples(self.sampling_params)
        if copies > 1 and self.choices is not None:
            raise BadRequest("a choice is scored, not sampled: n must be 1", where="choices")
        spread = Spread(prompts, copies, single and copies == 1)
        if not spread.single:
            self._spread_prompts(spread, single)
        self.rid = request_base.rids(self.rid, spread)
        self.sampling_params = request_base.params_of(self.sampling_params, spread)
        if spread.single:
            for name, field in _CHECKED:
                setattr(self, name, field.read(getattr(self, name)))
        else:
            for name, field in PER_ITEM.items():
                setattr(self, name, spread.each(name, getattr(self, name), field.read))
            for name in ("session_params", "session_id"):
                if isinstance(values := getattr(self, name), list):
                    setattr(self, name, spread.whole(name, values))
            self.image_data, kinds = request_base.images(self.image_data, spread)
            self.modalities = kinds if self.modalities is None else spread.each("modalities", self.modalities)
            self.bootstrap_room = request_base.bootstrap_rooms(self.bootstrap_room, spread)
        self.token_ids_logprob = request_base.token_ids(self.token_ids_logprob, spread)
        request_base.check_unique(self.rid)
        self.set_size(spread)

    def _validate(self) -> None:
        prompts = (self.text, self.input_ids, self.input_embeds)
        if prompts.count(None) == 0 or (prompts.count(None) == 3 and self.messages is None):
            raise BadRequest(request_base.NO_PROMPT, where="text")
        if self.session_id is not None and self.session_params is not None:
            raise BadRequest("session_id and session_params cannot both be set.", where="session_id")
        if self.data_parallel_rank is not None:
            if self.routed_dp_rank is None:
                self.routed_dp_rank = self.data_parallel_rank
            self.data_parallel_rank = None

    def _count(self) -> tuple[int, bool]:
        if self.text is None and self.input_ids is None and self.input_embeds is None:
            return 1, True
        return request_base.count_prompts(self.text, self.input_ids, self.input_embeds)

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


class _Field(NamedTuple):
    """A field with one value per item. default: of None. check: the value, or raises BadRequest."""

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
    "return_hidden_states": _Field(False, request_base.hidden_states),
    "extra_key": _Field(None, request_base.extra_key),
    "cache_salt": _Field(None, request_base.cache_salt),
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


def copy_request(request: GenerateReqInput, **changes: Any) -> GenerateReqInput:
    """A copy with changes, normalised if the request is; the changes must not alter its size."""
    copied = msgspec.structs.replace(request, **changes)
    if request.is_normalized:
        copied.set_size(request.spread)
    return copied


class SingleGenerateReq(GenerateReqInput):
    """An item of a GenerateReqInput with checked types. extra_key includes the cache salt, session_params the
    session_id, and sampling_params the custom_logit_processor. cumulative: each output of a stream holds all
    so far."""

    rid: str = msgspec.field(default_factory=new_rid)
    text: str | None = None
    input_ids: list[int] | None = None  # type: ignore[assignment]  # lists are invariant
    suffix: str | None = None
    image_data: list[ImageData] | None = None
    sampling_params: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None  # type: ignore[assignment]  # as above
    return_hidden_states: bool | Literal["last"] = False
    priority: int = 0
    extra_key: str | None = None
    session_params: dict[str, Any] | None = None
    lora_path: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    cumulative: bool = False


_SHARED = ("messages", "tools", "template_kwargs", "choices", "token_ids_logprob", "custom_labels")
"""Fields that may be long, besides texts, and that items share: they are converted once."""
_UNUSED = ("http_worker_ipc", "modalities", "routing_key", "cumulative")
_UNSERVED = {
    "input_embeds": "prompts are taken as text, input_ids or messages",
    "video_data": "models take text, and some of them images",
    "audio_data": "models take text, and some of them images",
    "lora_id": "an adapter is named by lora_path",
    "bootstrap_pair_key": "a pair is named by bootstrap_host, bootstrap_port and bootstrap_room",
    "return_bytes": "answers hold text and ids",
    "return_entropy": "use return_logprob",
    "background": "use the responses endpoint",
}
"""Fields that are not served, each with an explanation."""


def resolve(request: GenerateReqInput) -> SingleGenerateReq:
    """A checked copy of a single request. Raises BadRequest and its kinds, with the field in `where`."""
    if not request.is_normalized:
        request = copy_request(request)
        request.normalize_batch_and_arguments()
    if not request.is_single:
        raise BadRequest(
            f"this takes one prompt with one sample, got {request.batch_size} with "
            f"{request.parallel_sample_num}",
            where="prompt",
            hint="send a batch, or use the call for batches",
        )
    return _read(set_fields(request), {})


def typed_items(request: GenerateReqInput) -> list[SingleGenerateReq | RuntimeFault]:
    """resolve() for every item; a wrong one becomes its fault. Shared values are converted once."""
    fields = set_fields(request)
    each: dict[str, list[Any]] = {}
    if not request.is_single:
        each = {name: v for name, v in fields.items() if isinstance(v, list) and name not in request.WHOLE}
    known: dict[tuple[str, int], Any] = {}
    items: list[SingleGenerateReq | RuntimeFault] = []
    for index in range(len(request)):
        try:
            items.append(_read({**fields, **{name: values[index] for name, values in each.items()}}, known))
        except RuntimeFault as fault:
            items.append(fault)
    return items


def _read(fields: dict[str, Any], known: dict[tuple[str, int], Any]) -> SingleGenerateReq:
    """An item of these fields, which are consumed. known: (field, id of its value) -> the converted one."""
    _refuse_unserved(fields)
    for name in _UNUSED:
        fields.pop(name, None)
    params = _sampling(fields, known)
    rid, ids, images = (fields.pop(name, None) for name in ("rid", "input_ids", "image_data"))
    session, salt = fields.pop("session_id", None), fields.pop("cache_salt", None)
    if session is not None:
        fields["session_params"] = {"id": session}
    keys = {name: (name, id(fields[name])) for name in _SHARED if name in fields}
    shared = {name: known[key] for name, key in keys.items() if key in known}
    for name in shared:
        del fields[name]
    item = _typed({name: _plain(value) for name, value in fields.items()})
    for name, value in shared.items():
        setattr(item, name, value)
    for name, key in keys.items():
        known[key] = getattr(item, name)
    if rid is None:
        rid = new_rid()
    elif not isinstance(rid, str) or not rid:
        raise BadRequest("is empty" if rid == "" else f"must be a text, got {rid!r}", where="rid")
    else:
        _check_text("rid", rid)
    item.rid = rid
    item.sampling_params = params
    # Not checked here: Limits.check_ids does, and a long prompt is looked through once.
    item.input_ids = ids
    if images is not None:
        item.image_data = ImageData.listed(_plain(images)) or None
    if item.top_logprobs_num or item.token_ids_logprob:
        item.return_logprob = True
    if item.lora_path is not None:
        check_adapter_name(item.lora_path)
    _check_bootstrap(item)
    if len(item.choices or ()) > MAX_CHOICES:
        raise BadRequest(f"has {len(item.choices or ())} options; at most {MAX_CHOICES}", where="choices")
    item.extra_key = cache_key(item.extra_key, salt)
    return item


def _refuse_unserved(fields: dict[str, Any]) -> None:
    """Raise BadRequest for a field that is not served; remove those that ask for nothing."""
    for name in _UNSERVED.keys() & fields.keys():
        value = fields.pop(name)
        if value is not None and value is not False and value not in ([], [None]):
            raise BadRequest(f"{name} is not supported: {_UNSERVED[name]}", where=name)
    rank = fields.pop("routed_dp_rank", None)
    if rank not in (None, 0):
        raise BadRequest(f"there is one engine, of rank 0; got {rank!r}", where="routed_dp_rank")


def _check_bootstrap(item: SingleGenerateReq) -> None:
    host, port, number = item.bootstrap_host, item.bootstrap_port, item.bootstrap_room
    if (host is None) != (number is None):
        present, missing = ("bootstrap_room", "host") if host is None else ("bootstrap_host", "room")
        raise BadRequest(f"needs bootstrap_{missing}", where=present)
    if port is not None and host is None:
        raise BadRequest("needs bootstrap_host and bootstrap_room", where="bootstrap_port")
    if port is not None and not 0 < port < 1 << 16:
        raise BadRequest(f"must be in 1 to 65535, got {port}", where="bootstrap_port")
    if number is not None and not 0 <= number < 1 << 63:
        raise BadRequest(f"must be from 0 to 2**63 - 1, got {number}", where="bootstrap_room")
    if host is not None:
        if not host or len(host) > 255:
            raise BadRequest("must be a host's name or address", where="bootstrap_host")
        _check_text("bootstrap_host", host)


def _sampling(fields: dict[str, Any], known: dict[tuple[str, int], Any]) -> SamplingParams:
    """The parameters of one sample. A constraint among them is moved to its own field."""
    user, processor = fields.pop("sampling_params"), fields.pop("custom_logit_processor", None)
    key = "sampling_params", id(user)
    if key not in known:
        whole, beside = SamplingParams.from_user(user)
        known[key] = whole if whole.n == 1 else msgspec.structs.replace(whole, n=1), beside
    params: SamplingParams = known[key][0]
    constraint: Constraint | None = known[key][1]
    if constraint is not None:
        if fields.get("constraint") is not None:
            raise BadRequest(f"sampling_params already has a {constraint.kind}", where="constraint")
        fields["constraint"] = constraint
    if processor is None:
        return params
    if not isinstance(processor, str):
        raise BadRequest(
            f"must be a registered name, got {type(processor).__name__}", where="custom_logit_processor"
        )
    if params.custom_logit_processor not in (None, processor):
        raise BadRequest(
            f"sampling_params has a different one, {params.custom_logit_processor!r}",
            where="custom_logit_processor",
        )
    return msgspec.structs.replace(params, custom_logit_processor=processor).verify()


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value) if value is not None and not isinstance(value, _SCALARS) else value


_SCALARS = (bool, int, str, float)


def _typed(fields: dict[str, Any]) -> SingleGenerateReq:
    """Raises BadRequest with the path of a value of the wrong type."""
    try:
        return msgspec.convert(fields, SingleGenerateReq)
    except (msgspec.ValidationError, TypeError) as error:
        message, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").lstrip(".")
        kind = BadConstraint if field.startswith("constraint") else BadRequest
        raise kind(message, where=field or "request") from error


def cache_key(extra_key: Any, salt: Any) -> str | None:
    """One key of both; different pairs give different keys."""
    for name, value in (("extra_key", extra_key), ("cache_salt", salt)):
        if value is not None:
            _check_text(name, value)
            if "\0" in value:
                raise BadRequest("must not contain NUL", where=name)
    if salt is None:
        key: str | None = extra_key
        return key
    return f"{SALT}{salt}" + ("" if extra_key is None else f"\0{extra_key}")


def _check_text(name: str, value: str) -> None:
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise BadRequest("must not contain lone surrogates", where=name) from None
    if size > MAX_NAME_BYTES:
        raise BadRequest(f"has {size} bytes; at most {MAX_NAME_BYTES}", where=name)


def check_adapter_name(name: object) -> None:
    """Raise BadRequest unless it can be an adapter's name in a request."""
    if not isinstance(name, str):
        raise BadRequest(f"must be a text, got {name!r}", where="lora_path")
    if not name:
        raise BadRequest("is empty", where="lora_path")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise BadRequest("must not contain lone surrogates", where="lora_path") from None

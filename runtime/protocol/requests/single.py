"""SingleGenerateReq: one prompt, one sample, every field of one type. What the frontend works with.

`resolve` makes it of a GenerateReqInput (or of an item of one); a field that cannot be served is refused by
name, not dropped. Knows no tokenizer and no model.
"""

from __future__ import annotations

import operator
from typing import Any, Literal, TypeAlias

import msgspec

from runtime.protocol.adapters import check_name
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, BadRequest
from runtime.protocol.media import ImageData
from runtime.protocol.messages import Message
from runtime.protocol.requests.base import MAX_NAME_BYTES, SingleReq, new_rid
from runtime.protocol.requests.generate import GenerateReqInput, copy_request
from runtime.protocol.sampling import SamplingParams

MAX_CHOICES = 4096
"""Options of one request: the prompt is read with each of them."""
SALT = "\0salt:"
"""What a cache key begins with that holds a salt; keys of users hold no NUL."""


class SingleGenerateReq(SingleReq):
    """See GenerateReqInput for the fields. extra_key holds the cache salt as well. cumulative: each output of
    a stream holds all so far."""

    text: str | None = None
    input_ids: list[int] | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None
    allow_control_tokens: bool | None = None
    suffix: str | None = None
    sampling_params: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    choices: list[str] | None = None
    unconditional: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    return_text_in_logprobs: bool = False
    return_hidden_states: bool | Literal["last"] = False
    return_prompt_token_ids: bool = False
    stream: bool = False
    cumulative: bool = False
    jump_forward: bool = True
    token_healing: bool = False
    priority: int = 0
    extra_key: str | None = None
    session_params: dict[str, Any] | None = None
    require_reasoning: bool | None = False
    max_thinking_tokens: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    timeout_s: float | None = None
    log_metrics: bool = True
    no_logs: bool = False
    custom_labels: dict[str, str] | None = None
    lora_path: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    image_data: list[ImageData] | None = None


_MADE = (
    "rid", "sampling_params", "constraint", "extra_key", "session_params", "input_ids", "cumulative",
    "image_data",
)  # fmt: skip
_COPIED = {
    field.name: field.default
    for field in msgspec.structs.fields(SingleGenerateReq)
    if field.name not in _MADE
}
"""Fields that are taken over as they are, each with its default. A request sets few of its 60 fields; only
those that it sets are converted and checked."""
_copied = operator.attrgetter(*_COPIED)
_HELD = ("messages", "tools", "template_kwargs", "choices", "token_ids_logprob", "custom_labels")
"""Those of them that may be long, besides texts, and that items share."""
_UNSERVED = (
    ("input_embeds", "prompts are taken as text, input_ids or messages"),
    ("video_data", "models take text, and some of them images"),
    ("audio_data", "models take text, and some of them images"),
    ("lora_id", "an adapter is named by lora_path"),
    ("bootstrap_pair_key", "a pair is named by bootstrap_host, bootstrap_port and bootstrap_room"),
    ("return_bytes", "answers hold text and ids"),
    ("return_entropy", "use return_logprob"),
    ("background", "use the responses endpoint"),
)
"""Fields that are understood but not served, each with what to know about it."""


Known: TypeAlias = dict[tuple[str, int], tuple[Any, Any]]
"""(Field, id() of its value) -> the value, and what was made of it: items of one request share most of what
they hold."""


def resolve(request: GenerateReqInput, known: Known | None = None) -> SingleGenerateReq:
    """The request with defaults filled in and every type checked; given an item of a batch, its `n` is spent.
    `request` stays as it is. known: of other items of the same request. Raises BadRequest and its kinds,
    with the field in `where`."""
    one, known = request, {} if known is None else known
    if not request.is_normalized:
        one = copy_request(request)
        one.normalize_batch_and_arguments()
    if not one.is_single:
        raise BadRequest(
            f"this takes one prompt with one sample, got {one.batch_size} with {one.parallel_sample_num}",
            where="prompt",
            hint="send a batch, or use the call for batches",
        )
    _refuse_unserved(one)
    params, constraint = _sampling(one, known)
    pairs = zip(_COPIED.items(), _copied(one), strict=True)
    values = {name: value for (name, default), value in pairs if value is not default}
    held = {name: (name, id(values[name])) for name in _HELD if name in values}
    shared = {name: known[key][1] for name, key in held.items() if key in known}
    fields = {name: _plain(value) for name, value in values.items() if name not in shared}
    fields |= {"session_params": _session(one), "constraint": _plain(constraint)}
    made = _typed(fields)
    for name, value in shared.items():
        setattr(made, name, value)
    for name, key in held.items():
        known[key] = values[name], getattr(made, name)
    made.image_data = ImageData.listed(_plain(one.image_data)) or None
    if made.top_logprobs_num or made.token_ids_logprob:
        made.return_logprob = True
    if made.lora_path is not None:
        check_name(made.lora_path)
    _check_bootstrap(made)
    if len(made.choices or ()) > MAX_CHOICES:
        raise BadRequest(f"has {len(made.choices or ())} options; at most {MAX_CHOICES}", where="choices")
    made.rid = new_rid() if one.rid is None else _id(one.rid)
    made.sampling_params = params
    # Checked where the vocabulary is known; a long prompt is not looked at twice.
    made.input_ids = one.input_ids  # type: ignore[assignment]
    made.extra_key = cache_key(one.extra_key, one.cache_salt)
    return made


def _refuse_unserved(one: GenerateReqInput) -> None:
    for name, why in _UNSERVED:
        value = getattr(one, name)
        if value is not None and value is not False and value not in ([], [None]):
            raise BadRequest(f"{name} is not supported: {why}", where=name)
    if one.routed_dp_rank not in (None, 0):
        raise BadRequest(
            f"there is one engine, of rank 0; got {one.routed_dp_rank!r}", where="routed_dp_rank"
        )


def _check_bootstrap(made: SingleGenerateReq) -> None:
    host, port, room = made.bootstrap_host, made.bootstrap_port, made.bootstrap_room
    if (host is None) != (room is None):
        given, missing = ("bootstrap_room", "host") if host is None else ("bootstrap_host", "room")
        raise BadRequest(f"needs bootstrap_{missing}", where=given)
    if port is not None and host is None:
        raise BadRequest("needs bootstrap_host and bootstrap_room", where="bootstrap_port")
    if port is not None and not 0 < port < 1 << 16:
        raise BadRequest(f"must be in 1 to 65535, got {port}", where="bootstrap_port")
    if room is not None and not 0 <= room < 1 << 63:
        raise BadRequest(f"must be from 0 to 2**63 - 1, got {room}", where="bootstrap_room")
    if host is not None:
        if not host or len(host) > 255:
            raise BadRequest("must be a host's name or address", where="bootstrap_host")
        _check_text("bootstrap_host", host)


def _sampling(one: GenerateReqInput, known: Known) -> tuple[SamplingParams, Any]:
    """Parameters of one sample, and the constraint, which may stand in the parameters or beside them."""
    key = "sampling_params", id(one.sampling_params)
    if key not in known:
        given, beside = SamplingParams.from_user(one.sampling_params)
        alone = given if given.n == 1 else msgspec.structs.replace(given, n=1)
        known[key] = one.sampling_params, (alone, beside)
    params, constraint = known[key][1]
    if constraint is not None and one.constraint is not None:
        raise BadRequest(f"sampling_params already has a {constraint.kind}", where="constraint")
    processor = one.custom_logit_processor
    if processor is not None:
        if not isinstance(processor, str):
            raise BadRequest(
                f"must be a registered name, got {type(processor).__name__}", where="custom_logit_processor"
            )
        if params.custom_logit_processor not in (None, processor):
            raise BadRequest(
                f"sampling_params has a different one, {params.custom_logit_processor!r}",
                where="custom_logit_processor",
            )
        params = msgspec.structs.replace(params, custom_logit_processor=processor).verify()
    return params, one.constraint if constraint is None else constraint


def _session(one: GenerateReqInput) -> Any:
    return {"id": one.session_id} if one.session_id is not None else one.session_params


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value) if value is not None and not isinstance(value, _SCALARS) else value


_SCALARS = (bool, int, str, float)


def _typed(fields: dict[str, Any]) -> SingleGenerateReq:
    """Raises BadRequest with the place of a value of the wrong type."""
    try:
        made = msgspec.convert(fields, SingleGenerateReq)
    except (msgspec.ValidationError, TypeError) as error:
        message, _, path = str(error).partition(" - at `$")
        place = path.rstrip("`").lstrip(".")
        kind = BadConstraint if place.startswith("constraint") else BadRequest
        raise kind(message, where=place or "request") from error
    return made


def _id(rid: object) -> str:
    if not isinstance(rid, str) or not rid:
        raise BadRequest("is empty" if rid == "" else f"must be a text, got {rid!r}", where="rid")
    _check_text("rid", rid)
    return rid


def cache_key(extra_key: Any, salt: Any) -> str | None:
    """One key of both, so that different pairs never give the same."""
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

"""SingleGenerateReq: one prompt, one sample, every field of one type. What the frontend works with.

`typed_items` reads them from a GenerateReqInput, `resolve` reads one; a field that cannot be served is
refused by name, not dropped. Knows no tokenizer and no model.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from runtime.protocol.adapters import check_name
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, BadRequest, RuntimeFault
from runtime.protocol.messages import ImageData
from runtime.protocol.request_base import MAX_NAME_BYTES, new_rid
from runtime.protocol.requests.generate import WHOLE, GenerateReqInput, copy_request
from runtime.protocol.sampling import SamplingParams, set_fields

MAX_CHOICES = 4096
"""Options of one request: the prompt is read with each of them."""
SALT = "\0salt:"
"""What a cache key begins with that holds a salt; keys of users hold no NUL."""


class SingleGenerateReq(GenerateReqInput):
    """An item of a GenerateReqInput whose fields have been read: of its fields these have fewer types.
    extra_key holds the cache salt as well, session_params the session_id, and sampling_params the
    custom_logit_processor. cumulative: each output of a stream holds all so far."""

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


_HELD = ("messages", "tools", "template_kwargs", "choices", "token_ids_logprob", "custom_labels")
"""Fields that may be long, besides texts, and that items share: they are read once."""
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
"""Fields that are understood but not served, each with an explanation."""


def resolve(request: GenerateReqInput) -> SingleGenerateReq:
    """The request with defaults filled in and every type checked; of an item of a batch, one sample.
    `request` stays as it is. Raises BadRequest and its kinds, with the field in `where`."""
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
    """resolve() for every item of a normalised request, with the fault of an item that is wrong in its place.
    Items share the values that they have in common, which are read once."""
    fields = set_fields(request)
    each: dict[str, list[Any]] = {}
    if not request.is_single:
        each = {name: v for name, v in fields.items() if isinstance(v, list) and name not in WHOLE}
    known: dict[tuple[str, int], Any] = {}
    items: list[SingleGenerateReq | RuntimeFault] = []
    for index in range(len(request)):
        try:
            items.append(_read({**fields, **{name: values[index] for name, values in each.items()}}, known))
        except RuntimeFault as fault:
            items.append(fault)
    return items


def _read(fields: dict[str, Any], known: dict[tuple[str, int], Any]) -> SingleGenerateReq:
    """An item of these fields, which are consumed. known: (field, id() of its value) -> what other items of
    the same request read from that value."""
    _refuse_unserved(fields)
    for name in _UNUSED:
        fields.pop(name, None)
    params = _sampling(fields, known)
    rid, ids, images = (fields.pop(name, None) for name in ("rid", "input_ids", "image_data"))
    session, salt = fields.pop("session_id", None), fields.pop("cache_salt", None)
    if session is not None:
        fields["session_params"] = {"id": session}
    held = {name: (name, id(fields[name])) for name in _HELD if name in fields}
    shared = {name: known[key] for name, key in held.items() if key in known}
    for name in shared:
        del fields[name]
    item = _typed({name: _plain(value) for name, value in fields.items()})
    for name, value in shared.items():
        setattr(item, name, value)
    for name, key in held.items():
        known[key] = getattr(item, name)
    item.rid = new_rid() if rid is None else _id(rid)
    item.sampling_params = params
    # Checked where the vocabulary is known; a long prompt is not looked at twice.
    item.input_ids = ids
    if images is not None:
        item.image_data = ImageData.listed(_plain(images)) or None
    if item.top_logprobs_num or item.token_ids_logprob:
        item.return_logprob = True
    if item.lora_path is not None:
        check_name(item.lora_path)
    _check_bootstrap(item)
    if len(item.choices or ()) > MAX_CHOICES:
        raise BadRequest(f"has {len(item.choices or ())} options; at most {MAX_CHOICES}", where="choices")
    item.extra_key = cache_key(item.extra_key, salt)
    return item


def _refuse_unserved(fields: dict[str, Any]) -> None:
    """Raises BadRequest. What remains of such fields asks for nothing, and is taken out."""
    for name in _UNSERVED.keys() & fields.keys():
        value = fields.pop(name)
        if value is not None and value is not False and value not in ([], [None]):
            raise BadRequest(f"{name} is not supported: {_UNSERVED[name]}", where=name)
    rank = fields.pop("routed_dp_rank", None)
    if rank not in (None, 0):
        raise BadRequest(f"there is one engine, of rank 0; got {rank!r}", where="routed_dp_rank")


def _check_bootstrap(item: SingleGenerateReq) -> None:
    host, port, room = item.bootstrap_host, item.bootstrap_port, item.bootstrap_room
    if (host is None) != (room is None):
        present, missing = ("bootstrap_room", "host") if host is None else ("bootstrap_host", "room")
        raise BadRequest(f"needs bootstrap_{missing}", where=present)
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


def _sampling(fields: dict[str, Any], known: dict[tuple[str, int], Any]) -> SamplingParams:
    """The parameters of one sample. A constraint among them is put into the field for it."""
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
        place = path.rstrip("`").lstrip(".")
        kind = BadConstraint if place.startswith("constraint") else BadRequest
        raise kind(message, where=place or "request") from error


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

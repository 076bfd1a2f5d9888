"""EmbeddingReqInput -> TokenizedEmbeddingReqInput. Sent, waited for and answered like a generation."""

from __future__ import annotations

from runtime.processes.frontend.prepare import RID_END, Job, Preparer
from runtime.processes.frontend.prompt import Limits
from runtime.protocol.control import no_adapters
from runtime.protocol.errors import BadRequest, PromptTooLong
from runtime.protocol.io_struct import EmbeddingReqInput, TokenizedEmbeddingReqInput
from runtime.protocol.requests.generate import cache_key, check_adapter_name

_UNSERVED = (
    ("image_data", "the model reads text only"),
    ("video_data", "the model reads text only"),
    ("audio_data", "the model reads text only"),
    ("lora_id", "an adapter is named by lora_path"),
)


def prepare_embedding(preparer: Preparer, request: EmbeddingReqInput) -> Job:
    """One item of a normalised request as ids, with the tokenizer's special tokens. Raises BadRequest."""
    limits = preparer.limits
    for name, why in _UNSERVED:
        if getattr(request, name) not in (None, [], [None]):
            raise BadRequest(f"{name} is not supported: {why}", where=name)
    if request.dimensions is not None and request.dimensions < 1:
        raise BadRequest(f"must be at least 1, got {request.dimensions}", where="dimensions")
    deadline = preparer.deadline(request.timeout_s)
    if not isinstance(request.rid, str) or not request.rid or RID_END in request.rid:
        raise BadRequest(f"must be a non-empty string, got {request.rid!r}", where="rid")
    if request.lora_path is not None:
        check_adapter_name(request.lora_path)
        if not limits.adapters:
            raise no_adapters("lora_path")
    ids, kinds = _ids(preparer, request)
    if len(ids) > limits.context and limits.auto_truncate:
        ids, kinds = ids[: limits.context], kinds[: limits.context]
    if len(ids) > limits.context:
        raise PromptTooLong(
            f"the text has {len(ids)} tokens; the context length is {limits.context}",
            where="input_ids" if request.text is None else "text",
            hint="shorten it",
        )
    tokens = TokenizedEmbeddingReqInput(
        rid=preparer.wire_rid(request),
        http_worker_ipc=request.http_worker_ipc,
        input_ids=ids,
        token_type_ids=kinds if any(kinds) else None,
        dimensions=request.dimensions,
        cross_encoder=request.is_cross_encoder_request,
        priority=request.priority,
        extra_key=cache_key(request.extra_key, request.cache_salt),
        lora_path=request.lora_path if isinstance(request.lora_path, str) else None,
    )
    return Job((), text=tokens, deadline=deadline)


def _ids(preparer: Preparer, request: EmbeddingReqInput) -> tuple[list[int], list[int]]:
    """Ids, and which of two texts each belongs to."""
    limits, pair, text = preparer.limits, request.pair, request.text
    most = limits.context * preparer.tokenizer.longest
    if pair is not None:
        return preparer.tokenizer.encode_whole(*(_fitting(limits, one, most) for one in pair))
    if isinstance(text, str):
        if not text:
            raise BadRequest("is empty", where="text")
        return preparer.tokenizer.encode_whole(_fitting(limits, text, most))
    if not request.input_ids:
        raise BadRequest("is empty", where="input_ids")
    ids = limits.check_ids(request.input_ids)
    return ids, [0] * len(ids)


def _fitting(limits: Limits, text: str, most: int) -> str:
    """Raises PromptTooLong, before encoding, for a text that cannot be few enough tokens."""
    if len(text) > most and not limits.auto_truncate:
        raise PromptTooLong(
            f"the text has {len(text)} characters; the context's {limits.context} tokens hold at most {most}",
            where="text",
            hint="shorten it",
        )
    return text[:most]

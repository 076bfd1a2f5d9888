"""What the scheduler's process posts: outputs of one step together, and errors as outputs."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.protocol.errors import InternalFault, RuntimeFault
from runtime.protocol.io_struct import (
    BatchEmbeddingOutput,
    BatchTokenIDOutput,
    EmbeddingOutput,
    FinishReason,
    TextRequest,
    TokenizedGenerateReqInput,
    TokenOutput,
)


def text_request(request: TokenizedGenerateReqInput) -> TextRequest:
    """What the detokeniser needs to know of it."""
    params = request.sampling_params
    return TextRequest(
        rid=request.rid,
        stop=params.stop,
        stop_regex=params.stop_regex,
        skip_special_tokens=params.skip_special_tokens,
        no_stop_trim=params.no_stop_trim,
        at_start=request.at_start,
        stream=request.stream,
        http_worker_ipc=request.http_worker_ipc,
    )


def batch(outputs: Sequence[TokenOutput], begun: list[TextRequest]) -> BatchTokenIDOutput:
    rids = [output.rid for output in outputs]
    return BatchTokenIDOutput(rids=rids, outputs=list(outputs), begun=begun).with_spec()


def vector_batch(outputs: Sequence[EmbeddingOutput]) -> BatchEmbeddingOutput:
    return BatchEmbeddingOutput(rids=[output.rid for output in outputs], outputs=list(outputs))


def failed(rid: str, frontend: str | None, fault: RuntimeFault) -> TokenOutput:
    reason = FinishReason(type="abort", error=fault.to_dict())
    return TokenOutput(rid=rid, new_ids=[], finish=reason, http_worker_ipc=frontend)


def as_fault(error: Exception, what: str) -> RuntimeFault:
    if isinstance(error, RuntimeFault):
        return error
    return InternalFault(f"{what}: {type(error).__name__}: {error}", hint="a defect of the runtime")

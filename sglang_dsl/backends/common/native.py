"""The runtime's POST /generate: its requests and answers as JSON, its errors as the language's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from runtime.protocol import io_struct
from runtime.protocol.errors import (
    Aborted,
    DeadlineExceeded,
    RuntimeFault,
    UnsupportedConstraint,
    from_dict,
)
from runtime.protocol.io_struct import GenerateOutput, GenerateReqInput
from sglang_dsl.conversation.requests import ChoiceCall, ChoiceScore, ChoiceScores
from sglang_dsl.errors import BackendError, ProgramCancelled, ProgramError, Timeout, Unsupported

_KINDS: tuple[tuple[type[RuntimeFault], type[ProgramError]], ...] = (
    (UnsupportedConstraint, Unsupported),
    (DeadlineExceeded, Timeout),
    (Aborted, ProgramCancelled),
    (RuntimeFault, BackendError),
)


def as_program_error(
    fault: RuntimeFault, backend: str, request_id: str | None, *, status: int | None = None
) -> ProgramError:
    """The language's error for a fault of the runtime. status: of the HTTP answer, if it differs."""
    kind = next(kind for fault_kind, kind in _KINDS if isinstance(fault, fault_kind))
    return kind(
        f"{fault.where}: {fault.message}" if fault.where else fault.message,
        backend=backend,
        request_id=request_id,
        status=fault.status if status is None else status,
        retryable=fault.retryable,
        hint=fault.hint,
    )


def error_of(error: Mapping[str, Any], backend: str, status: int | None = None) -> ProgramError:
    """The language's error for the "error" of an answer. status: of the HTTP answer."""
    # The message on the wire already has the place and the hint.
    fault: RuntimeFault = from_dict({"code": error.get("code"), "message": error.get("message", "")})
    return as_program_error(fault, backend, None, status=status)


def choices_request(call: ChoiceCall, prompt: Mapping[str, Any]) -> GenerateReqInput:
    """The request that scores the choices after a prompt. prompt: its fields."""
    return GenerateReqInput(
        choices=list(call.choices), unconditional=call.unconditional, timeout_s=call.timeout, **prompt
    )


def as_json(request: GenerateReqInput) -> dict[str, Any]:
    """The body of POST /generate, without the request's id: the server chooses one."""
    body: dict[str, Any] = msgspec.to_builtins(request)
    for name in ("type", "rid"):
        body.pop(name, None)
    return body


def check_answer(answer: Any, backend: str) -> None:
    """Raise the error in an answer of POST /generate, or BackendError if it is no answer."""
    match answer:
        case {"error": dict(error)}:
            raise error_of(error, backend)
        case {"text": str()} | {"choices": list()}:
            return
        case _:
            raise BackendError(f"the server's answer is not a generation: {str(answer)[:200]!r}")


def output_of(answer: Any, backend: str) -> GenerateOutput:
    """An answer of POST /generate. Raises the error that it reports, and BackendError."""
    check_answer(answer, backend)
    return GenerateOutput(
        answer.get("text", ""),
        answer.get("output_ids") or [],
        answer.get("meta_info") or {},
        answer.get("choices"),
    )


def scores_of(output: GenerateOutput, call: ChoiceCall, error: BackendError) -> ChoiceScores:
    """The scores in an answer, which has them as structs or as JSON. Raises `error` if it has none."""
    try:
        choices = msgspec.convert(output.choices, list[io_struct.ChoiceScores])
    except msgspec.ValidationError:
        raise error from None
    if len(choices) != len(call.choices):
        raise error
    scores = (
        ChoiceScore(
            tuple(one.logprobs),
            tuple(one.token_ids),
            None if one.unconditional is None else tuple(one.unconditional),
            token_texts=tuple(one.token_texts or ()),
        )
        for one in choices
    )
    return ChoiceScores(tuple(scores), dict(output.meta))

"""What the backends for the bundled runtime share: its faults as the language's errors, its requests'
options, scored choices, counters of several samples. It knows neither engines nor HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.protocol.errors import Aborted, DeadlineExceeded, RuntimeFault, UnsupportedConstraint
from sglang_dsl.conversation.requests import ChoiceCall, ChoiceScore, ChoiceScores
from sglang_dsl.errors import BackendError, ProgramCancelled, ProgramError, Timeout, Unsupported

# Options of a call that are fields of a request.
SAMPLED_OPTIONS = frozenset(
    {
        "tools", "template_kwargs", "allow_control_tokens", "priority", "extra_key", "jump_forward", "suffix",
        "token_healing",
        "return_text_in_logprobs", "require_reasoning", "max_thinking_tokens",
    }
)  # fmt: skip
BAD_OPTIONS_HINT = f"it takes {', '.join(sorted(SAMPLED_OPTIONS))}"

_KINDS: tuple[tuple[type[RuntimeFault], type[ProgramError]], ...] = (
    (UnsupportedConstraint, Unsupported),
    (DeadlineExceeded, Timeout),
    (Aborted, ProgramCancelled),
    (RuntimeFault, BackendError),
)
_SUMMED = ("completion_tokens", "jumped_tokens", "decode_steps")


def as_program_error(
    fault: RuntimeFault, backend: str, request_id: str | None, *, status: int | None = None
) -> ProgramError:
    """The fault as the language says it; `status` where the wire carried another than the kind's own."""
    kind = next(kind for fault_kind, kind in _KINDS if isinstance(fault, fault_kind))
    return kind(
        f"{fault.where}: {fault.message}" if fault.where else fault.message,
        backend=backend,
        request_id=request_id,
        status=fault.status if status is None else status,
        retryable=fault.retryable,
        hint=fault.hint,
    )


def summed(metas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One meta for several samples: the first one's, its counters added up, and all of them as "samples"."""
    total = {key: sum(int(meta.get(key) or 0) for meta in metas) for key in _SUMMED}
    return {**metas[0], **total, "samples": [dict(meta) for meta in metas]}


def scoring(call: ChoiceCall) -> dict[str, Any]:
    """Fields of POST /generate that have choices scored, beside its prompt."""
    body: dict[str, Any] = {"choices": list(call.choices)}
    if call.unconditional:
        body["unconditional"] = True
    if call.timeout is not None:
        body["timeout_s"] = call.timeout
    return body


def scored(answer: Any, call: ChoiceCall, backend: str) -> ChoiceScores:
    """The scores in its answer. Raises BackendError."""
    match answer:
        case {"choices": list(found), "meta_info": dict(meta)} if len(found) == len(call.choices):
            pass
        case _:
            raise BackendError("the server returned a choice without scores", backend=backend)
    scores = (
        ChoiceScore(
            tuple(one["logprobs"]),
            tuple(one.get("token_ids") or ()),
            None if one.get("unconditional") is None else tuple(one["unconditional"]),
            token_texts=tuple(one.get("token_texts") or ()),
        )
        for one in found
    )
    return ChoiceScores(tuple(scores), dict(meta))

"""The runtime's errors, on both sides of every boundary. All are kinds of RuntimeFault; BadRequest and its
kinds are errors of the request itself. They hold no traceback: an error must survive a wire.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

MAX_MESSAGE, MAX_FIELD = 4000, 400
"""Characters."""


class RuntimeFault(Exception):
    """Base of all errors for users of the runtime. `where`: the field, file or offset; `hint`: what to do."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "runtime_fault"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        """`message` and `where` are cut: they may quote a long value."""
        self.message, self.hint = _cut(message, MAX_MESSAGE), hint
        self.where = None if where is None else _cut(where, MAX_FIELD)
        super().__init__(self.message)

    def __str__(self) -> str:
        named = self.where and self.where not in self.message
        text = f"{self.where}: {self.message}" if named else self.message
        return f"{text} ({self.hint})" if self.hint else text

    def to_dict(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "where": self.where, "hint": self.hint}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 40]}... ({len(text)} characters)"


class BadRequest(RuntimeFault, ValueError):
    """The request itself is wrong. Also a ValueError."""

    status, code = 400, "bad_request"


class PromptTooLong(BadRequest):
    code = "prompt_too_long"


class ContextExceeded(PromptTooLong):
    """The same with the code by which OpenAI's clients know it, and shorten the conversation."""

    code = "context_length_exceeded"


class BadConstraint(BadRequest):
    """A regex, schema or grammar that cannot be compiled."""

    code = "bad_constraint"


class UnsupportedConstraint(BadConstraint):
    """A valid constraint that no backend enforces exactly."""

    code = "unsupported_constraint"


class TemplateError(BadRequest):
    """The chat template refused the messages."""

    code = "template_error"


class AdapterError(BadRequest):
    """A LoRA adapter that cannot be loaded, or does not fit the model."""

    code = "adapter_error"


class ModelLoadError(RuntimeFault):
    """A checkpoint that cannot be loaded (path, config, weights, tokenizer)."""

    code = "model_load_error"


class NoSuchModel(ModelLoadError):
    code = "no_such_model"


class QueueFull(RuntimeFault):
    status, code, retryable = 503, "queue_full", True


class DeadlineExceeded(RuntimeFault):
    status, code, retryable = 504, "deadline_exceeded", True


class Aborted(RuntimeFault):
    """The client or an operator cancelled it. partial: the output until then; it does not travel."""

    status, code = 499, "aborted"
    partial: Any = None


class EngineDead(RuntimeFault):
    status, code, retryable = 503, "engine_dead", True


class InternalFault(RuntimeFault):
    """A defect; the request failed, the engine goes on."""

    code = "internal_fault"

    @classmethod
    def of(cls, error: BaseException, what: str = "", **fields: str) -> RuntimeFault:
        """A RuntimeFault as it is, any other error as a defect of `what`."""
        if isinstance(error, RuntimeFault):
            return error
        text = f"{type(error).__name__}: {error}"
        return cls(f"{what}: {text}" if what else text, **fields)


class WireError(RuntimeFault):
    """A message between processes that cannot be written or read."""

    code = "wire_error"


# -- of HTTP servers -----------------------------------------------------------------------------------------


class InvalidJson(BadRequest):
    code = "invalid_json"


class NotSupported(BadRequest):
    """A field or value of other servers that this one lacks. Not a 5xx: clients would try again."""

    code = "not_supported"


class Unauthorized(RuntimeFault):
    status, code = 401, "invalid_api_key"


class ForeignOrigin(RuntimeFault):
    """A browser sent it for a page of another origin."""

    status, code = 403, "foreign_origin"


class Forbidden(RuntimeFault):
    """The key has no permission for it."""

    status, code = 403, "forbidden"


class RateLimited(RuntimeFault):
    """The client has used up its limit. retry_after_s: when it may try again; it does not travel."""

    status, code, retryable = 429, "rate_limit_exceeded", True
    retry_after_s: float = 1.0


class NotFound(RuntimeFault):
    status, code = 404, "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(RuntimeFault):
    status, code = 405, "method_not_allowed"


class BodyTimeout(RuntimeFault):
    status, code, retryable = 408, "body_timeout", True


class BodyTooLarge(RuntimeFault):
    status, code = 413, "body_too_large"


class WrongMediaType(RuntimeFault):
    status, code = 415, "wrong_media_type"


class NoSuchService(RuntimeFault):
    """A path of other servers that this one lacks."""

    status, code = 501, "no_such_service"


class ToolServerError(RuntimeFault):
    """A tool server cannot be reached, or breaks its protocol. (A tool's error goes to the model.)"""

    status, code = 502, "tool_server_error"


class TransferError(RuntimeFault):
    """A prompt's KV did not arrive at the decode engine."""

    status, code, retryable = 502, "transfer_failed", True


class TransferPeerLost(TransferError):
    code = "transfer_peer_lost"


class TransferCorrupt(TransferError):
    """The KV that arrived is not the KV that was sent."""

    code = "transfer_corrupt"


class TransferLate(TransferError):
    status, code = 504, "transfer_late"


class Overloaded(QueueFull):
    """Too many HTTP requests at once."""

    code = "overloaded"


class WorkerFailed(RuntimeFault):
    """A router's worker cannot be reached, or broke off. `where`: its address."""

    status, code, retryable = 502, "worker_failed", True


class NoWorker(RuntimeFault):
    """A router has no worker for the request now."""

    status, code, retryable = 503, "no_worker", True


class NotReady(RuntimeFault):
    """The server loads, is asleep, or is about to end."""

    status, code, retryable = 503, "not_ready", True


def _kinds(kind: type[RuntimeFault]) -> Iterator[type[RuntimeFault]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _kinds(child)


BY_CODE: dict[str, type[RuntimeFault]] = {kind.code: kind for kind in _kinds(RuntimeFault)}
"""The errors of this module, which can travel. Subclasses elsewhere travel as the error that they refine."""


def from_dict(data: dict[str, Any]) -> RuntimeFault:
    """The error of a `to_dict`; the base class for an unknown code."""
    kind = BY_CODE.get(str(data.get("code")), RuntimeFault)
    return kind(str(data.get("message", "")), where=data.get("where"), hint=data.get("hint"))

"""The runtime's tree of errors, spoken on both sides of every boundary.

    RuntimeFault                      everything below; carries status, code, hint
    +-- BadRequest                    400  the request itself is wrong
    |   +-- PromptTooLong             400
    |   |   +-- ContextExceeded       400  the same, for OpenAI's clients
    |   +-- BadConstraint             400  a regex, schema or grammar that cannot be compiled
    |   |   +-- UnsupportedConstraint 400  understood, but no backend keeps it exactly
    |   +-- AdapterError              400  a LoRA adapter cannot be loaded, or does not fit the model
    |   +-- TemplateError             400  the chat template refused the messages
    |   +-- InvalidJson               400  the body of an HTTP request is not JSON
    |   +-- NotSupported              400  a field or value that others take, and this server does not
    +-- Unauthorized                  401
    +-- ForeignOrigin                 403
    +-- Forbidden                     403  this key may not do that
    +-- NotFound                      404
    |   +-- ModelNotFound             404
    +-- MethodNotAllowed              405
    +-- BodyTimeout                   408
    +-- BodyTooLarge                  413
    +-- WrongMediaType                415
    +-- RateLimited                   429  the client has used up what it may for now
    +-- ModelLoadError                500  a checkpoint cannot be loaded (path, config, weights, tokenizer)
    |   +-- NoSuchModel               500  there is no checkpoint of this name
    +-- NoSuchService                 501  a path that others answer, and this server does not
    +-- ToolServerError               502  a tool server cannot be reached
    +-- TransferError                 502  a prompt's KV did not get from the prefill to the decode engine
    |   +-- TransferPeerLost          502  the other engine is gone
    |   +-- TransferCorrupt           502  what arrived is not what was sent
    |   +-- TransferLate              504  it took longer than it may
    +-- QueueFull                     503
    |   +-- Overloaded                503  too many HTTP requests at once
    +-- WorkerFailed                  502  a router's worker broke off, or cannot be reached; it is named
    +-- NotReady                      503  the server lives, but loads, is paused or about to end
    +-- NoWorker                      503  a router has no worker that can take the request now
    +-- DeadlineExceeded              504
    +-- Aborted                       499  the client, or an operator, cancelled it
    +-- EngineDead                    503  the engine stopped; the cause is named
    +-- InternalFault                 500  a defect; the request failed, the engine goes on
    +-- WireError                     500  a message between processes that cannot be written or read

It does not know HTTP beyond the status numbers, and holds no traceback: an error must survive a wire.
"""

from __future__ import annotations

from typing import Any, ClassVar

MAX_MESSAGE, MAX_WHERE = 4000, 400
"""Characters."""


class RuntimeFault(Exception):
    """Base of all errors a user of the runtime can meet. `where` says which field, file or offset; `hint`
    what to do."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "runtime_fault"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        """What quotes a value may be as long as the value: `message` and `where` are cut."""
        self.message, self.hint = _cut(message, MAX_MESSAGE), hint
        self.where = None if where is None else _cut(where, MAX_WHERE)
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
    """Also a ValueError: what was given has a wrong value, whoever gave it."""

    status, code = 400, "bad_request"


class PromptTooLong(BadRequest):
    code = "prompt_too_long"


class ContextExceeded(PromptTooLong):
    """The same for OpenAI's clients, which know it by this code, or by the beginning of its message, and
    shorten the conversation."""

    code = "context_length_exceeded"


class BadConstraint(BadRequest):
    code = "bad_constraint"


class UnsupportedConstraint(BadConstraint):
    code = "unsupported_constraint"


class TemplateError(BadRequest):
    code = "template_error"


class AdapterError(BadRequest):
    """Adapters are loaded at any user's wish: what is wrong with their files is a matter of the request."""

    code = "adapter_error"


class ModelLoadError(RuntimeFault):
    code = "model_load_error"


class NoSuchModel(ModelLoadError):
    code = "no_such_model"


class QueueFull(RuntimeFault):
    status, code, retryable = 503, "queue_full", True


class DeadlineExceeded(RuntimeFault):
    status, code, retryable = 504, "deadline_exceeded", True


class Aborted(RuntimeFault):
    """`partial`: the GenerateOutput of what there was until then, where something was generated; it does not
    travel with the fault."""

    status, code = 499, "aborted"
    partial: Any = None


class EngineDead(RuntimeFault):
    status, code, retryable = 503, "engine_dead", True


class InternalFault(RuntimeFault):
    code = "internal_fault"


class WireError(RuntimeFault):
    code = "wire_error"


# -- what only an HTTP server says; here, so that clients can tell them apart --------------------------------


class InvalidJson(BadRequest):
    code = "invalid_json"


class NotSupported(BadRequest):
    """A field or value that other servers of this kind take, and this one does not. Not a 5xx: clients would
    try it again."""

    code = "not_supported"


class Unauthorized(RuntimeFault):
    status, code = 401, "invalid_api_key"


class ForeignOrigin(RuntimeFault):
    """A browser sent it for a page of another origin, which may not give orders here."""

    status, code = 403, "foreign_origin"


class Forbidden(RuntimeFault):
    """The key is a known one, and may not do that."""

    status, code = 403, "forbidden"


class RateLimited(RuntimeFault):
    """retry_after_s: when it may try again; it does not travel with the fault."""

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
    """A path that other servers of this kind answer, and this one does not."""

    status, code = 501, "no_such_service"


class ToolServerError(RuntimeFault):
    """A tool server cannot be reached, or does not answer as it should. A tool that fails is no error: the
    model is told."""

    status, code = 502, "tool_server_error"


class TransferError(RuntimeFault):
    """KV of a prompt did not get from the engine that computed it to the one that decodes."""

    status, code, retryable = 502, "transfer_failed", True


class TransferPeerLost(TransferError):
    code = "transfer_peer_lost"


class TransferCorrupt(TransferError):
    code = "transfer_corrupt"


class TransferLate(TransferError):
    status, code = 504, "transfer_late"


class Overloaded(QueueFull):
    code = "overloaded"


# -- what only a router says ---------------------------------------------------------------------------------


class WorkerFailed(RuntimeFault):
    """`where` is the worker's address."""

    status, code, retryable = 502, "worker_failed", True


class NoWorker(RuntimeFault):
    status, code, retryable = 503, "no_worker", True


class NotReady(RuntimeFault):
    status, code, retryable = 503, "not_ready", True


BY_CODE: dict[str, type[RuntimeFault]] = {
    kind.code: kind
    for kind in (
        RuntimeFault, BadRequest, PromptTooLong, ContextExceeded, BadConstraint, UnsupportedConstraint,
        TemplateError, ModelLoadError, NoSuchModel, QueueFull, DeadlineExceeded, Aborted, EngineDead,
        InternalFault, WireError, InvalidJson, NotSupported, Unauthorized, ForeignOrigin, NotFound,
        ModelNotFound, MethodNotAllowed, BodyTimeout, BodyTooLarge, WrongMediaType, NoSuchService, Overloaded,
        ToolServerError, AdapterError, TransferError, TransferPeerLost, TransferCorrupt, TransferLate,
        WorkerFailed, NoWorker, NotReady, Forbidden, RateLimited,
    )
}  # fmt: skip


def from_dict(data: dict[str, Any]) -> RuntimeFault:
    """The error that `to_dict` described; an unknown code becomes the base class."""
    kind = BY_CODE.get(str(data.get("code")), RuntimeFault)
    return kind(str(data.get("message", "")), where=data.get("where"), hint=data.get("hint"))

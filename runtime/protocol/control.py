"""Control verbs: requests to a running engine. Each is answered with one ControlOutput with its rid; AbortReq
and GroupFailed are not answered.

To add a verb, write its struct and its row in VERBS, and the method that carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadRequest
from runtime.protocol.request_base import BaseReq, SingleReq

PauseMode = Literal["abort", "in_place", "retract"]
MemoryPart = Literal["kv_cache", "weights"]
"""Parts of a model's memory that can be freed and allocated again."""


class AbortReq(SingleReq):
    """Cancel the request `rid`; all whose id begins with `rid` (`prefix`); all of a `frontend` that has
    ended; or all (`abort_all`). message: of their error."""

    abort_all: bool = False
    prefix: bool = False
    frontend: str | None = None
    message: str | None = None


class FlushCacheReq(SingleReq):
    """Drop all unlocked prefixes, once running requests have ended, or after timeout_s."""

    timeout_s: float = 0.0


class PauseReq(SingleReq):
    """Stop generating; new requests wait. mode: running requests are aborted (abort), keep their slots and KV
    (in_place), or return to the queue, and the cache is flushed (retract)."""

    mode: PauseMode = "abort"


class ContinueReq(SingleReq):
    """Resume after PauseReq."""


class OpenSessionReq(SingleReq):
    """Open a session of at most `capacity` tokens. session_id: None for a fresh one; answered in
    data["session_id"]. timeout_s: it is closed after so many seconds without use; None: never. streaming:
    turns only append to the last one, whose KV is kept. owner: the only client that may use it."""

    session_id: str | None = None
    owner: str = ""
    capacity: int = 0
    timeout_s: float | None = None
    streaming: bool = False


class CloseSessionReq(SingleReq):
    """Close a session and free its KV. owner: the client that opened it."""

    session_id: str
    owner: str = ""


class GetStateReq(SingleReq):
    """Ask for the scheduler's counters."""


MAX_PREFIXES = 5000
"""The most nodes of the prefix cache in one answer."""
MAX_PREFIX_IDS = 64
"""The most token ids of each."""


class GetPrefixesReq(SingleReq):
    """Ask for the prefix cache: a PrefixTree of at most `most` nodes, each with its first `ids` ids."""

    most: int = 500
    ids: int = 0


class SetStateReq(SingleReq):
    """Change settings of a running scheduler; answered with all settings."""

    values: dict[str, Any] = msgspec.field(default_factory=dict)


class LoadLoRAAdapterReq(SingleReq):
    """Load the LoRA adapter in the directory `lora_path` under a name for requests. pinned: once used, it
    stays on the device. Answered with all adapters in data["loaded_adapters"]."""

    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadLoRAAdapterReq(SingleReq):
    """Unload an adapter; running requests keep it. Answered like LoadLoRAAdapterReq."""

    lora_name: str


class UpdateWeightsReq(SingleReq):
    """Compute with the weights of the checkpoint in the directory `model_path` from now on. Live requests
    keep their output and are computed again; abort_all: they are cancelled."""

    model_path: str
    abort_all: bool = False


class ReleaseMemoryReq(SingleReq):
    """Free the memory of these parts until ResumeMemoryReq: new requests are refused with NotReady, and
    cached KV is lost. abort: live requests are cancelled; else they may end within timeout_s, or the verb
    fails."""

    parts: tuple[MemoryPart, ...]
    abort: bool = False
    timeout_s: float = 0.0


class ResumeMemoryReq(SingleReq):
    """Allocate the KV pool and load the weights of the last checkpoint again."""

    parts: tuple[MemoryPart, ...]


class ProfileReq(SingleReq):
    """Start or stop a profile, written into `folder`; steps: it stops after so many."""

    action: Literal["start", "stop"] = "start"
    steps: int | None = None
    folder: str | None = None


MAX_PRECOMPILED = 1024
"""The most constraints in one PrecompileReq."""


class PrecompileReq(SingleReq):
    """Compile constraints ahead of their use. Answered when all are compiled, or after `timeout_s`:
    data["constraints"] holds for each ok, and the fields of GrammarInfo or an error."""

    constraints: list[Constraint] = msgspec.field(default_factory=list)
    timeout_s: float = 30.0


class HealthReq(SingleReq):
    """Ask whether the scheduler works. Answered at once."""


class GroupFailed(SingleReq):
    """Supervisor -> frontends: a process of the group died (where: which), nothing more will be answered."""

    message: str
    where: str | None = None


class ControlOutput(SingleReq):
    """The answer to a verb. Not ok: `message` says why, `data` may be a RuntimeFault as a dict."""

    ok: bool
    message: str = ""
    data: dict[str, Any] = msgspec.field(default_factory=dict)


class Verb(msgspec.Struct, frozen=True):
    """One control verb.

    name     of the method that carries it out, and for Engine.control()
    request  its struct, whose fields are its parameters
    by       "scheduler": a method of runtime.processes.pipeline.verbs.Verbs; "runner": of TorchRunner, on all
             ranks
    paths    of its HTTP routes, all POST. runtime.server.native.verbs serves those that no other module has:
             the body holds the fields, the answer is success, message and data
    admin    whether the routes need the admin key, as the verb changes the engine for every client
    summary  of a route of runtime.server.native.verbs
    """

    name: str
    request: type[SingleReq]
    by: Literal["scheduler", "runner"] = "scheduler"
    paths: tuple[str, ...] = ()
    admin: bool = True
    summary: str = ""


_ROWS: Final = (
    Verb("flush_cache", FlushCacheReq, paths=("/flush_cache",)),
    Verb("pause", PauseReq, paths=("/pause_generation",), summary="Pause generation"),
    Verb("resume", ContinueReq, paths=("/continue_generation",), summary="Continue generation"),
    Verb("open_session", OpenSessionReq, paths=("/open_session",), admin=False),
    Verb("close_session", CloseSessionReq, paths=("/close_session",), admin=False, summary="Close a session"),
    Verb("state", GetStateReq),
    Verb("prefixes", GetPrefixesReq),
    Verb("set_state", SetStateReq, paths=("/set_internal_state",)),
    Verb("precompile", PrecompileReq, paths=("/precompile",), admin=False),
    Verb("profile", ProfileReq, paths=("/start_profile", "/stop_profile")),
    Verb(
        "load_lora_adapter", LoadLoRAAdapterReq, paths=("/load_lora_adapter",), summary="Load a LoRA adapter"
    ),
    Verb(
        "unload_lora_adapter",
        UnloadLoRAAdapterReq,
        paths=("/unload_lora_adapter",),
        summary="Unload a LoRA adapter",
    ),
    Verb("update_weights_from_disk", UpdateWeightsReq, paths=("/update_weights_from_disk",)),
    Verb("release_memory_occupation", ReleaseMemoryReq, paths=("/release_memory_occupation", "/sleep")),
    Verb("resume_memory_occupation", ResumeMemoryReq, paths=("/resume_memory_occupation", "/wake_up")),
    Verb("health", HealthReq),
)
VERBS: Final[Mapping[str, Verb]] = {verb.name: verb for verb in _ROWS}
VERB_OF: Final[Mapping[type[SingleReq], Verb]] = {verb.request: verb for verb in _ROWS}


def no_adapters(field: str) -> BadRequest:
    return BadRequest(
        "the engine was started without adapters",
        where=field,
        hint="start it with --lora-paths or --enable-lora",
    )


def parameters(verb: Verb) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The fields of its request, without those of every message."""
    common = {field.name for field in msgspec.structs.fields(BaseReq)}
    return tuple(field for field in msgspec.structs.fields(verb.request) if field.name not in common)


def request_of(name: str, values: Mapping[str, Any]) -> SingleReq:
    """The request of the verb `name` with these parameters. Raises BadRequest."""
    verb = VERBS.get(name)
    if verb is None:
        raise BadRequest(f"unknown verb {name!r:.80}", where="control", hint=f"one of {', '.join(VERBS)}")
    known = [field.name for field in parameters(verb)]
    for unknown in values.keys() - {*known}:
        hint = f"it has {', '.join(known)}" if known else "it has none"
        raise BadRequest(f"unknown parameter {unknown!r:.80}", where=name, hint=hint)
    try:
        return msgspec.convert(values, verb.request)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error), where=name) from error

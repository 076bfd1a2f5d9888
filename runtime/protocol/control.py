"""Control verbs: the questions and orders to a running engine, and VERBS, the table of all of them. Each is
answered with one ControlOutput that carries its rid. AbortReq and GroupFailed are not answered.

The API, the wire, the scheduler's process and the HTTP routes read the table. To add a verb, write its struct
and row here, and the method that carries it out. Knows no scheduler.
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
"""What of a model's memory can be given back and taken again."""


class AbortReq(SingleReq):
    """Cancel the request `rid`; all whose id begins with `rid` (`prefix`); all of one `frontend`, which is
    gone; or all there are (`abort_all`).

    message: what those who wait are told."""

    abort_all: bool = False
    prefix: bool = False
    frontend: str | None = None
    message: str | None = None


class FlushCacheReq(SingleReq):
    """Drop all unlocked prefixes. timeout_s: wait so long for running requests to end first."""

    timeout_s: float = 0.0


class PauseReq(SingleReq):
    """Stop generating. Requests that arrive meanwhile wait.

    mode: what happens to running requests. abort: all end; in_place: they keep their slots and their KV;
    retract: they return to the queue and the cache is flushed."""

    mode: PauseMode = "abort"


class ContinueReq(SingleReq):
    """Go on after PauseReq."""


class OpenSessionReq(SingleReq):
    """Open a session of at most `capacity` tokens. session_id: None asks for a fresh one; answered in
    data["session_id"]. timeout_s: seconds without use after which it is closed; None never. streaming: turns
    only append to the last one, whose KV is kept between turns. owner: the client that has it, no other
    may use it."""

    session_id: str | None = None
    owner: str = ""
    capacity: int = 0
    timeout_s: float | None = None
    streaming: bool = False


class CloseSessionReq(SingleReq):
    """Close a session and free what it keeps. owner: the client that opened it."""

    session_id: str
    owner: str = ""


class GetStateReq(SingleReq):
    """Ask for the scheduler's counters; they come in `data`."""


MAX_PREFIXES = 5000
"""Nodes of the prefix cache in one answer, at most."""
MAX_PREFIX_IDS = 64
"""Token ids of each, at most."""


class GetPrefixesReq(SingleReq):
    """Ask what the prefix cache holds: the answer's data is a PrefixTree (cache/survey.py) as a dict, of
    `most` nodes at most, each with its first `ids` token ids."""

    most: int = 500
    ids: int = 0


class SetStateReq(SingleReq):
    """Change settings of a running scheduler; answered with their values after the change in `data`."""

    values: dict[str, Any] = msgspec.field(default_factory=dict)


class LoadLoRAAdapterReq(SingleReq):
    """Load the LoRA adapter in the directory `lora_path` under a name by which requests ask for it. pinned:
    once used, it stays on the device. The adapters loaded then come in data["loaded_adapters"]."""

    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadLoRAAdapterReq(SingleReq):
    """Unload an adapter: no request finds it any more; those that have it keep it. Answered likewise."""

    lora_name: str


class UpdateWeightsReq(SingleReq):
    """Compute with the weights of the checkpoint in the directory `model_path` from now on. Requests in hand
    are computed again from their beginning, with what they have said by now; abort_all: they are cancelled.
    No step is made meanwhile."""

    model_path: str
    abort_all: bool = False


class ReleaseMemoryReq(SingleReq):
    """Give back the memory of these parts, until ResumeMemoryReq has asked for all of them: requests are
    refused from now on, with NotReady, and the prefixes' KV is lost. abort: those in hand are cancelled;
    else they are waited for, for timeout_s at most, and then nothing has changed."""

    parts: tuple[MemoryPart, ...]
    abort: bool = False
    timeout_s: float = 0.0


class ResumeMemoryReq(SingleReq):
    """Make the KV pool again, read the weights of the checkpoint that was used last. Requests are taken once
    both are there."""

    parts: tuple[MemoryPart, ...]


class ProfileReq(SingleReq):
    """Start or stop writing a profile into `folder`; steps: stop by itself after so many steps."""

    action: Literal["start", "stop"] = "start"
    steps: int | None = None
    folder: str | None = None


MAX_PRECOMPILED = 1024
"""Constraints in one PrecompileReq, at most."""


class PrecompileReq(SingleReq):
    """Compile these constraints, so that they are ready when a request comes with one. Answered when all are
    done, or after `timeout_s` with those that are: data["constraints"] holds for each, in order, ok, and
    either backend, exact, checked, ignored, why, compile_s and cached, or an error."""

    constraints: list[Constraint] = msgspec.field(default_factory=list)
    timeout_s: float = 30.0


class HealthReq(SingleReq):
    """Is the scheduler's loop turning? Answered at once, whatever else runs."""


class GroupFailed(SingleReq):
    """Supervisor -> frontends: a process of the group died, nothing more will be answered. where: which."""

    message: str
    where: str | None = None


class ControlOutput(SingleReq):
    """The answer to the question with the same rid. Not ok: `message` says why, and `data` may hold a
    RuntimeFault as a dict."""

    ok: bool
    message: str = ""
    data: dict[str, Any] = msgspec.field(default_factory=dict)


class Verb(msgspec.Struct, frozen=True):
    """One question or order.

    name     the method that carries it out; Engine.control() takes it, too
    request  its struct, whose fields are its parameters
    by       whose method: "scheduler" (runtime.processes.pipeline.verbs.Verbs) or "runner" (TorchRunner, in
             whatever process it runs, and with tensor parallelism every rank)
    paths    of its HTTP routes, all POST. runtime.server.native.verbs serves a path for which no other module
             has a route: the body holds the fields, and the answer is success, message and data
    admin    whether it changes the engine for every client: only the admin key may then use the routes
    summary  of a route that is served as it is
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
    Verb("load_lora_adapter", LoadLoRAAdapterReq, paths=("/load_lora_adapter",)),
    Verb("unload_lora_adapter", UnloadLoRAAdapterReq, paths=("/unload_lora_adapter",)),
    Verb("update_weights_from_disk", UpdateWeightsReq, paths=("/update_weights_from_disk",)),
    Verb("release_memory_occupation", ReleaseMemoryReq, paths=("/release_memory_occupation", "/sleep")),
    Verb("resume_memory_occupation", ResumeMemoryReq, paths=("/resume_memory_occupation", "/wake_up")),
    Verb("health", HealthReq),
)
VERBS: Final[Mapping[str, Verb]] = {verb.name: verb for verb in _ROWS}
VERB_OF: Final[Mapping[type[SingleReq], Verb]] = {verb.request: verb for verb in _ROWS}
"""The same by the request's type."""


def no_adapters(field: str) -> BadRequest:
    """The error for an adapter's name where adapters are off."""
    return BadRequest(
        "the engine was started without adapters",
        where=field,
        hint="start it with --lora-paths or --enable-lora",
    )


def parameters(verb: Verb) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The fields of its request that are its own, without those that every message has."""
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

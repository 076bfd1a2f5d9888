"""Bodies and answers of /v1/responses, and the store of responses."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from runtime.config.serving.server import ServerConfig
from runtime.processes.frontend.client import CLIENT
from runtime.protocol.errors import BadRequest, NotFound
from runtime.protocol.messages import Message
from runtime.server.openai.params import Sampled

MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_VALUE = 16, 64, 512
"""Pairs, and characters of each part."""


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The schema is enforced whatever `strict` is; without one, any JSON is allowed. "structural_tag" has
    `format`, or the older `structures` and `triggers`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"] = "text"
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    description: str | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(Sampled, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields, with those of Sampled. Fields about accounts have no effect."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    stream_options: dict[str, Any] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    include: list[str] | None = None
    text: TextOptions | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    prompt: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    context_management: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponseObject(msgspec.Struct, kw_only=True):
    """status: queued, in_progress, completed, incomplete, failed or cancelled."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[dict[str, Any]] = []
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] = {}
    background: bool = False
    store: bool = True
    temperature: float | None = None
    text: dict[str, Any] = {}
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_p: float | None = None
    truncation: str = "disabled"
    usage: dict[str, Any] | None = None
    user: str | None = None
    object: str = "response"


class Deleted(msgspec.Struct):
    id: str
    deleted: bool = True
    object: str = "response"


class InputItems(msgspec.Struct):
    """The input of a response."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


@dataclass
class Kept:
    """A response with its conversation, its input items, and the asyncio.Task that works on it. owner: its
    client, if there are several; size: bytes as JSON; since: time.monotonic()."""

    response: ResponseObject
    messages: list[Message]
    items: list[dict[str, Any]] = field(default_factory=list)
    task: Any = None
    owner: str = ""
    size: int = 0
    since: float = 0.0

    @property
    def is_of_client(self) -> bool:
        return self.owner == CLIENT.get().owner


class Store:
    """The newest responses by id, within limits. report: called with their number and bytes."""

    def __init__(
        self,
        config: ServerConfig,
        report: Callable[[int, int], None] = lambda count, size: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._most_bytes = config.max_kept_responses, config.max_kept_response_bytes
        self._seconds = config.keep_responses_s
        self._report, self._clock = report, clock
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._bytes: Counter[str] = Counter()

    def put(self, kept: Kept) -> None:
        """Store it, or its new state. The oldest are dropped for it, first those of its owner, if they take
        more than half of the limit."""
        before = self._kept.get(kept.response.id)
        if before is not None:
            self._bytes[before.owner] -= before.size
        kept.since = self._clock() if before is None else before.since
        kept.size = len(msgspec.json.encode((kept.response, kept.messages, kept.items)))
        self._kept[kept.response.id] = kept
        self._bytes[kept.owner] += kept.size
        if kept.owner:
            names = [name for name, one in self._kept.items() if one.owner == kept.owner]
            while names and self._bytes[kept.owner] > self._most_bytes // 2:
                self.pop(names.pop(0))
        while len(self._kept) > self._most or self._bytes.total() > self._most_bytes:
            self.pop(next(iter(self._kept)))
        self._expire()

    def _expire(self) -> None:
        late = self._clock() - self._seconds
        while self._kept and (oldest := next(iter(self._kept.values()))).since <= late:
            self.pop(oldest.response.id)
        self._report(len(self._kept), self._bytes.total())

    def pop(self, identity: str) -> Kept | None:
        """Remove it, and cancel its task. None if it is not here."""
        kept = self._kept.pop(identity, None)
        if kept is not None:
            self._bytes[kept.owner] -= kept.size
            if kept.task is not None:
                kept.task.cancel()
            self._report(len(self._kept), self._bytes.total())
        return kept

    def find(self, identity: str) -> Kept | None:
        self._expire()
        return self._kept.get(identity)


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raise BadRequest for more than OpenAI's limits."""
    metadata = metadata or {}
    if len(metadata) > MAX_METADATA:
        raise BadRequest(f"has {len(metadata)} pairs; at most {MAX_METADATA}", where="metadata")
    for name, value in metadata.items():
        if len(name) > MAX_METADATA_NAME or len(value) > MAX_METADATA_VALUE:
            raise BadRequest(
                f"a name has at most {MAX_METADATA_NAME} characters, and a value {MAX_METADATA_VALUE}",
                where=f"metadata.{name[:MAX_METADATA_NAME]}",
            )


def no_response(identity: str, field: str = "response_id") -> NotFound:
    return NotFound(f"no response {identity[:80]!r} is stored", where=field)

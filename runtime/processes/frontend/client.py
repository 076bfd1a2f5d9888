"""Client: on whose behalf the current task works, and Observer: what is notified of requests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from runtime.protocol.errors import RuntimeFault


class Client:
    """name: whose shares are counted together. is_tenant: one of several clients that must not learn of one
    another, by the cache they share for example. sees_all: it may see others' requests. flow: an opaque label
    for the scheduler's fair shares; None: the share of all clients without one."""

    def __init__(
        self, name: str = "", *, is_tenant: bool = False, sees_all: bool = False, flow: str | None = None
    ) -> None:
        self.name, self.is_tenant, self.sees_all, self.flow = name, is_tenant, sees_all, flow

    @property
    def owner(self) -> str:
        """The owner of the sessions and stored responses that it may use; "" for all who are no tenants."""
        return self.name if self.is_tenant else ""

    def begin(self) -> None:
        """One of its requests begins. Raises RateLimited if it may have no more."""

    def end(self) -> None:
        """A request that began has ended."""

    def spend(self, tokens: int) -> None:
        """Count tokens that were read or generated for it. Called from any thread."""

    def headers(self) -> dict[str, str]:
        return {}


ANYONE = Client()
CLIENT: ContextVar[Client] = ContextVar("client", default=ANYONE)
"""The client of the current task; ANYONE where the server set none."""


def flow_label(identity: str) -> str:
    return hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()


class ClientRequest:
    """A request of a client: it runs until its task and the background tasks it started are done."""

    def __init__(self, client: Client) -> None:
        """Raises RateLimited."""
        client.begin()
        self._client, self._workers = client, 1

    def work_on(self) -> None:
        self._workers += 1

    def done(self) -> None:
        self._workers -= 1
        if not self._workers:
            self._client.end()


IN_HAND: ContextVar[ClientRequest | None] = ContextVar("in_hand", default=None)
"""The client's request that the current task works on; None: it counts for no client."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that was sent to the scheduler. began: time.monotonic() seconds; labels: custom_labels."""

    rid: str
    prompt_tokens: int
    stream: bool
    began: float
    labels: Mapping[str, str] = field(default_factory=dict)


class Observer:
    """Notified of every request's events, by any thread. Its methods are quick and raise nothing."""

    def on_begin(self, request: Begun) -> None: ...

    def on_first_token(self, request: Begun, seconds: float) -> None:
        """seconds: from the beginning to the first output with a token."""

    def on_tokens(self, request: Begun, count: int, seconds: float) -> None:
        """`count` more tokens, `seconds` after the output before. Not called for the first."""

    def on_finish(self, request: Begun, meta: Mapping[str, Any], seconds: float) -> None:
        """meta: the counters of the answer's meta, with finish_reason and queue_time."""

    def on_abort(self, request: Begun, fault: RuntimeFault | None, seconds: float) -> None:
        """It failed with `fault`; None: the caller left."""

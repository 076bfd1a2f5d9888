"""Client: on whose behalf the current task works. The server sets it; the frontend, which knows no keys and
no addresses, reports to it what requests cost."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar


class Client:
    """name: whose shares are counted together. is_tenant: it is one of several that must not learn of one
    another: not by what the cache they share holds, nor may it end what others began. sees_all: it may be
    shown what others asked. flow: whose turn its requests take in the scheduler, as a label that says nothing
    else; None: that of all who have none."""

    def __init__(
        self, name: str = "", *, is_tenant: bool = False, sees_all: bool = False, flow: str | None = None
    ) -> None:
        self.name, self.is_tenant, self.sees_all, self.flow = name, is_tenant, sees_all, flow

    @property
    def owner(self) -> str:
        """Whose sessions and stored responses it may use: its own, or those of all who are no tenants."""
        return self.name if self.is_tenant else ""

    def begin(self) -> None:
        """A request of its own begins. Raises RateLimited where it may have no more; then it did not."""

    def end(self) -> None:
        """One that began is over."""

    def spend(self, tokens: int) -> None:
        """So many tokens were taken in, or generated, for it. Called from any thread."""

    def headers(self) -> dict[str, str]:
        """What the answer's headers tell of its limits."""
        return {}


CLIENT: ContextVar[Client] = ContextVar("client", default=Client())  # noqa: B039 - it has no state
"""Of the current task."""


def flow_label(identity: str) -> str:
    """An opaque label of the client with this identity."""
    return hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()


class ClientRequest:
    """One request of a client, which counts as running until all work on it is done: the task that answers
    it, and background tasks that it started."""

    def __init__(self, client: Client) -> None:
        """Raises RateLimited."""
        client.begin()
        self._client, self._workers = client, 1

    def work_on(self) -> None:
        """One more works on it, and calls done()."""
        self._workers += 1

    def done(self) -> None:
        self._workers -= 1
        if not self._workers:
            self._client.end()


IN_HAND: ContextVar[ClientRequest | None] = ContextVar("in_hand", default=None)
"""The client's request that the current task works on; None: it counts for no client."""

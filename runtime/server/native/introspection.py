"""The native routes for looking into the engine: its prefix cache, and the recent requests with their times.

Clients that may give orders see all of it, texts included; a client among several sees nothing of the others.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request

from runtime.cache.node import PrefixNode
from runtime.processes.frontend import prefixes
from runtime.processes.frontend.client import CLIENT, Begun, Observer
from runtime.protocol.control import MAX_PREFIXES
from runtime.protocol.errors import BadRequest, Forbidden, RuntimeFault
from runtime.server.context import RouteGroup, ServerContext, serves
from runtime.server.http.openapi import Operation

KEPT = 512


class RecentRequest(msgspec.Struct):
    """One request. began: seconds since 1970. queue_s: until its admission; first_token_s: until its first
    token; seconds: in all. finish: its reason, or the code of its error; None while it runs. client: the name
    of its key, or its address."""

    rid: str
    began: float
    client: str
    prompt_tokens: int
    seconds: float = 0.0
    queue_s: float = 0.0
    first_token_s: float = 0.0
    cached_tokens: int = 0
    completion_tokens: int = 0
    jumped_tokens: int = 0
    decode_steps: int = 0
    finish: str | None = None
    failed: bool = False


class Recent(Observer):
    """An observer of the frontend: the last KEPT requests that ended, and those that run. Without texts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[str, RecentRequest] = {}
        self._ended: deque[RecentRequest] = deque(maxlen=KEPT)

    def all(self) -> list[RecentRequest]:
        """Oldest first; at most KEPT of each kind."""
        now = time.time()
        with self._lock:
            live = list(self._live.values())[-KEPT:]
            ended = list(self._ended)
        return ended + [msgspec.structs.replace(one, seconds=max(0.0, now - one.began)) for one in live]

    def on_begin(self, request: Begun) -> None:
        recent = RecentRequest(request.rid, time.time(), CLIENT.get().name, request.prompt_tokens)
        with self._lock:
            self._live[request.rid] = recent

    def on_first_token(self, request: Begun, seconds: float) -> None:
        with self._lock:
            if (recent := self._live.get(request.rid)) is not None:
                recent.first_token_s = seconds

    def on_tokens(self, request: Begun, count: int, seconds: float) -> None:
        """Counted at the end."""

    def on_finish(self, request: Begun, meta: Mapping[str, Any], seconds: float) -> None:
        self._end(
            request,
            seconds,
            queue_s=max(0.0, float(meta.get("queue_time") or 0.0)),
            first_token_s=max(0.0, float(meta.get("first_token_latency") or 0.0)),
            finish=str((meta.get("finish_reason") or {}).get("type", "stop")),
            **{
                name: int(meta.get(name) or 0)
                for name in ("cached_tokens", "completion_tokens", "jumped_tokens", "decode_steps")
            },
        )

    def on_abort(self, request: Begun, fault: RuntimeFault | None, seconds: float) -> None:
        self._end(request, seconds, finish="aborted" if fault is None else fault.code, failed=True)

    def _end(self, request: Begun, seconds: float, **known: Any) -> None:
        with self._lock:
            if (recent := self._live.pop(request.rid, None)) is not None:
                self._ended.append(msgspec.structs.replace(recent, seconds=seconds, **known))


DEFAULT_PREFIXES = 500


class ShownPrefix(PrefixNode):
    """text: of its first tokens, if the client may see it, `cut` if there are more."""

    text: str | msgspec.UnsetType = msgspec.UNSET
    cut: bool | msgspec.UnsetType = msgspec.UNSET


class ShownTree(msgspec.Struct):
    """See PrefixTree. texts: whether this client may see them."""

    page_size: int
    evictable: int
    protected: int
    nodes: list[ShownPrefix]
    left_out: int
    texts: bool


class RecentRequests(msgspec.Struct):
    """Oldest first. all_clients: whether requests of other clients are included."""

    now: float
    all_clients: bool
    requests: list[RecentRequest]


_TREE = Operation(
    "Contents of the prefix cache, most used first",
    response=ShownTree,
    errors=(400, 504),
    query={"limit": {"type": "integer", "minimum": 1, "maximum": MAX_PREFIXES}},
)


class Introspection(RouteGroup):
    def __init__(self, ctx: ServerContext) -> None:
        super().__init__(ctx)
        self._recent = Recent()
        ctx.manager.observe(self._recent)
        ctx.peers.answers["recent"] = lambda _: self._recent.all()

    @serves(_TREE, "GET /radix_tree")
    async def tree(self, request: Request) -> dict[str, Any]:
        client = CLIENT.get()
        if client.is_tenant:
            raise Forbidden("what others have cached is shown to the admin key alone", where="/radix_tree")
        question = prefixes.question(_limit(request), texts=client.sees_all)
        tree = (await self._ctx.control(question)).data
        tokenizer = self._ctx.manager.tokenizer if client.sees_all else None
        shown = await asyncio.to_thread(prefixes.with_texts, tree, tokenizer)
        return {**shown, "texts": client.sees_all}

    @serves(
        Operation("The most recent requests: counts and times", None, RecentRequests), "GET /recent_requests"
    )
    async def recent(self, request: Request) -> RecentRequests:
        client = CLIENT.get()
        others = await self._ctx.peers.all("recent", "", list[RecentRequest])
        requests = [one for some in (self._recent.all(), *others) for one in some]
        if not client.sees_all:
            requests = [one for one in requests if one.client == client.name]
        requests.sort(key=lambda one: one.began)
        return RecentRequests(self._ctx.clock(), client.sees_all, requests)


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(DEFAULT_PREFIXES))
    # Longer ones are not read as a number at all.
    value = int(text) if len(text) <= 9 and text.isascii() and text.isdecimal() else 0
    if not 1 <= value <= MAX_PREFIXES:
        raise BadRequest(f"must be a number from 1 to {MAX_PREFIXES}, got {text[:40]!r}", where="limit")
    return value

"""Recent: the last requests of this process and where their time went, for whoever looks. Counts and times;
no texts."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from runtime.processes.frontend.client import CLIENT, Begun, Observer
from runtime.protocol.errors import RuntimeFault

KEPT = 512


class RecentRequest(msgspec.Struct):
    """One request. began: seconds since 1970. queue_s: until it was let in; first_token_s: from the beginning
    to its first token; seconds: in all. finish: its reason, or the code of its error; None: it runs yet.
    client: whose it is, by the name of its key or by its address."""

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
    """An observer of the frontend. Keeps the last KEPT that ended, and those that run."""

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

    # -- the observer ----------------------------------------------------------------------------------------

    def on_begin(self, request: Begun) -> None:
        made = RecentRequest(request.rid, time.time(), CLIENT.get().name, request.prompt_tokens)
        with self._lock:
            self._live[request.rid] = made

    def on_first_token(self, request: Begun, seconds: float) -> None:
        with self._lock:
            if (found := self._live.get(request.rid)) is not None:
                found.first_token_s = seconds

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
            if (found := self._live.pop(request.rid, None)) is not None:
                self._ended.append(msgspec.structs.replace(found, seconds=seconds, **known))

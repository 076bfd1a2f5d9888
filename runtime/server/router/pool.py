"""Pool: the workers of one role, and which of them gets a request. A Worker counts its requests, and has a
circuit breaker. RequestFacts are the fields of a body that the choice depends on; the body itself is passed
on as it came, and if it is not JSON, or has another shape, the worker reports what is wrong. Nothing here
uses HTTP; everything is used by one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from runtime.config.serving.router import RouterConfig
from runtime.protocol.errors import BadRequest, NoWorker
from runtime.server.router.policies import POLICIES, overloaded

MOST_PROMPT = 128 << 10
"""Bytes of a prompt that are compared, at most."""
_NAMESPACE = ("model", "lora_path", "extra_key", "cache_salt")
_PROMPT = ("tools", "instructions", "system", "text", "input_ids", "prompt", "messages", "input")


class _Fields(msgspec.Struct):
    """Fields of all routes."""

    session_id: Any = None
    session_params: Any = None
    routing_key: Any = None
    prompt_cache_key: Any = None
    previous_response_id: Any = None
    timeout_s: Any = None


_Body = msgspec.defstruct(
    "_Body", [(name, msgspec.Raw, msgspec.Raw()) for name in (*_NAMESPACE, *_PROMPT)], bases=(_Fields,)
)
"""With those that the prompt depends on, as JSON of any type."""


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """prompt: what a cached prefix depends on (see Policy.choose)
    held     the session or earlier response that only one worker has; None: any can answer
    program  requests with the same one should go to the same worker
    timeout_s  seconds for all attempts together
    """

    prompt: bytes = b""
    held: str | None = None
    program: str | None = None
    timeout_s: float | None = None


def read_facts(body: bytes) -> RequestFacts:
    try:
        fields: Any = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, RecursionError):
        return RequestFacts()
    parts = [bytes(getattr(fields, name)) for name in (*_NAMESPACE, *_PROMPT)]
    prompt = b"\n".join(part[:MOST_PROMPT] for part in parts if part)[:MOST_PROMPT]
    program = _text(fields.routing_key) or _text(fields.prompt_cache_key)
    limit = fields.timeout_s
    timed = isinstance(limit, int | float) and not isinstance(limit, bool) and limit > 0
    return RequestFacts(prompt, _held(fields), program, float(limit) if timed else None)


def _held(body: _Fields) -> str | None:
    listed = body.session_id if isinstance(body.session_id, list) else [body.session_id]
    params = body.session_params if isinstance(body.session_params, list) else [body.session_params]
    named = [*listed, *(one.get("id") for one in params if isinstance(one, Mapping))]
    named.append(body.previous_response_id)
    return next((name for name in map(_text, named) if name is not None), None)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


BOOTSTRAP_PORT = 8998
"""Of a prefill server that does not report its own."""
MOST_REMEMBERED = 1 << 16
"""Sessions, stored responses and programs whose worker is remembered, at most."""


class Worker:
    """name: its URL, without a slash at the end. role: worker, prefill or decode."""

    def __init__(
        self, url: str, role: str, config: RouterConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self.role = checked_url(url, role), role
        self.active = 0
        self.bootstrap_host, self.bootstrap_port = host_of(self.name), BOOTSTRAP_PORT
        self.bootstrap_fixed = False
        """Whether the port is from the options; else the server reports it."""
        self._config, self._clock = config, clock
        self._ready: bool | None = None
        self._reason = "has not answered yet"
        self._failures = 0
        self._closed_until: float | None = None
        self._trial_began: float | None = None
        self._waiting: set[asyncio.Timeout] = set()
        self._silences = 0
        self.abandoned = ""

    @property
    def state(self) -> str:
        """available; trial: it failed, and one request tests whether it works again; failed: it gets none
        until then; not_ready: so it reports itself, or it does not answer."""
        if not self._ready:
            return "not_ready"
        if self._closed_until is None:
            return "available"
        now, trial = self._clock(), self._trial_began
        # A trial that has not failed after cooldown_s does not hold up others.
        waits = now < self._closed_until or (trial is not None and now - trial < self._config.cooldown_s)
        return "failed" if waits else "trial"

    @property
    def ready(self) -> bool:
        """Whether it was ready at the last probe."""
        return bool(self._ready)

    @property
    def available(self) -> bool:
        return self.state in ("available", "trial")

    @property
    def reason(self) -> str:
        return "" if self.state == "available" else self._reason

    def answered(self) -> None:
        self._failures, self._closed_until = 0, None

    def failed(self, reason: str) -> bool:
        """It failed a request. True if it gets no more requests from now on."""
        self._failures += 1
        self._reason = reason
        if self._failures < self._config.failure_threshold and self._closed_until is None:
            return False
        self._closed_until = self._clock() + self._config.cooldown_s
        return True

    def is_ready(self) -> None:
        """A probe found it ready, which does not reset its failures with requests."""
        self._ready, self._silences = True, 0

    def is_not_ready(self, reason: str, *, silent: bool = False) -> bool:
        """A probe found it not ready, or was refused; silent: it was not answered in time, which happens on a
        busy machine, too. True if it counts as dead from now on: then its requests fail."""
        self._silences = self._silences + 1 if silent else 0
        dead = self._silences == self._config.probe_failures
        if not silent or self._ready is None or dead:
            self._ready, self._reason = False, reason
        if dead:
            self.give_up(reason)
        return dead

    @contextlib.contextmanager
    def handling(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Count a request within the block. `limit` expires when the worker counts as dead."""
        trial = self.state == "trial"
        if trial:
            self._trial_began = self._clock()
        self.active += 1
        self._waiting.add(limit)
        try:
            yield
        finally:
            self._waiting.discard(limit)
            self.active -= 1
            if trial:
                self._trial_began = None

    def give_up(self, reason: str) -> None:
        self.abandoned = reason
        now = asyncio.get_running_loop().time()
        for limit in self._waiting:
            if not limit.expired():
                limit.reschedule(now)


@dataclass(frozen=True, slots=True)
class Choice:
    """A worker, and why this one: policy, program or session."""

    worker: Worker
    why: str


class Pool:
    """`workers`, of one role, and their policy. `changed` is set when they are replaced. Raises UnknownName
    for an unknown policy."""

    def __init__(self, workers: Sequence[Worker], policy: str, config: RouterConfig) -> None:
        self.workers = tuple(workers)
        self.role = workers[0].role
        self.changed = asyncio.Event()
        self._policy = POLICIES.load(policy)(config)
        self._config = config
        self._holders: OrderedDict[str, Worker] = OrderedDict()

    @property
    def available(self) -> bool:
        return any(one.available for one in self.workers)

    def choose(self, facts: RequestFacts, without: Collection[Worker] = ()) -> Choice:
        """The worker for a request; `without`: those that failed it already. Raises NoWorker."""
        holder = self._holders.get(f"held {facts.held}")
        if facts.held is not None and holder is not None:
            if holder in without or not holder.available:
                raise NoWorker(
                    f"only this worker has {facts.held!r:.100}, and it is {holder.state}: {holder.reason}",
                    where=holder.name,
                )
            return Choice(holder, "session")
        able = [one for one in self.workers if one.available and one not in without]
        if not able:
            raise self._none_able(without)
        if facts.program is None:
            return Choice(self._policy.choose(facts.prompt, able), "policy")
        key = f"program {facts.program}"
        same = self._holders.get(key)
        if same in able and not overloaded(self._config, same.active, min(one.active for one in able)):
            choice = Choice(same, "program")
        else:
            choice = Choice(self._policy.choose(facts.prompt, able), "policy")
        self._remember(key, choice.worker)
        return choice

    def holds(self, name: str, worker: Worker) -> None:
        """Only this worker has the session or response `name`."""
        self._remember(f"held {name}", worker)

    def dropped(self, name: str) -> None:
        """No worker has it any more."""
        self._holders.pop(f"held {name}", None)

    def forget(self, worker: Worker) -> None:
        """It failed: its cache, and its programs', may be lost. So are sessions, but the worker itself
        reports that when it is back."""
        self._policy.forget(worker.name)
        for key, holder in list(self._holders.items()):
            if holder is worker and key.startswith("program "):
                del self._holders[key]

    def become(self, workers: Sequence[Worker]) -> None:
        """Replace the workers. Those that are removed get no more requests, and finish what they have."""
        for removed in set(self.workers) - set(workers):
            removed.is_not_ready("was taken out of service")
            self.forget(removed)
        self.workers = tuple(workers)
        self.changed.set()

    def _none_able(self, without: Collection[Worker]) -> NoWorker:
        reasons = [
            f"{one.name} " + ("failed this request" if one in without else f"is {one.state}: {one.reason}")
            for one in self.workers
        ]
        return NoWorker(
            f"no {self.role} server can take the request: {'; '.join(reasons) or 'there is none'}"
        )

    def _remember(self, key: str, worker: Worker) -> None:
        self._holders[key] = worker
        self._holders.move_to_end(key)
        while len(self._holders) > MOST_REMEMBERED:
            self._holders.popitem(last=False)


def checked_url(url: str, role: str) -> str:
    """The URL without a slash at the end. Raises BadRequest."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        good = False
    if not good or parts.query or parts.fragment or parts.username is not None:
        raise BadRequest(
            f"{url!r:.200} is not the URL of a server", where=role, hint="http://127.0.0.1:30000"
        )
    return url.rstrip("/")


def host_of(url: str) -> str:
    """Of a URL; an IPv6 address in brackets."""
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host


def make_workers(values: Sequence[str], role: str, config: RouterConfig) -> list[Worker]:
    """The workers of an option: URLs, each followed by the port of its bootstrap server if that is known.
    Raises BadRequest."""
    workers: list[Worker] = []
    for value in values:
        if role == "prefill" and value.isdecimal() and workers and not workers[-1].bootstrap_fixed:
            if not 0 < int(value) < 65536:
                raise BadRequest(f"{value} is not a port", where=role)
            workers[-1].bootstrap_port, workers[-1].bootstrap_fixed = int(value), True
        else:
            workers.append(Worker(value, role, config))
    names = [one.name for one in workers]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadRequest(f"{twice} occurs twice", where=role)
    return workers

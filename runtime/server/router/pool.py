"""Pool: the workers of one role, and which of them gets a request.

A Worker carries what the router knows of it: requests in hand, whether it is ready, and its circuit breaker.
Nothing here speaks HTTP. All is used by one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from runtime.config.serving.router import RouterConfig
from runtime.protocol.errors import BadRequest, NoWorker
from runtime.server.router.policies import POLICIES
from runtime.server.router.prompt import Asked

BOOTSTRAP_PORT = 8998
"""Of a prefill server that does not tell it."""
MOST_REMEMBERED = 1 << 16
"""Sessions, kept responses and programs whose worker is remembered, at most."""


class Worker:
    """name: its URL, without a slash at the end. role: worker, prefill or decode."""

    def __init__(
        self, url: str, role: str, config: RouterConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self.role = checked_url(url, role), role
        self.active = 0
        self.bootstrap_host, self.bootstrap_port = host_of(self.name), BOOTSTRAP_PORT
        self.bootstrap_given = False
        """Whether the port was given; else the server is asked for it."""
        self._config, self._clock = config, clock
        self._ready: bool | None = None
        self._reason = "has not answered yet"
        self._failures = 0
        self._closed_until: float | None = None
        self._trial_began: float | None = None
        self._waiting: set[asyncio.Timeout] = set()
        self._silences = 0
        self.given_up = ""

    # -- may it have requests? -------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """available; trial: it failed, and one request will tell whether it works again; failed: it gets none
        until then; not_ready: so it says itself, or it says nothing."""
        if not self._ready:
            return "not_ready"
        if self._closed_until is None:
            return "available"
        now, trial = self._clock(), self._trial_began
        # A long request that has not failed for so long holds the others up no longer.
        waits = now < self._closed_until or (trial is not None and now - trial < self._config.cooldown_s)
        return "failed" if waits else "trial"

    @property
    def ready(self) -> bool:
        """As it was found when it was looked at last."""
        return bool(self._ready)

    @property
    def available(self) -> bool:
        return self.state in ("available", "trial")

    @property
    def reason(self) -> str:
        """Why it is not available."""
        return "" if self.state == "available" else self._reason

    # -- what becomes known of it ----------------------------------------------------------------------------

    def answered(self) -> None:
        """It answered a request as it should."""
        self._failures, self._closed_until = 0, None

    def failed(self, reason: str) -> bool:
        """It failed a request. True when it gets no more of them from now on."""
        self._failures += 1
        self._reason = reason
        if self._failures < self._config.failure_threshold and self._closed_until is None:
            return False
        self._closed_until = self._clock() + self._config.cooldown_s
        return True

    def is_ready(self) -> None:
        """It said so when it was looked at. Being ready says nothing of its failures with requests."""
        self._ready, self._silences = True, 0

    def is_not_ready(self, reason: str, *, silent: bool = False) -> bool:
        """It said so, or refused the connection; silent: or it did not answer in time, which a busy machine
        may not do either. True when it counts as dead from now on: then what waits for it fails."""
        self._silences = self._silences + 1 if silent else 0
        dead = self._silences == self._config.probe_failures
        if not silent or self._ready is None or dead:
            self._ready, self._reason = False, reason
        if dead:
            self.give_up(reason)
        return dead

    @contextlib.contextmanager
    def handling(self, limit: asyncio.Timeout) -> Iterator[None]:
        """A request is in its hands. `limit` strikes when it is given up."""
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
        """Fail what waits for it."""
        self.given_up = reason
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
    """`workers`, of one role, and a policy of its own. `changed` is set when they become others. Raises
    UnknownName for a policy that nobody knows."""

    def __init__(self, workers: Sequence[Worker], policy: str, config: RouterConfig) -> None:
        self.workers = tuple(workers)
        self.role = workers[0].role
        self.changed = asyncio.Event()
        self._policy = POLICIES.load(policy)(config)
        self._more, self._factor = config.balance_abs_threshold, config.balance_rel_threshold
        self._holders: OrderedDict[str, Worker] = OrderedDict()

    @property
    def available(self) -> bool:
        return any(one.available for one in self.workers)

    def choose(self, asked: Asked, without: Collection[Worker] = ()) -> Choice:
        """The worker for a request; `without`: those that failed it already. Raises NoWorker."""
        holder = self._holders.get(f"held {asked.held}")
        if asked.held is not None and holder is not None:
            return Choice(self._only(holder, asked.held, without), "session")
        able = [one for one in self.workers if one.available and one not in without]
        if not able:
            raise self._nobody(without)
        if asked.program is None:
            return Choice(self._policy.choose(asked.prompt, able), "policy")
        key = f"program {asked.program}"
        same = self._holders.get(key)
        if same in able and not self._overloaded(same.active, min(one.active for one in able)):
            found = Choice(same, "program")
        else:
            found = Choice(self._policy.choose(asked.prompt, able), "policy")
        self._remember(key, found.worker)
        return found

    def holds(self, what: str, worker: Worker) -> None:
        """Only this worker has that session, or that response."""
        self._remember(f"held {what}", worker)

    def dropped(self, what: str) -> None:
        """Nobody has it any more."""
        self._holders.pop(f"held {what}", None)

    def forget(self, worker: Worker) -> None:
        """It failed: its cache, and its programs', may be gone. Sessions are no more either, but are told so
        by the worker itself, when it is back."""
        self._policy.forget(worker.name)
        for key in [
            key for key, one in self._holders.items() if one is worker and key.startswith("program ")
        ]:
            del self._holders[key]

    def become(self, workers: Sequence[Worker]) -> None:
        """Others from now on. Those that are left out get no more requests, and finish what they have."""
        for gone in set(self.workers) - set(workers):
            gone.is_not_ready("was taken out of service")
            self.forget(gone)
        self.workers = tuple(workers)
        self.changed.set()

    def _only(self, holder: Worker, held: str, without: Collection[Worker]) -> Worker:
        if holder in without or not holder.available:
            raise NoWorker(
                f"only this worker has {held!r:.100}, and it is {holder.state}: {holder.reason}",
                where=holder.name,
            )
        return holder

    def _nobody(self, without: Collection[Worker]) -> NoWorker:
        told = [
            f"{one.name} " + ("failed this request" if one in without else f"is {one.state}: {one.reason}")
            for one in self.workers
        ]
        return NoWorker(f"no {self.role} server can take the request: {'; '.join(told) or 'there is none'}")

    def _remember(self, key: str, worker: Worker) -> None:
        self._holders[key] = worker
        self._holders.move_to_end(key)
        while len(self._holders) > MOST_REMEMBERED:
            self._holders.popitem(last=False)

    def _overloaded(self, active: int, least: int) -> bool:
        return active - least > self._more and active > self._factor * least


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


def make_workers(given: Sequence[str], role: str, config: RouterConfig) -> list[Worker]:
    """Of an option: URLs, each with the port of its bootstrap server behind it where it is told. Raises
    BadRequest."""
    made: list[Worker] = []
    for one in given:
        if role == "prefill" and one.isdecimal() and made and not made[-1].bootstrap_given:
            if not 0 < int(one) < 65536:
                raise BadRequest(f"{one} is not a port", where=role)
            made[-1].bootstrap_port, made[-1].bootstrap_given = int(one), True
        else:
            made.append(Worker(one, role, config))
    names = [one.name for one in made]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadRequest(f"{twice} occurs twice", where=role)
    return made

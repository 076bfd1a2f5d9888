"""KeyRing: the API keys that a server knows, each with a name and limits, and the admin key.

Keys come from the options, or from a file that is read again when the operator says so (SIGHUP). They are
compared as digests, in constant time, and never written anywhere.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge

from runtime.config.serving.server import ServerConfig
from runtime.processes.frontend.client import Client, flow_label
from runtime.protocol.errors import BadRequest, RateLimited

MINUTE_S = 60.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    running_requests: int | None = None

    def share(self, workers: int) -> Limits:
        """Of one worker among several, at least one of each."""
        return Limits(
            **{
                name: None if value is None else math.ceil(value / workers)
                for name, value in msgspec.structs.asdict(self).items()
                if name in Limits.__struct_fields__
            }
        )


class _Bucket:
    """It is full at `limit`, and fills up within a minute."""

    def __init__(self, limit: int, now: float) -> None:
        self.limit, self._level, self._at = limit, float(limit), now

    def level(self, now: float) -> float:
        self._level = min(float(self.limit), self._level + (now - self._at) * self.limit / MINUTE_S)
        self._at = now
        return self._level

    def take(self, count: int, now: float) -> None:
        self._level = self.level(now) - count

    def wait_s(self, least: float, now: float) -> float:
        """Seconds until `least` are in it."""
        return max(0.0, (least - self.level(now)) * MINUTE_S / self.limit)


class Quota(Client):
    """tell: called with what more was used: requests, tokens, refused (requests), running (up and down)."""

    def __init__(
        self,
        name: str,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str, int], None] = lambda what, count: None,
    ) -> None:
        super().__init__(f"key:{name}", is_tenant=True, flow=flow_label(f"key:{name}"))
        self.key_name = name
        self._clock, self._tell, self._lock = clock, tell, threading.Lock()
        self.requests = self.tokens = self.refused = self.running = 0
        self._buckets: dict[str, _Bucket] = {}
        self.become(limits)

    def become(self, limits: Limits) -> None:
        """Have these limits from now on; what was used counts, where a limit stays the same."""
        now = self._clock()
        wanted = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        with self._lock:
            self._most = limits.running_requests
            kept = self._buckets
            self._buckets = {
                name: kept[name] if name in kept and kept[name].limit == limit else _Bucket(limit, now)
                for name, limit in wanted.items()
                if limit is not None
            }

    def begin(self) -> None:
        with self._lock:
            self._check(self._clock())
            if "requests" in self._buckets:
                self._buckets["requests"].take(1, self._clock())
            self.running += 1
            self.requests += 1
        self._tell("requests", 1)
        self._tell("running", 1)

    def _check(self, now: float) -> None:
        for name, bucket in self._buckets.items():
            if bucket.level(now) < 1:
                self._refuse(f"{bucket.limit} {name} per minute", bucket.wait_s(1, now))
        if self._most is not None and self.running >= self._most:
            self._refuse(f"{self._most} requests at once", 1.0)

    def _refuse(self, what: str, wait_s: float) -> None:
        self.refused += 1
        self._tell("refused", 1)
        fault = RateLimited(f"the key {self.key_name!r} is limited to {what}", hint="try again later")
        fault.retry_after_s = wait_s
        raise fault

    def end(self) -> None:
        with self._lock:
            self.running -= 1
        self._tell("running", -1)

    def spend(self, tokens: int) -> None:
        with self._lock:
            self.tokens += tokens
            if "tokens" in self._buckets:
                self._buckets["tokens"].take(tokens, self._clock())
        self._tell("tokens", tokens)

    def headers(self) -> dict[str, str]:
        """In the words of OpenAI's: x-ratelimit-limit-requests, -remaining-, -reset-; likewise tokens."""
        headers: dict[str, Any] = {}
        with self._lock:
            now = self._clock()
            for name, bucket in self._buckets.items():
                headers[f"x-ratelimit-limit-{name}"] = bucket.limit
                headers[f"x-ratelimit-remaining-{name}"] = max(0, math.floor(bucket.level(now)))
                headers[f"x-ratelimit-reset-{name}"] = f"{bucket.wait_s(bucket.limit, now):.3f}s"
        return {name: str(value) for name, value in headers.items()}


log = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 << 20


class _Line(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file says of one name. sha256: the key's, in hexadecimal, instead of the key itself."""

    key: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Key:
    """client: who has it; None: whoever was told the server's one key."""

    digest: bytes
    client: Client | None = None
    is_admin: bool = False


class KeyRing:
    """Lets everybody in where the config has no key. `tell` may be replaced: it is called for what each name
    of the file uses. Raises BadRequest for a file that is wrong."""

    def __init__(self, config: ServerConfig) -> None:
        self._file, self._workers = config.api_keys_file, config.http_workers
        own, admin = config.api_key, config.admin_api_key
        self._own = [] if own is None else [Key(_digest(own.strip().encode()))]
        if admin is not None:
            self._own.append(
                Key(_digest(admin.strip().encode()), Client("admin", sees_all=True), is_admin=True)
            )
        self._secured = own is not None or self._file is not None
        self.tell: Callable[[str, str, int], None] = lambda name, what, count: None
        self._quotas: dict[str, Quota] = {}
        self._keys: list[Key] = []
        self._read()

    @property
    def secured(self) -> bool:
        """Whether requests need a key."""
        return self._secured

    @property
    def orders_need_admin(self) -> bool:
        """Orders need another key than requests: there is one, or there are many clients."""
        return self._file is not None or any(one.is_admin for one in self._own)

    @property
    def quotas(self) -> list[Quota]:
        return list(self._quotas.values())

    def find(self, secret: bytes) -> Key | None:
        """The key that this is. Looks at all of them, however early it finds it."""
        digest, found = _digest(secret), None
        for one in (*self._own, *self._keys):
            if hmac.compare_digest(one.digest, digest):
                found = one
        return found

    def _tell(self, name: str, what: str, count: int) -> None:
        self.tell(name, what, count)

    def reload(self) -> None:
        """Read the file again. Where that fails, the keys stay as they are, and the log says why."""
        try:
            self._read()
        except BadRequest as error:
            log.error("the API keys were not read again: %s", error)
        else:
            log.info("%d API keys were read from %s", len(self._keys), self._file)

    def _read(self) -> None:
        if self._file is None:
            return
        lines = _lines(self._file)
        quotas: dict[str, Quota] = {}
        for name, line in lines.items():
            limits = line.share(self._workers)
            quotas[name] = self._quotas.get(name) or Quota(name, limits, tell=partial(self._tell, name))
            quotas[name].become(limits)
        keys = [Key(_digest_of(line, name, self._file), quotas[name]) for name, line in lines.items()]
        if len({one.digest for one in (*keys, *self._own)}) < len(keys) + len(self._own):
            raise BadRequest("two names have the same key", where=self._file)
        self._quotas, self._keys = quotas, keys


class KeyMetrics:
    """Counters of what each name of the file has used: (name, what, how many more)."""

    def __init__(self, registry: CollectorRegistry, prefix: str, labels: Mapping[str, str]) -> None:
        names = (*labels, "key")
        self._values = tuple(labels.values())
        self._all: dict[str, Counter | Gauge] = {
            "requests": Counter(f"{prefix}key_requests", "Requests of an API key", names, registry=registry),
            "tokens": Counter(f"{prefix}key_tokens", "Tokens that it used", names, registry=registry),
            "refused": Counter(
                f"{prefix}key_refused", "Its requests beyond a limit", names, registry=registry
            ),
            "running": Gauge(
                f"{prefix}key_running", "Its requests in hand", names, registry=registry,
                multiprocess_mode="livesum",
            ),
        }  # fmt: skip

    def __call__(self, name: str, what: str, count: int) -> None:
        self._all[what].labels(*self._values, name).inc(count)


def _lines(file: str) -> dict[str, _Line]:
    path = Path(file).expanduser()
    try:
        with path.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
            if os.fstat(opened.fileno()).st_mode & stat.S_IROTH:
                log.warning("%s can be read by every user of this machine", file)
    except OSError as error:
        raise BadRequest(f"cannot be read: {error.strerror or error}", where=file) from error
    if len(data) > MAX_FILE_BYTES:
        raise BadRequest(f"is larger than {MAX_FILE_BYTES} bytes", where=file)
    try:
        found = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        # The library quotes the line, which may hold a key.
        place = getattr(error, "problem_mark", None)
        line = "" if place is None else f" (line {place.line + 1})"
        raise BadRequest(f"is not YAML{line}", where=file) from None
    if not isinstance(found, dict) or not found:
        raise BadRequest("must contain `name: {key: ..., requests_per_minute: ...}` lines", where=file)
    try:
        lines = msgspec.convert(found, dict[str, _Line], strict=True)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error), where=file) from None
    for name, one in lines.items():
        _check(name, one, file)
    return lines


def _check(name: str, line: _Line, file: str) -> None:
    if not name or len(name) > 100 or not name.isprintable():
        raise BadRequest(f"{name!r:.120} is not a valid name of a key: use 1 to 100 letters", where=file)
    for field in Limits.__struct_fields__:
        value = getattr(line, field)
        if value is not None and value < 1:
            raise BadRequest(f"{field} of {name} must be at least 1, got {value}", where=file)


def _digest_of(line: _Line, name: str, file: str) -> bytes:
    secrets = [one for one in (line.key, line.sha256) if one is not None]
    if len(secrets) != 1 or not secrets[0].strip():
        raise BadRequest(f"{name} needs either key or sha256", where=file)
    if line.sha256 is None:
        return _digest(secrets[0].strip().encode())
    try:
        digest = bytes.fromhex(line.sha256.strip())
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise BadRequest(f"sha256 of {name} must be 64 hexadecimal digits", where=file)
    return digest


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

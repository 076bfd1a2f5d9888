"""KeyRing: the API keys that a server accepts, each with a name and a quota, and the admin key.

Keys come from the options, or from a file that SIGHUP reloads. They are compared as digests, in constant
time, and never written. Each HTTP worker counts for itself, with its share of a key's limits. Requests count
when they begin, tokens when they are read or generated, so a key may exceed its tokens for a while.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml

from runtime.config.serving.server import ServerConfig
from runtime.processes.frontend.client import Client, flow_label
from runtime.protocol.errors import BadRequest, RateLimited

log = logging.getLogger(__name__)

MINUTE_S = 60.0
MAX_FILE_BYTES = 4 << 20


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    running_requests: int | None = None

    def share(self, workers: int) -> Limits:
        """Of one worker among several, at least one of each."""
        limits = {name: getattr(self, name) for name in Limits.__struct_fields__}
        return Limits(**{name: limit and math.ceil(limit / workers) for name, limit in limits.items()})


class _Bucket:
    """A token bucket: full at `limit`, it refills within a minute."""

    def __init__(self, limit: int, now: float) -> None:
        self.limit, self._level, self._at = limit, float(limit), now

    def level(self, now: float) -> float:
        self._level = min(float(self.limit), self._level + (now - self._at) * self.limit / MINUTE_S)
        self._at = now
        return self._level

    def take(self, count: int, now: float) -> None:
        self._level = self.level(now) - count

    def wait_s(self, least: float, now: float) -> float:
        """Seconds until its level is `least`."""
        return max(0.0, (least - self.level(now)) * MINUTE_S / self.limit)


class Quota(Client):
    """What one key may use, and has used. report: called with each further use: requests, tokens, refused
    (requests), running (up and down)."""

    def __init__(
        self,
        name: str,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[str, int], None] = lambda kind, count: None,
    ) -> None:
        super().__init__(f"key:{name}", is_tenant=True, flow=flow_label(f"key:{name}"))
        self.key_name = name
        self._clock, self._report, self._lock = clock, report, threading.Lock()
        self.requests = self.tokens = self.refused = self.running = 0
        self._buckets: dict[str, _Bucket] = {}
        self.become(limits)

    def become(self, limits: Limits) -> None:
        """Change the limits; what was used counts for a limit that stays the same."""
        now = self._clock()
        new = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        with self._lock:
            self._most = limits.running_requests
            old = self._buckets
            self._buckets = {
                name: old[name] if name in old and old[name].limit == limit else _Bucket(limit, now)
                for name, limit in new.items()
                if limit is not None
            }

    def begin(self) -> None:
        with self._lock:
            now = self._clock()
            for name, bucket in self._buckets.items():
                if bucket.level(now) < 1:
                    self._refuse(f"{bucket.limit} {name} per minute", bucket.wait_s(1, now))
            if self._most is not None and self.running >= self._most:
                self._refuse(f"{self._most} requests at once", 1.0)
            if "requests" in self._buckets:
                self._buckets["requests"].take(1, now)
            self.running += 1
            self.requests += 1
        self._report("requests", 1)
        self._report("running", 1)

    def _refuse(self, limit: str, wait_s: float) -> None:
        self.refused += 1
        self._report("refused", 1)
        fault = RateLimited(f"the key {self.key_name!r} is limited to {limit}", hint="try again later")
        fault.retry_after_s = wait_s
        raise fault

    def end(self) -> None:
        with self._lock:
            self.running -= 1
        self._report("running", -1)

    def spend(self, tokens: int) -> None:
        with self._lock:
            self.tokens += tokens
            if "tokens" in self._buckets:
                self._buckets["tokens"].take(tokens, self._clock())
        self._report("tokens", tokens)

    def headers(self) -> dict[str, str]:
        """OpenAI's: x-ratelimit-limit-requests, -remaining-, -reset-; likewise tokens."""
        headers: dict[str, str] = {}
        with self._lock:
            now = self._clock()
            for name, bucket in self._buckets.items():
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level(now))))
                headers[f"x-ratelimit-reset-{name}"] = f"{bucket.wait_s(bucket.limit, now):.3f}s"
        return headers


class _Line(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file's entry of one name. sha256: of the key, in hexadecimal, instead of the key itself."""

    key: str | None = None
    sha256: str | None = None


class Key(NamedTuple):
    """client: whose it is; None: of all who have the server's one key."""

    digest: bytes
    client: Client | None = None
    is_admin: bool = False


class KeyRing:
    """secured: whether requests need a key. `report` may be replaced: it is called with (name, kind, count)
    for each use of a key of the file. Raises BadRequest for a file that is wrong."""

    def __init__(self, config: ServerConfig) -> None:
        self._file, self._workers = config.api_keys_file, config.http_workers
        self._options: list[Key] = []
        if config.api_key is not None:
            self._options.append(Key(_digest(config.api_key)))
        if config.admin_api_key is not None:
            admin = Client("admin", sees_all=True)
            self._options.append(Key(_digest(config.admin_api_key), admin, is_admin=True))
        self.secured = config.api_key is not None or self._file is not None
        self.report: Callable[[str, str, int], None] = lambda name, kind, count: None
        self._quotas: dict[str, Quota] = {}
        self._keys: list[Key] = []
        self._read()

    @property
    def orders_need_admin(self) -> bool:
        """Whether orders need another key than requests: there is one, or there are many clients."""
        return self._file is not None or any(one.is_admin for one in self._options)

    @property
    def quotas(self) -> list[Quota]:
        return list(self._quotas.values())

    def find(self, secret: bytes) -> Key | None:
        """The key `secret`. Compares all keys, so that its time reveals nothing."""
        digest, match = hashlib.sha256(secret).digest(), None
        for one in (*self._options, *self._keys):
            if hmac.compare_digest(one.digest, digest):
                match = one
        return match

    def reload(self) -> None:
        """Read the file again. If that fails, the keys stay the same, and the log has the reason."""
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
            quotas[name] = self._quotas.get(name) or Quota(name, limits, report=partial(self._report, name))
            quotas[name].become(limits)
        keys = [Key(_digest_of(line, name, self._file), quotas[name]) for name, line in lines.items()]
        if len({one.digest for one in (*keys, *self._options)}) < len(keys) + len(self._options):
            raise BadRequest("two names have the same key", where=self._file)
        self._quotas, self._keys = quotas, keys

    def _report(self, name: str, kind: str, count: int) -> None:
        self.report(name, kind, count)


def _lines(file: str) -> dict[str, _Line]:
    try:
        with Path(file).expanduser().open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
            if os.fstat(opened.fileno()).st_mode & stat.S_IROTH:
                log.warning("%s can be read by every user of this machine", file)
    except OSError as error:
        raise BadRequest(f"cannot be read: {error.strerror or error}", where=file) from error
    if len(data) > MAX_FILE_BYTES:
        raise BadRequest(f"is larger than {MAX_FILE_BYTES} bytes", where=file)
    try:
        values = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        # The library quotes the line, which may contain a key.
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f" (line {mark.line + 1})"
        raise BadRequest(f"is not YAML{line}", where=file) from None
    if not isinstance(values, dict) or not values:
        raise BadRequest("must contain `name: {key: ..., requests_per_minute: ...}` lines", where=file)
    try:
        lines = msgspec.convert(values, dict[str, _Line], strict=True)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error), where=file) from None
    for name, one in lines.items():
        if not name or len(name) > 100 or not name.isprintable():
            raise BadRequest(f"{name!r:.120} is not a valid name of a key: use 1 to 100 letters", where=file)
        for field in Limits.__struct_fields__:
            value = getattr(one, field)
            if value is not None and value < 1:
                raise BadRequest(f"{field} of {name} must be at least 1, got {value}", where=file)
    return lines


def _digest_of(line: _Line, name: str, file: str) -> bytes:
    secrets = [one for one in (line.key, line.sha256) if one is not None]
    if len(secrets) != 1 or not secrets[0].strip():
        raise BadRequest(f"{name} needs either key or sha256", where=file)
    if line.sha256 is None:
        return _digest(secrets[0])
    try:
        digest = bytes.fromhex(line.sha256.strip())
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise BadRequest(f"sha256 of {name} must be 64 hexadecimal digits", where=file)
    return digest


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.strip().encode()).digest()

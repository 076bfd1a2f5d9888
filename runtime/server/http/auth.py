"""Who may ask: whoever has an API key, sent as a bearer token, and no page of another origin in somebody's
browser, nor one whose own name was made to lead here (DNS rebinding). Who may give orders: see KeyCheck.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers

from runtime import viewer
from runtime.config.serving.server import ServerConfig
from runtime.protocol.errors import Forbidden, ForeignOrigin, Unauthorized, WrongMediaType
from runtime.server.http.body import is_json
from runtime.server.http.keys import Key, KeyRing

OPEN_PATHS = frozenset({"/health", "/health_generate", "/ready"})
"""Asked by load balancers, which hold no key."""
_OF_VIEWER = ("sources.json", *viewer.NAMES)
PAGE_PATHS = frozenset({"/", "/docs", "/viewer", *(f"/viewer/{name}" for name in _OF_VIEWER)})
"""Pages for browsers, which send no key by themselves. They are the same for all and tell nothing of the
model; a key is needed for what they show."""


class KeyCheck:
    """Lets everybody in where the config has no key.

    orders: paths that change the server for everybody. Where there is an admin key, or many clients, they
    take that key alone; else any that requests need; else they must be JSON, even with no body: no page can
    send that without asking first (a CORS preflight, which is not granted)."""

    def __init__(self, config: ServerConfig, ring: KeyRing, orders: Collection[str] = ()) -> None:
        self._ring, self._orders = ring, frozenset(orders)
        self._open = OPEN_PATHS | PAGE_PATHS | (frozenset() if config.metrics_need_key else {"/metrics"})
        self._at_home = _is_local(config.host)

    def check(self, method: str, path: str, headers: Headers) -> Key | None:
        """The key that was sent. Raises Unauthorized unless the request may pass. `x-api-key` is how
        Anthropic's clients send it."""
        if path in self._open or method == "OPTIONS":
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        secret = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Headers are bytes, shown as Latin-1.
        found = self._ring.find(secret.encode("latin-1")) if secret else None
        for_admin = self._ring.orders_need_admin and self._is_order(method, path)
        if found is None and (self._ring.secured or for_admin):
            if secret:
                raise Unauthorized("the API key is invalid", where="authorization")
            what = "the admin key" if for_admin else "an API key"
            hint = "send Authorization: Bearer <key>"
            raise Unauthorized(f"{what} is required", where="authorization", hint=hint)
        return found

    def sees_all(self, key: Key | None) -> bool:
        """Whether whoever has `key` may be shown what others asked: who may give orders; without any keys,
        who is on this machine."""
        if self._ring.orders_need_admin:
            return key is not None and key.is_admin
        return key is not None or self._at_home

    def check_order(self, method: str, path: str, headers: Headers, key: Key | None) -> None:
        """Raise Forbidden or WrongMediaType unless whoever has `key` may give this order, if it is one."""
        if not self._is_order(method, path):
            return
        if self._ring.orders_need_admin and (key is None or not key.is_admin):
            raise Forbidden(
                "only the admin key is allowed to do this",
                where=path,
                hint="start the server with --admin-api-key",
            )
        if key is None and not is_json(headers.get("content-type")):
            raise WrongMediaType(
                "this changes the server: POST with the header Content-Type: application/json is required",
                where="content-type",
                hint="or start the server with --admin-api-key and send that key",
            )

    def _is_order(self, method: str, path: str) -> bool:
        return path in self._orders and method not in SAFE_METHODS


SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""They change nothing, and what they give a browser shows to pages of allowed origins only."""
_PORTS = {"http": 80, "https": 443}


class OriginCheck:
    """Turns away what a browser sends for a page of another origin, unless it is one of `cors_origins`. A
    browser says so in headers that pages cannot set; other clients send none of them."""

    def __init__(self, config: ServerConfig) -> None:
        self._allowed = frozenset(origin.rstrip("/").lower() for origin in config.cors_origins)

    def check(self, method: str, headers: Headers) -> None:
        """Raise ForeignOrigin unless the request may pass."""
        if method in SAFE_METHODS or "*" in self._allowed:
            return
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and origin.lower() in self._allowed:
            return
        if site is not None:
            foreign = site.lower() not in ("same-origin", "none")
        else:
            foreign = origin is not None and not _same_place(origin, headers.get("host", ""))
        if foreign:
            raise ForeignOrigin(
                f"web pages of {origin or 'another origin'!r:.200} are not allowed to call this server",
                where="origin",
                hint="to allow it, start the server with its origin in cors_origins (--allow-origin)",
            )


class HostCheck:
    """Turns away requests that name the server by another host than those it is known by. An address is what
    the client connected to; a name may be a page's own, which its DNS leads here. secured: every request
    needs a key, which no page has."""

    def __init__(self, config: ServerConfig, secured: bool) -> None:
        names = [config.host, *config.allowed_hosts, *(urlsplit(one).hostname for one in config.cors_origins)]
        self._names = frozenset(name.lower().rstrip(".") for name in names if name)
        strict = config.allowed_hosts or (_is_local(config.host) and not secured)
        self._any = not strict or "*" in config.allowed_hosts + config.cors_origins

    def check(self, path: str, headers: Headers) -> None:
        """Raise ForeignOrigin unless the request may pass."""
        host = headers.get("host")
        if self._any or not host or path in OPEN_PATHS:
            return
        try:
            full = urlsplit(f"http://{host}").hostname or "."
        except ValueError:
            full = "."
        name = full.rstrip(".")
        # Without a dot it is a name of the local network, which no page has.
        if "." in full and name not in self._names and not _is_local(name) and not _is_address(name):
            raise ForeignOrigin(
                f"the host name {host!r:.200} is not allowed",
                where="host",
                hint="use its IP address, or start it with this name in allowed_hosts (--allow-host)",
            )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_local(host: str) -> bool:
    """Whether it is this machine alone."""
    name = host.lower().strip("[]")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    return _is_address(name) and ipaddress.ip_address(name.partition("%")[0]).is_loopback


def _same_place(origin: str, host: str) -> bool:
    """Whether a page of `origin` was loaded from the server that its request names as `host`."""
    try:
        page = urlsplit(origin.lower())
        here = urlsplit(f"{page.scheme}://{host.lower()}")
        return page.hostname is not None and _place(page) == _place(here)
    except ValueError:  # a port that is no number
        return False


def _place(url: SplitResult) -> tuple[str | None, int | None]:
    return url.hostname, url.port or _PORTS.get(url.scheme)

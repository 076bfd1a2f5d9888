"""Which requests are accepted: those with an API key, and not those of web pages of other origins, or of
pages whose host name was made to point here (DNS rebinding).
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
"""For load balancers, which have no key."""
_OF_VIEWER = ("sources.json", *viewer.NAMES)
PAGE_PATHS = frozenset({"/", "/docs", "/viewer", *(f"/viewer/{name}" for name in _OF_VIEWER)})
"""Pages for browsers, which send no key by themselves. They are the same for all clients; what they show
needs a key."""


SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""They change nothing, and a browser shows their answers only to pages of allowed origins."""
_PORTS = {"http": 80, "https": 443}


class Access:
    """Accepts every request if the config has no key, except those of other web pages: browsers report these
    in headers that pages cannot set, and other clients do not send.

    orders: paths that change the server for all clients. With an admin key, or many clients, they need the
    admin key; else the key of requests; else they must be JSON, even without a body: web pages cannot send
    that without a CORS preflight, which is refused."""

    def __init__(self, config: ServerConfig, ring: KeyRing, orders: Collection[str] = ()) -> None:
        self._ring, self._orders = ring, frozenset(orders)
        self._open = OPEN_PATHS | PAGE_PATHS | (frozenset() if config.metrics_need_key else {"/metrics"})
        self._local = _is_local(config.host)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in config.cors_origins)
        names = [config.host, *config.allowed_hosts, *(urlsplit(one).hostname for one in config.cors_origins)]
        self._hosts = frozenset(name.lower().rstrip(".") for name in names if name)
        # With keys a page's host name does no harm: no page has a key.
        strict = config.allowed_hosts or (self._local and not ring.secured)
        self._any_host = not strict or "*" in config.allowed_hosts + config.cors_origins

    def check(self, method: str, path: str, headers: Headers) -> Key | None:
        """The key that was sent. Raises ForeignOrigin, Unauthorized; Forbidden or WrongMediaType for an order
        that this client may not give."""
        self._check_host(path, headers)
        key = self._key(method, path, headers)
        self._check_origin(method, headers)
        if self._is_order(method, path):
            self._check_order(path, headers, key)
        return key

    def sees_all(self, key: Key | None) -> bool:
        """Whether a client with `key` may see the requests of others: if it may give orders; without any
        keys, if it is on this machine."""
        if self._ring.orders_need_admin:
            return key is not None and key.is_admin
        return key is not None or self._local

    def _is_order(self, method: str, path: str) -> bool:
        return path in self._orders and method not in SAFE_METHODS

    def _key(self, method: str, path: str, headers: Headers) -> Key | None:
        """Sent as a bearer token or, by Anthropic's clients, as `x-api-key`."""
        if path in self._open or method == "OPTIONS":
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        secret = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Headers are bytes, shown as Latin-1.
        key = self._ring.find(secret.encode("latin-1")) if secret else None
        for_admin = self._ring.orders_need_admin and self._is_order(method, path)
        if key is None and (self._ring.secured or for_admin):
            if secret:
                raise Unauthorized("the API key is invalid", where="authorization")
            what = "the admin key" if for_admin else "an API key"
            hint = "send Authorization: Bearer <key>"
            raise Unauthorized(f"{what} is required", where="authorization", hint=hint)
        return key

    def _check_order(self, path: str, headers: Headers, key: Key | None) -> None:
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

    def _check_origin(self, method: str, headers: Headers) -> None:
        """Refuses requests of a browser for a page of another origin that is not in `cors_origins`."""
        if method in SAFE_METHODS or "*" in self._origins:
            return
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and origin.lower() in self._origins:
            return
        if site is not None:
            foreign = site.lower() not in ("same-origin", "none")
        else:
            foreign = origin is not None and not _same_server(origin, headers.get("host", ""))
        if foreign:
            raise ForeignOrigin(
                f"web pages of {origin or 'another origin'!r:.200} are not allowed to call this server",
                where="origin",
                hint="to allow it, start the server with its origin in cors_origins (--allow-origin)",
            )

    def _check_host(self, path: str, headers: Headers) -> None:
        """Refuses requests that name the server by an unknown host name, which may be a page's whose DNS
        points here. Addresses are accepted."""
        host = headers.get("host")
        if self._any_host or not host or path in OPEN_PATHS:
            return
        try:
            full = urlsplit(f"http://{host}").hostname or "."
        except ValueError:
            full = "."
        name = full.rstrip(".")
        # A name without a dot is one of the local network, which no page has.
        if "." in full and name not in self._hosts and not _is_local(name) and not _is_address(name):
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
    """Whether it is a loopback address or name."""
    name = host.lower().strip("[]")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    return _is_address(name) and ipaddress.ip_address(name.partition("%")[0]).is_loopback


def _same_server(origin: str, host: str) -> bool:
    """Whether a page of `origin` was loaded from the server `host`."""
    try:
        page = urlsplit(origin.lower())
        here = urlsplit(f"{page.scheme}://{host.lower()}")
        return page.hostname is not None and _address(page) == _address(here)
    except ValueError:  # a port that is no number
        return False


def _address(url: SplitResult) -> tuple[str | None, int | None]:
    return url.hostname, url.port or _PORTS.get(url.scheme)

"""Fetches untrusted URLs: an image of a request, a page that a search found.

This process may reach hosts that the URL's author may not. So a host is resolved once per request, redirects
included; only public addresses are connected to, unless the caller trusts the host; and the connection uses
the address that was checked, so that a name cannot change its meaning in between (DNS rebinding). Proxies of
the environment are not used: they would resolve the name again.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Address, IPv6Address

import httpx

MOST_REDIRECTS = 4
CONNECT_S = 5.0
_EMBEDDED = (
    # (prefix, bits below the embedded IPv4 address). Connecting there reaches the embedded address.
    (ipaddress.IPv6Network("::/96"), 0),  # IPv4-compatible
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),  # IPv4-mapped
    (ipaddress.IPv6Network("::ffff:0:0:0/96"), 0),  # IPv4-translated
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),  # NAT64
    (ipaddress.IPv6Network("2002::/16"), 80),  # 6to4
)
# Local NAT64, Teredo, site-local: newer versions of ipaddress know the first.
_NEVER = tuple(map(ipaddress.IPv6Network, ("64:ff9b:1::/48", "2001::/32", "fec0::/10")))
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)


class NotFetched(Exception):
    """The reason, as the end of a sentence that begins with the URL; it names no address."""


@dataclass(frozen=True)
class Fetched:
    """body: at most `most_bytes` bytes; is_cut: there are more. kind: the content type."""

    status: int
    kind: str
    body: bytes
    is_cut: bool


def is_public(address: str) -> bool:
    """Whether an IP address, as text, is public. An address with an embedded IPv4 address (mapped, 6to4,
    NAT64, ISATAP, ...) is public if that one is. Raises ValueError."""
    one = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(one, IPv6Address):
        number = int(one)
        for prefix, shift in _EMBEDDED:
            if one in prefix:
                return is_public(str(IPv4Address(number >> shift & 0xFFFF_FFFF)))
        if any(one in prefix for prefix in _NEVER):
            return False
        if number >> 32 & 0xFFFF_FFFF in _ISATAP and not is_public(str(IPv4Address(number & 0xFFFF_FFFF))):
            return False
    return one.is_global and not one.is_multicast


async def fetch(
    url: str, *, accept: str, most_bytes: int, timeout_s: float, trusts: Callable[[httpx.URL], bool]
) -> Fetched:
    """GET `url` within `timeout_s`, redirects included. trusts: called for every URL on the way; returns
    whether its host may have an address that is not public, and may raise. Raises NotFetched."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _follow(url, accept, most_bytes, trusts)
    except TimeoutError:
        raise NotFetched(f"was not fetched within {timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NotFetched(f"cannot be fetched: {type(error).__name__}") from error


async def _follow(url: str, accept: str, most_bytes: int, trusts: Callable[[httpx.URL], bool]) -> Fetched:
    headers = {"accept": accept, "accept-encoding": "identity"}  # no decompression bombs
    limits = httpx.Timeout(None, connect=CONNECT_S)  # fetch() limits the whole
    async with httpx.AsyncClient(transport=_Checked(trusts), trust_env=False, timeout=limits) as client:
        plain = httpx.URL(url).copy_with(username="", password="")
        request = client.build_request("GET", plain, headers=headers)
        for _ in range(MOST_REDIRECTS + 1):
            response = await client.send(request, stream=True)
            try:
                if response.next_request is None:
                    return await _read(response, most_bytes)
                request = response.next_request
            finally:
                await response.aclose()
    raise NotFetched("has a host that redirects too many times")


async def _read(response: httpx.Response, most_bytes: int) -> Fetched:
    if response.headers.get("content-encoding", "identity") != "identity":
        raise NotFetched("has a host that compresses its answer, which was not asked for")
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > most_bytes:
            break
    kind = response.headers.get("content-type", "")
    return Fetched(response.status_code, kind, bytes(body[:most_bytes]), len(body) > most_bytes)


class _Checked(httpx.AsyncBaseTransport):
    """Connects to the addresses that were checked, with the host name of the URL."""

    def __init__(self, trusts: Callable[[httpx.URL], bool]) -> None:
        self._trusts = trusts
        # A connection serves one host only: two hosts at one address may have different certificates.
        alone = httpx.Limits(max_keepalive_connections=0)
        self._plain = httpx.AsyncHTTPTransport(verify=_certificates(), limits=alone)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        if url.scheme not in ("http", "https") or not url.host:
            raise NotFetched("is not an http(s) URL")
        name = url.raw_host.decode("ascii")
        port = url.port or (443 if url.scheme == "https" else 80)
        addresses = await _addresses(name, port, self._trusts(url))
        for address in addresses[:-1]:
            try:
                return await self._send(request, address, name)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue  # the next one may answer
        return await self._send(request, addresses[-1], name)

    async def _send(self, request: httpx.Request, address: str, name: str) -> httpx.Response:
        pinned = httpx.Request(
            request.method,
            request.url.copy_with(host=address),
            headers=request.headers,  # with the URL's host
            extensions={**request.extensions, "sni_hostname": name},
        )
        return await self._plain.handle_async_request(pinned)

    async def aclose(self) -> None:
        await self._plain.aclose()


async def _addresses(name: str, port: int, is_trusted: bool) -> list[str]:
    """The addresses of the host, in the order to try them. Raises NotFetched."""
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise NotFetched("has a host that cannot be resolved") from None
    addresses = list(dict.fromkeys(str(one[4][0]) for one in infos))
    if not is_trusted and not all(map(is_public, addresses)):
        raise NotFetched("has a host without a public address")
    return addresses


@cache
def _certificates() -> ssl.SSLContext:
    """Cached because loading them is slow."""
    return httpx.create_ssl_context()

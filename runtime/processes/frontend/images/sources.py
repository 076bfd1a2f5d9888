"""Where a request says that a picture is -> its bytes: data in the request itself, and, where the engine's
options allow it, addresses and files. Nothing here looks into them.

An address is the user's word, and this process may reach what the user may not. So only hosts that were
allowed are asked; a name is resolved once, and the address that was looked at is the one that is connected
to; with * none but public addresses are; a redirect is another address, and proxies of the environment are
not used.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import httpx

from runtime.config.parts.images import ImageOptions
from runtime.protocol.errors import BadRequest

_DATA = re.compile(r"data:[\w.+-]*/?[\w.+-]*(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)
_REDIRECTS = 3
_SHAPES = 'an image is "data:image/png;base64,...", plain base64, http(s)://... or file:///...'


class Sources:
    """Thread safe. read() blocks, for media_timeout_s at most."""

    def __init__(self, options: ImageOptions) -> None:
        self._most, self._timeout_s = options.max_image_bytes, options.media_timeout_s
        self._hosts = {host.lower() for host in options.allowed_media_domains}
        folder = options.allowed_local_media_path
        self._folder = Path(folder).expanduser().resolve() if folder else None

    def read(self, url: str, where: str) -> bytes:
        """Raises BadRequest: not allowed, not there, too large, not in time."""
        scheme = url[:8].partition(":")[0].lower()
        if scheme in ("http", "https"):
            return self._fetched(url, where)
        if scheme == "file":
            return self._file(url, where)
        if scheme == "data":
            found = _DATA.match(url)
            if found is None:
                raise BadRequest("is not a data URL in base64", where=where, hint=_SHAPES)
            return self._decoded(url[found.end() :], where)
        return self._decoded(url, where)

    def _decoded(self, text: str, where: str) -> bytes:
        if len(text) > self._most * 4 // 3 + 4:
            raise self._too_large(where)
        try:
            return base64.b64decode(text.encode("ascii"), validate=True)
        except (binascii.Error, UnicodeEncodeError):
            raise BadRequest("is not valid base64", where=where, hint=_SHAPES) from None

    def _file(self, url: str, where: str) -> bytes:
        parts = urlsplit(url)
        if self._folder is None or parts.netloc not in ("", "localhost"):
            raise BadRequest(
                "this engine does not read files for requests",
                where=where,
                hint="send the image as a data URL, or start it with --allowed-local-media-path",
            )
        wrong = BadRequest("is not an image that requests may name", where=where)
        try:
            # Links are followed before it is looked where that leads.
            path = Path(unquote(parts.path)).resolve(strict=True)
            if not path.is_relative_to(self._folder):
                raise wrong
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (OSError, ValueError):
            raise wrong from None
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise wrong
        with open(handle, "rb") as file:
            data = file.read(self._most + 1)
        if len(data) > self._most:
            raise self._too_large(where)
        return data

    def _fetched(self, url: str, where: str) -> bytes:
        """In a thread of its own, with an event loop of its own: so there is one deadline for all of it, and
        the caller's thread may have a loop that runs."""
        with ThreadPoolExecutor(1, "fetch") as thread:
            try:
                return thread.submit(_within, self._timeout_s, self._fetch(url, where)).result()
            except TimeoutError:
                raise BadRequest(
                    f"the image was not fetched within {self._timeout_s:g} s", where=where
                ) from None
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise BadRequest(
                    f"the image cannot be fetched: {type(error).__name__}", where=where
                ) from error

    async def _fetch(self, url: str, where: str) -> bytes:
        async with httpx.AsyncClient(trust_env=False, timeout=self._timeout_s) as client:
            for _ in range(_REDIRECTS + 1):
                request = await self._request(client, url, where)
                response = await client.send(request, stream=True)
                try:
                    if response.is_redirect and "location" in response.headers:
                        url = urljoin(url, response.headers["location"])
                        continue
                    if response.status_code != 200:
                        raise BadRequest(f"the image's host answered {response.status_code}", where=where)
                    data = bytearray()
                    async for piece in response.aiter_raw():
                        data += piece
                        if len(data) > self._most:
                            raise self._too_large(where)
                    return bytes(data)
                finally:
                    await response.aclose()
        raise BadRequest("the image's host redirects too many times", where=where)

    async def _request(self, client: httpx.AsyncClient, url: str, where: str) -> httpx.Request:
        """To the address that was looked at, as the host that was named."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise BadRequest("is not a URL", where=where) from None
        if parts.scheme not in ("http", "https") or not host:
            raise BadRequest("is not an http(s) URL", where=where)
        address = await self._address(host, port, where)
        shown = f"[{address}]" if ":" in address else address
        target = httpx.URL(url).copy_with(host=shown, username="", password="")
        headers = {
            "host": parts.netloc.rpartition("@")[2],
            "accept": "image/*",
            "accept-encoding": "identity",
        }
        return client.build_request("GET", target, headers=headers, extensions={"sni_hostname": host})

    async def _address(self, host: str, port: int, where: str) -> str:
        """Where `host` is. With * it must be a public address; a host that was allowed by name may be
        anywhere."""
        named = host.lower() in self._hosts
        if not named and "*" not in self._hosts:
            raise BadRequest(
                "this engine does not fetch images from there",
                where=where,
                hint="send the image as a data URL, or start it with --allowed-media-domains",
            )
        try:
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise BadRequest("the image's host cannot be resolved", where=where) from None
        address = str(found[0][4][0])
        if not named and not _public(address):
            raise BadRequest("the image's host has no public address", where=where)
        return address

    def _too_large(self, where: str) -> BadRequest:
        return BadRequest(f"the image has more than {self._most} bytes", where=where, hint="make it smaller")


def _within(seconds: float, work: Coroutine[Any, Any, bytes]) -> bytes:
    """Raises TimeoutError. A name that is still being looked up then is not waited for."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(asyncio.wait_for(work, seconds))
    finally:
        loop.close()


def _public(address: str) -> bool:
    one = ipaddress.ip_address(address.partition("%")[0])
    inner = getattr(one, "ipv4_mapped", None) or getattr(one, "sixtofour", None)
    if inner is not None:
        return inner.is_global and not inner.is_multicast
    return one.is_global and not one.is_multicast and one not in _NAT64


_NAT64 = ipaddress.ip_network("64:ff9b::/96")

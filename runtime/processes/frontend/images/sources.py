"""Where a request says that a picture is -> its bytes: data in the request itself, and, where the engine's
options allow it, addresses and files. Nothing here looks into them.

An address is the user's word, and this process may reach what the user may not. So only hosts that were
allowed are asked, and with * only public addresses (runtime.tools.fetch).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import re
import stat
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx

from runtime.config.parts.vision import ImageOptions
from runtime.protocol.errors import BadRequest
from runtime.tools.fetch import Fetched, NotFetched, fetch

_DATA = re.compile(r"data:[\w.+-]*/?[\w.+-]*(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)
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
        """In a thread of its own, with an event loop of its own: the caller's thread may have one that
        runs."""

        def trusts(target: httpx.URL) -> bool:
            """A host that was allowed by name may be anywhere; with * it must have a public address."""
            if {target.host, target.raw_host.decode()} & self._hosts:
                return True
            if "*" in self._hosts or target.scheme not in ("http", "https"):
                return False
            raise BadRequest(
                "this engine does not fetch images from there",
                where=where,
                hint="send the image as a data URL, or start it with --allowed-media-domains",
            )

        work = fetch(url, accept="image/*", most_bytes=self._most, timeout_s=self._timeout_s, trusts=trusts)
        with ThreadPoolExecutor(1, "fetch") as thread:
            try:
                found = thread.submit(_run, work).result()
            except NotFetched as error:
                raise BadRequest(f"the image {error}", where=where) from error
        if found.status != 200:
            raise BadRequest(f"the image's host answered {found.status}", where=where)
        if found.is_cut:
            raise self._too_large(where)
        return found.body

    def _too_large(self, where: str) -> BadRequest:
        return BadRequest(f"the image has more than {self._most} bytes", where=where, hint="make it smaller")


def _run(work: Coroutine[Any, Any, Fetched]) -> Fetched:
    """A name that is still being looked up when the time is over is not waited for."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()

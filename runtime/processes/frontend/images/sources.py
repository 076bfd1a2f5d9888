"""A picture's URL in a request -> its bytes: data in the URL itself and, if options allow it, addresses and
files. Only allowed hosts are asked, and with * only public addresses (runtime.tools.fetch).
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

    def read(self, url: str, field: str) -> bytes:
        """Raises BadRequest: not allowed, not there, too large, not in time."""
        scheme = url[:8].partition(":")[0].lower()
        if scheme in ("http", "https"):
            return self._fetched(url, field)
        if scheme == "file":
            return self._file(url, field)
        if scheme == "data":
            head = _DATA.match(url)
            if head is None:
                raise BadRequest("is not a data URL in base64", where=field, hint=_SHAPES)
            return self._decoded(url[head.end() :], field)
        return self._decoded(url, field)

    def _decoded(self, text: str, field: str) -> bytes:
        if len(text) > self._most * 4 // 3 + 4:
            raise self._too_large(field)
        try:
            return base64.b64decode(text.encode("ascii"), validate=True)
        except (binascii.Error, UnicodeEncodeError):
            raise BadRequest("is not valid base64", where=field, hint=_SHAPES) from None

    def _file(self, url: str, field: str) -> bytes:
        parts = urlsplit(url)
        if self._folder is None or parts.netloc not in ("", "localhost"):
            raise BadRequest(
                "this engine does not read files for requests",
                where=field,
                hint="send the image as a data URL, or start it with --allowed-local-media-path",
            )
        wrong = BadRequest("is not an image that requests may name", where=field)
        try:
            # Links are resolved before the check.
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
            raise self._too_large(field)
        return data

    def _fetched(self, url: str, field: str) -> bytes:
        """In another thread with an event loop: the caller's thread may have one that runs."""

        def trusts(target: httpx.URL) -> bool:
            """A host that is allowed by name may have any address; with * it must be a public one."""
            if {target.host, target.raw_host.decode()} & self._hosts:
                return True
            if "*" in self._hosts or target.scheme not in ("http", "https"):
                return False
            raise BadRequest(
                "this engine does not fetch images from there",
                where=field,
                hint="send the image as a data URL, or start it with --allowed-media-domains",
            )

        work = fetch(url, accept="image/*", most_bytes=self._most, timeout_s=self._timeout_s, trusts=trusts)
        with ThreadPoolExecutor(1, "fetch") as thread:
            try:
                fetched = thread.submit(_run, work).result()
            except NotFetched as error:
                raise BadRequest(f"the image {error}", where=field) from error
        if fetched.status != 200:
            raise BadRequest(f"the image's host answered {fetched.status}", where=field)
        if fetched.is_cut:
            raise self._too_large(field)
        return fetched.body

    def _too_large(self, field: str) -> BadRequest:
        return BadRequest(f"the image has more than {self._most} bytes", where=field, hint="make it smaller")


def _run(work: Coroutine[Any, Any, Fetched]) -> Fetched:
    """Like asyncio.run(), but does not wait for the thread of a name lookup that has timed out."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()

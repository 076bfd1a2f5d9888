"""A stream of server-sent events that is passed on as it comes, in whole events.

So an answer that breaks off can be ended by an event that says so, and one that has only had comments can be
begun again by another worker.
"""

from __future__ import annotations

import re

MOST_HELD = 1 << 20
"""Bytes of an event whose end has not come. A longer one is passed on in pieces."""
_COMMENTS = re.compile(rb"(?:(?::[^\r\n]*)?\r?\n)*")


class WholeEvents:
    """Feed it the pieces of one worker's stream."""

    def __init__(self) -> None:
        self._held = b""
        self.begun = False
        """Whether there was an event: anything besides comments."""
        self.torn = False
        """Whether the client has a part of an event whose rest is missing."""

    def feed(self, piece: bytes) -> bytes:
        """What can be passed on now, b"" for nothing."""
        data = self._held + piece if self._held else piece
        if data.endswith(b"\n\n"):  # the usual case: the server writes whole events
            whole, self._held = data, b""
        elif self.torn or len(data) > MOST_HELD:
            whole, self._held = data, b""
            self.begun = True
        else:
            end = data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
            whole, self._held = data[:end], data[end:]
        if whole:
            self.torn = not whole.endswith(b"\n\n")
            if not self.begun:
                self.begun = not _COMMENTS.fullmatch(whole)
        return whole

    def rest(self) -> bytes:
        """What is left when the stream has ended as it should."""
        held, self._held = self._held, b""
        return held

"""Which content a Jinja chat template reads, by role: a text ("string") or a list of parts ("openai").

A short conversation is rendered with a mark as a text and again with the mark in a part, and what is printed
decides. The source is read only where neither prints the mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jinja2 import nodes

from runtime.formats.chat.render import TemplateLimit
from runtime.formats.chat.sandbox import Sandbox
from runtime.protocol.errors import TemplateError

ContentFormat = Literal["openai", "string"]
Messages = Sequence[Mapping[str, Any]]

_MARK = "Is this printed?"
_QUOTE = r"""(?:\\?["']|&#3[49];|&quot;)"""
_QUOTED = re.compile(_QUOTE + re.escape(_MARK) + _QUOTE)
"""As in a part that is printed as it is, as Python's or as JSON."""
_MEDIA = re.compile(r"(?<![^\W\d_])(?:(?:image|audio|video)s?|vision)(?![^\W\d_A-Z])")
"""The words as such or as a part of a name (image_url, <|vision_start|>, imageUrl), not within another word
(revision, imagery)."""
_ROLES = frozenset({"user", "system", "developer", "assistant", "tool"})
"""Others are taken to be read as the user's."""
_CALL_ID = "a1b2c3d4e"  # some templates want nine letters and digits


class Reading(NamedTuple):
    """format: "openai" where a list of parts is printed as its texts. text: whether a text is printed too."""

    format: ContentFormat
    text: bool = True


class ContentFormats:
    """One template. render: prints a conversation. Raises TemplateError."""

    def __init__(self, source: str, render: Callable[[Messages], str]) -> None:
        self._source, self._render = source, render
        self._known: dict[tuple[str, frozenset[str]], Reading] = {}
        self._fails = False

    def of(self, role: str, media: frozenset[str] = frozenset()) -> Reading:
        """How the content of a role's messages is read. media: of "image", "video" and "audio" those that it
        holds besides text."""
        key = role if role in _ROLES else "user", media
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._probed(*key)
        return found

    def _probed(self, role: str, media: frozenset[str]) -> Reading:
        text = self._printed(role, _MARK)
        parts = self._printed(role, [*({"type": one} for one in sorted(media)), _part(_MARK)])
        if parts is not None and (parts == text or not _QUOTED.search(parts)):
            return Reading("openai", text is not None)
        if text is not None:
            return Reading("string")
        return self._from_source() if role == "user" else self.of("user", media)

    def _printed(self, role: str, content: Any) -> str | None:
        """A conversation with this content; None where the content is not in it."""
        asked: Any = "?" if role == "user" or self.of("user").text else [_part("?")]
        for talk in _conversations({"role": role, "content": content}, {"role": "user", "content": asked}):
            try:
                printed = self._render(talk)
            except TemplateError as error:
                self._fails = True
                if isinstance(error, TemplateLimit):
                    return None
                continue
            if _MARK in printed:
                return printed
        return None

    def _from_source(self) -> Reading:
        """By a word for media; where the template cannot be rendered, also by a loop over a content."""
        if _MEDIA.search(self._source):
            return Reading("openai")
        try:
            loops = Sandbox().parse(self._source).find_all(nodes.For) if self._fails else ()
            return Reading("openai" if any(map(_runs_over_content, loops)) else "string")
        except Exception:  # noqa: BLE001 - a stranger's text may break the parser anyhow
            return Reading("string")


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _conversations(mine: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[Messages]:
    """Short ones with the message `mine`, the usual one first. asked: a message of the user."""
    match mine["role"]:
        case "system" | "developer":
            yield [mine, asked]
        case "assistant":
            yield [asked, mine]
            yield [asked, mine, asked]
        case "tool":
            function = {"name": "f", "arguments": {}}
            call = {"id": _CALL_ID, "type": "function", "function": function}
            called = {"role": "assistant", "content": "", "tool_calls": [call]}
            yield [asked, called, {**mine, "name": "f", "tool_call_id": _CALL_ID}]
            yield [asked, mine]
        case _:
            yield [mine]
            yield [{"role": "system", "content": "?"}, mine]
            yield [mine, {"role": "assistant", "content": "?"}, asked]


def _runs_over_content(loop: nodes.For) -> bool:
    """Whether it runs over the field `content` of anything."""
    fields = loop.iter.find_all((nodes.Getattr, nodes.Getitem))
    outermost = [loop.iter] if isinstance(loop.iter, (nodes.Getattr, nodes.Getitem)) else []
    for node in [*outermost, *fields]:
        match node:
            case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
                return True
    return False

"""Detects the content that a Jinja chat template reads, by role: a text ("string") or a list of parts
("openai").

A short conversation is rendered with a mark as a text and again with the mark in a part; the output decides.
The source is inspected only if neither prints the mark.
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
"""The mark in quotes: a part was printed as a Python or JSON object."""
_MEDIA = re.compile(r"(?<![^\W\d_])(?:(?:image|audio|video)s?|vision)(?![^\W\d_A-Z])")
"""The words alone or as part of a name (image_url, <|vision_start|>, imageUrl), but not within another word
(revision, imagery)."""
_ROLES = frozenset({"user", "system", "developer", "assistant", "tool"})
"""Other roles are assumed to be read like the user's."""
_CALL_ID = "a1b2c3d4e"  # some templates require nine letters and digits


class Reading(NamedTuple):
    """format: "openai" if a list of parts is printed as its texts. text: whether a text is printed too."""

    format: ContentFormat
    text: bool = True


class ContentFormats:
    """The formats of one template. render: renders a conversation. Raises TemplateError."""

    def __init__(self, source: str, render: Callable[[Messages], str]) -> None:
        self._source, self._render = source, render
        self._known: dict[tuple[str, frozenset[str]], Reading] = {}
        self._fails = False

    def of(self, role: str, media: frozenset[str] = frozenset()) -> Reading:
        """How the content of a role's messages is read. media: the kinds of media ("image", "video", "audio")
        that it has besides text."""
        key = role if role in _ROLES else "user", media
        reading = self._known.get(key)
        if reading is None:
            reading = self._known[key] = self._probed(*key)
        return reading

    def _probed(self, role: str, media: frozenset[str]) -> Reading:
        text = self._printed(role, _MARK)
        parts = self._printed(role, [*({"type": one} for one in sorted(media)), _part(_MARK)])
        if parts is not None and (parts == text or not _QUOTED.search(parts)):
            return Reading("openai", text is not None)
        if text is not None:
            return Reading("string")
        return self._from_source() if role == "user" else self.of("user", media)

    def _printed(self, role: str, content: Any) -> str | None:
        """A rendered conversation with this content; None if the content is not printed."""
        question: Any = "?" if role == "user" or self.of("user").text else [_part("?")]
        for talk in _conversations({"role": role, "content": content}, {"role": "user", "content": question}):
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
        """Decides by a word for media; if the template cannot be rendered, also by a loop over a content."""
        if _MEDIA.search(self._source):
            return Reading("openai")
        try:
            loops = Sandbox().parse(self._source).find_all(nodes.For) if self._fails else ()
            return Reading("openai" if any(map(_iterates_content, loops)) else "string")
        except Exception:  # noqa: BLE001 - an untrusted text may break the parser in any way
            return Reading("string")


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _conversations(mine: Mapping[str, Any], question: Mapping[str, Any]) -> Iterator[Messages]:
    """Short conversations with the message `mine`, the usual one first. question: a message of the user."""
    match mine["role"]:
        case "system" | "developer":
            yield [mine, question]
        case "assistant":
            yield [question, mine]
            yield [question, mine, question]
        case "tool":
            function = {"name": "f", "arguments": {}}
            call = {"id": _CALL_ID, "type": "function", "function": function}
            called = {"role": "assistant", "content": "", "tool_calls": [call]}
            yield [question, called, {**mine, "name": "f", "tool_call_id": _CALL_ID}]
            yield [question, mine]
        case _:
            yield [mine]
            yield [{"role": "system", "content": "?"}, mine]
            yield [mine, {"role": "assistant", "content": "?"}, question]


def _iterates_content(loop: nodes.For) -> bool:
    """Whether it iterates over the field `content` of anything."""
    for node in (loop.iter, *loop.iter.find_all((nodes.Getattr, nodes.Getitem))):
        match node:
            case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
                return True
    return False

"""Control tokens that users write: hidden before rendering, and plain text where the prompt is encoded.

A message that quotes `<|im_end|>` must not end its turn. Each such text is rendered as a placeholder of
private-use characters, and becomes its letters again where the prompt is encoded. It knows texts, not
tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from runtime.protocol.messages import RAW_ROLE, Message

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_FIRST_DIGIT = 0xE100
_DIGITS = 1024
_PLACEHOLDER = re.compile(f"{_OPEN}([{chr(_FIRST_DIGIT)}-{chr(_FIRST_DIGIT + _DIGITS - 1)}]+){_CLOSE}")
_TRUSTED = frozenset({"assistant", RAW_ROLE})
"""What the model wrote, and text outside of turns, are the prompt's own."""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a prompt; `plain`: control tokens in it are only letters."""

    text: str
    plain: bool


class ControlTokens:
    """The control tokens of one tokenizer, by their texts. Thread safe."""

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
        # The placeholder's own marks are hidden as well, so that nobody can write one.
        self._texts = [_OPEN, _CLOSE, *known]
        self._index = {text: index for index, text in enumerate(self._texts)}
        self._marks = re.compile(f"[{_OPEN}{_CLOSE}]")
        self._all = re.compile("|".join(re.escape(text) for text in self._texts))
        self._known = re.compile("|".join(re.escape(text) for text in known)) if known else None

    def hide(self, message: Message) -> Message:
        """The message with placeholders for the control tokens in what is not the model's own text."""
        pattern = self._marks if message.role in _TRUSTED else self._all
        content: Any = message.content
        if isinstance(content, str):
            content = self._hidden(pattern, content)
        else:
            content = [
                {**part, "text": self._hidden(pattern, part["text"])}
                if isinstance(part.get("text"), str)
                else part
                for part in content
            ]
        name = None if message.name is None else self._hidden(self._all, message.name)
        if content == message.content and name == message.name:
            return message
        return msgspec.structs.replace(message, content=content, name=name)

    def shown(self, text: str) -> str:
        """The text as its readers see it."""
        return _PLACEHOLDER.sub(lambda found: self._texts[_number(found[1])], text)

    def spans(self, text: str) -> list[Span]:
        """A rendered text in pieces to be encoded one after the other. A piece with a hidden token in it
        reaches from one of the template's own control tokens to the next."""
        if _PLACEHOLDER.search(text) is None:
            return [Span(text, plain=False)]
        bounds = [0, len(text)]
        for found in self._known.finditer(text) if self._known is not None else ():
            bounds += [found.start(), found.end()]
        bounds = sorted(set(bounds))
        spans: list[Span] = []
        for start, end in pairwise(bounds):
            piece = text[start:end]
            plain = _PLACEHOLDER.search(piece) is not None
            if plain:
                spans.append(Span(self.shown(piece), plain=True))
            elif spans and not spans[-1].plain:
                spans[-1] = Span(spans[-1].text + piece, plain=False)
            else:
                spans.append(Span(piece, plain=False))
        return spans

    def _hidden(self, pattern: re.Pattern[str], text: str) -> str:
        return pattern.sub(lambda found: _placeholder(self._index[found[0]]), text)


def _placeholder(index: int) -> str:
    digits = [chr(_FIRST_DIGIT + index % _DIGITS)]
    while index >= _DIGITS:
        index //= _DIGITS
        digits.append(chr(_FIRST_DIGIT + index % _DIGITS))
    return _OPEN + "".join(reversed(digits)) + _CLOSE


def _number(digits: str) -> int:
    number = 0
    for digit in digits:
        number = number * _DIGITS + ord(digit) - _FIRST_DIGIT
    return number

"""Control tokens that users write: hidden before rendering, and plain text where the prompt is encoded.

A message that quotes `<|im_end|>` must not end its turn. Each such text is rendered as a placeholder of
private-use characters, and becomes its letters again where the prompt is encoded. It knows texts, not
tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from runtime.protocol.errors import BadRequest
from runtime.protocol.messages import RAW_ROLE, Message, ToolCall

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_FIRST_DIGIT = 0xE100
_DIGITS = 1024
_MARKS = (_OPEN, _CLOSE)
_PLACEHOLDER = re.compile(f"{_OPEN}([{chr(_FIRST_DIGIT)}-{chr(_FIRST_DIGIT + _DIGITS - 1)}]+){_CLOSE}")
_TRUSTED = frozenset({"assistant", RAW_ROLE})
"""What the model wrote, and text outside of turns, are the prompt's own."""
_WORD = re.compile(r"\w+")
MAX_DEPTH = 200
LONG = 16 << 10
"""Characters from which a text is searched for each control token by itself first."""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a prompt; `plain`: control tokens in it are only letters."""

    text: str
    plain: bool


class ControlTokens:
    """The control tokens of one tokenizer, by their texts. Thread safe."""

    def __init__(self, texts: Iterable[str], tags: Iterable[str] = ()) -> None:
        """tags: those of the texts that replies are made of, such as marks of reasoning, and no turns."""
        known = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
        # The placeholder's own marks are hidden as well, so that nobody can write one.
        self._texts = [*_MARKS, *known]
        self._index = {text: index for index, text in enumerate(self._texts)}
        self._marks = re.compile("|".join(re.escape(mark) for mark in _MARKS))
        self._all = re.compile("|".join(re.escape(text) for text in self._texts))
        tagged = frozenset(tags)
        self._structure = re.compile("|".join(re.escape(text) for text in self._texts if text not in tagged))
        self._known = re.compile("|".join(re.escape(text) for text in known)) if known else None

    def hide(self, message: Message) -> Message:
        """The message with placeholders for the control tokens in what is not the model's own text: in all of
        its fields, but for the content and the reasoning of trusted roles."""
        pattern = self._marks if message.role in _TRUSTED else self._all
        if message.continued and message.role in _TRUSTED:
            pattern = self._structure
        thought = message.reasoning_content
        content: Any = message.content
        if isinstance(content, str):
            content = self._hidden(pattern, content)
        else:
            # What other parts refer to is no text of the prompt.
            content = [self._walk(pattern, part) if _is_text(part) else part for part in content]
        return msgspec.structs.replace(
            message,
            role=message.role if _WORD.fullmatch(message.role) else self.hide_text(message.role),
            content=content,
            name=None if message.name is None else self.hide_text(message.name),
            tool_calls=tuple(self._call(call) for call in message.tool_calls),
            tool_call_id=None if message.tool_call_id is None else self.hide_text(message.tool_call_id),
            reasoning_content=None if thought is None else self._hidden(pattern, thought),
        )

    def hide_text(self, text: str) -> str:
        """The text with placeholders for all control tokens in it."""
        return self._hidden(self._all, text)

    def hide_value(self, value: Any) -> Any:
        """A value of JSON's kinds, the same done to every text in it, names of fields included. Raises
        BadRequest for one that is nested more than MAX_DEPTH deep."""
        return self._walk(self._all, value)

    def hide_variables(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The same for variables of a template, whose own names are not printed."""
        return {name: self.hide_value(value) for name, value in values.items()}

    def trust(self, text: str) -> str:
        """A text whose control tokens are meant; only what would be taken for a placeholder is hidden."""
        return self._hidden(self._marks, text)

    def shown(self, text: str) -> str:
        """The text as its readers see it."""
        return _PLACEHOLDER.sub(self._original, text)

    def _original(self, found: re.Match[str]) -> str:
        number = _number(found[1])
        return self._texts[number] if number < len(self._texts) else found[0]

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

    def _call(self, call: ToolCall) -> ToolCall:
        return msgspec.structs.replace(
            call,
            name=self.hide_text(call.name),
            id=None if call.id is None else self.hide_text(call.id),
            arguments=self._arguments(call.arguments),
        )

    def _arguments(self, text: str) -> str:
        """Templates print them parsed, so they are looked at parsed: an escape in JSON hides a token, too."""
        try:
            value = json.loads(text)
        except RecursionError:
            raise _too_deep() from None
        except ValueError:
            return self.hide_text(text)
        hidden = self.hide_value(value)
        return text if hidden == value else json.dumps(hidden, ensure_ascii=False)

    def _walk(self, pattern: re.Pattern[str], value: Any, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise _too_deep()
        match value:
            case str(text):
                return self._hidden(pattern, text)
            case {**pairs}:
                return {
                    self._walk(pattern, key, depth + 1): self._walk(pattern, item, depth + 1)
                    for key, item in pairs.items()
                }
            case [*items]:
                return [self._walk(pattern, item, depth + 1) for item in items]
            case _:
                return value

    def _hidden(self, pattern: re.Pattern[str], text: str) -> str:
        if len(text) > LONG:
            wanted = _MARKS if pattern is self._marks else self._texts
            if (found := narrow(wanted, text)) is None:
                return text
            if pattern is not self._structure:
                pattern = found
        return pattern.sub(lambda found: _placeholder(self._index[found[0]]), text)


def narrow(texts: Iterable[str], text: str) -> re.Pattern[str] | None:
    """A pattern for those of `texts` that stand in `text`, in the same order; None: none does. To look for
    hundreds of them at every place of a long text would hold the interpreter's lock for seconds."""
    found = [one for one in texts if one in text]
    return re.compile("|".join(map(re.escape, found))) if found else None


def acts_as_control(text: str) -> bool:
    """Whether an added token that is not special is a mark all the same (`<think>`, `[TOOL_CALLS]`): it opens
    and ends with a sign, and names something that is no element of HTML. Words, blanks and signs that were
    added to a vocabulary are ordinary text."""
    if len(text) < 3 or text[0].isalnum() or text[-1].isalnum() or text[0].isspace() or text[-1].isspace():
        return False
    return any(char.isalnum() for char in text) and _HTML.fullmatch(text) is None


_HTML = re.compile(
    r"</?(?:a|abbr|b|blockquote|body|br|button|caption|center|code|col|colgroup|dd|del|div|dl|dt|em|figcaption|"
    r"figure|font|footer|form|h[1-6]|head|header|hr|html|i|img|input|ins|label|li|main|mark|nav|ol|option|p|pre|"
    r"s|section|small|span|strike|strong|sub|sup|svg|table|tbody|td|textarea|tfoot|th|thead|title|tr|tt|u|ul)/?>"
)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def _too_deep() -> BadRequest:
    return BadRequest(f"a value is nested more than {MAX_DEPTH} deep", where="messages / tools")


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

"""Control tokens in users' texts: hidden before rendering, and encoded as plain text.

A message that quotes `<|im_end|>` must not end its turn. Each such text is rendered as a placeholder of
private-use characters, and becomes its letters again when the prompt is encoded. It knows texts, not
tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from runtime.protocol.errors import BadRequest
from runtime.protocol.messages import RAW_ROLE, Message, ToolCall

_MARK = "\ue0f0"
_FIRST_DIGIT, _DIGITS = 0xE100, 1024
_PLACEHOLDER = re.compile(f"{_MARK}([{chr(_FIRST_DIGIT)}-{chr(_FIRST_DIGIT + _DIGITS - 1)}]{{2}})")
"""The mark, and two digits for the number of the control token that it stands for."""
_TRUSTED = frozenset({"assistant", RAW_ROLE})
"""The model's own text, and text outside of turns, may contain control tokens."""
_WORD = re.compile(r"\w+")
MAX_DEPTH = 200
LONG = 16 << 10
"""From this number of characters on, a text is first searched for each control token separately."""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a prompt; `plain`: control tokens in it are encoded as ordinary text."""

    text: str
    plain: bool


class ControlTokens:
    """The control tokens of one tokenizer, by their texts. Thread safe."""

    def __init__(self, texts: Iterable[str], tags: Iterable[str] = ()) -> None:
        """tags: tokens that occur in replies, such as marks of reasoning, but do not separate turns."""
        known = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
        # The placeholder's own mark is hidden as well, so that no text can forge one.
        self._texts = [_MARK, *known]
        self._index = {text: index for index, text in enumerate(self._texts)}
        tagged = frozenset(tags)
        self._marks = re.compile(_MARK)
        self._all = _any_of(self._texts)
        self._structure = _any_of(text for text in self._texts if text not in tagged)
        self._known = re.compile(f"({_any_of(known).pattern})") if known else None

    def hide(self, message: Message) -> Message:
        """The message with placeholders for the control tokens in all of its fields, except the content and
        reasoning of trusted roles."""
        pattern = self._marks if message.role in _TRUSTED else self._all
        if message.continued and message.role in _TRUSTED:
            pattern = self._structure
        thought = message.reasoning_content
        content: Any = message.content
        if isinstance(content, str):
            content = self._hidden(pattern, content)
        else:
            # The sources of other parts are not text of the prompt.
            content = [
                self._walk(pattern, part) if isinstance(part, dict) and part.get("type") == "text" else part
                for part in content
            ]
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
        """The text with placeholders for all control tokens."""
        return self._hidden(self._all, text)

    def hide_value(self, value: Any) -> Any:
        """A JSON value with all texts in it hidden, names of fields included. Raises BadRequest if it is
        nested more than MAX_DEPTH deep."""
        return self._walk(self._all, value)

    def hide_variables(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The same for the variables of a template, whose names are not printed."""
        return {name: self.hide_value(value) for name, value in values.items()}

    def trust(self, text: str) -> str:
        """A text whose control tokens are intended; only text that looks like a placeholder is hidden."""
        return self._hidden(self._marks, text)

    def shown(self, text: str) -> str:
        """The original text, without placeholders."""
        return _PLACEHOLDER.sub(self._original, text)

    def _original(self, match: re.Match[str]) -> str:
        high, low = (ord(digit) - _FIRST_DIGIT for digit in match[1])
        number = _DIGITS * high + low
        return self._texts[number] if number < len(self._texts) else match[0]

    def spans(self, text: str) -> list[Span]:
        """A rendered text in pieces to be encoded separately. A piece with a hidden token extends from one of
        the template's own control tokens to the next."""
        if _PLACEHOLDER.search(text) is None:
            return [Span(text, plain=False)]
        spans: list[Span] = []
        # The group makes split() return the control tokens between the other pieces.
        for piece in filter(None, self._known.split(text) if self._known is not None else [text]):
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
        """Templates print them parsed, so they are hidden parsed: an escape in JSON could hide a token."""
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
            texts = (_MARK,) if pattern is self._marks else self._texts
            if (narrowed := narrow(texts, text)) is None:
                return text
            if pattern is not self._structure:
                pattern = narrowed
        return pattern.sub(lambda match: _placeholder(self._index[match[0]]), text)


def narrow(texts: Iterable[str], text: str) -> re.Pattern[str] | None:
    """A pattern for those of `texts` that occur in `text`, in the same order; None if none does. Searching
    hundreds of them at every position of a long text would hold the GIL for seconds."""
    present = [one for one in texts if one in text]
    return _any_of(present) if present else None


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)))


def acts_as_control(text: str) -> bool:
    """Whether an added token that is not special is nevertheless a mark (`<think>`, `[TOOL_CALLS]`): it
    begins and ends with a sign, and its name is not an HTML element. Words, blanks and signs that were added
    to a vocabulary are ordinary text."""
    if len(text) < 3 or text[0].isalnum() or text[-1].isalnum() or text[0].isspace() or text[-1].isspace():
        return False
    return any(char.isalnum() for char in text) and _HTML.fullmatch(text) is None


_HTML = re.compile(
    r"</?(?:a|abbr|b|blockquote|body|br|button|caption|center|code|col|colgroup|dd|del|div|dl|dt|em|figcaption|"
    r"figure|font|footer|form|h[1-6]|head|header|hr|html|i|img|input|ins|label|li|main|mark|nav|ol|option|p|pre|"
    r"s|section|small|span|strike|strong|sub|sup|svg|table|tbody|td|textarea|tfoot|th|thead|title|tr|tt|u|ul)/?>"
)


def _too_deep() -> BadRequest:
    return BadRequest(f"a value is nested more than {MAX_DEPTH} deep", where="messages / tools")


def _placeholder(index: int) -> str:
    high, low = divmod(index, _DIGITS)
    return f"{_MARK}{chr(_FIRST_DIGIT + high)}{chr(_FIRST_DIGIT + low)}"

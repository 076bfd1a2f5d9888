"""Derives a ChatTemplate from a checkpoint's Jinja template, if possible: found by rendering, then verified.

Sentinel texts are rendered in each role and position; the texts around them are the prefixes and suffixes.
Random conversations then show whether these give the same text as the template. It knows no family and no
registry.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.formats.chat.template import ChatTemplate, ChatTemplateStyle, common_prefix
from runtime.protocol.errors import TemplateError

_U, _A, _S = "Sq7user0", "Sq7assistant0", "Sq7system0"
_ROUNDS = 24
_PATIENCE_S = 20.0
_SHOWN = 160
_PLACES = "writes turns differently from place to place"


@dataclass(frozen=True)
class Derivation:
    """The properties of a Jinja template.

    template           the equivalent ChatTemplate; None if there is none. Trimmed texts and a separate
                       generation prompt do not prevent one: they are in `reasons`
    append_only        a longer conversation's text extends the shorter one's (for replies without reasoning),
                       with and without a system message
    keeps_reasoning    the same with reasoning in earlier replies
    reuses_replies     the prompt for a reply, and that reply (without reasoning), are a prefix of the next
                       turn's prompt; else their KV can be reused only up to the difference
    generation_prompt  the text that opens a reply, which may differ from the assistant's prefix
    bos                the begin-of-text token that the template itself writes, "" if none
    preamble           the text before the first turn if there is no system message, without bos
    reasons            how turns differ from a prefix, their text and a suffix; empty if they do not
    """

    template: ChatTemplate | None = None
    append_only: bool = False
    keeps_reasoning: bool = False
    reuses_replies: bool = False
    generation_prompt: str = ""
    bos: str = ""
    preamble: str = ""
    reasons: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        """The properties as plain values."""
        return {
            "append_only": self.append_only,
            "keeps_reasoning": self.keeps_reasoning,
            "reuses_replies": self.reuses_replies,
            "reasons": list(self.reasons),
        }


class _Odd(Exception):
    """The template does not have the shape, for the reason in the message."""


class _TooLong(Exception):
    """The time limit for this template is exceeded."""


def derive_chat_template(
    jinja: JinjaChatTemplate | str,
    *,
    bos_token: str = "",
    eos_token: str = "",
    name: str = "derived",
    seed: int = 0,
) -> Derivation:
    """Prefixes and suffixes of `jinja`, verified on random conversations. Does not raise if the template has
    none: the reasons tell why. `bos_token`, `eos_token`: for a template given as text.

    It renders about a hundred short conversations, and gives up if that takes too long. Raises TemplateError
    only if the template cannot be parsed.
    """
    if isinstance(jinja, str):
        jinja = JinjaChatTemplate({"default": jinja}, {"bos_token": bos_token, "eos_token": eos_token})
    try:
        # With a fixed date, so that midnight does not look like a template that rewrites turns.
        return _Deriver(jinja.stopped(), name, seed).derive()
    except _TooLong:
        return Derivation(reasons=(f"is not verified: that would take longer than {_PATIENCE_S:g} s",))


def after_reply(jinja: JinjaChatTemplate) -> str:
    """The text between a reply and the user's next text: the suffix of the one and the prefix of the other.
    "" if the template refuses such a conversation or does not print it. Renders once."""
    try:
        text = jinja.render([_turn("user", _U), _turn("assistant", _A), _turn("user", _U + "1")])
        return _cut(text, _U, _A, _U + "1")[2]
    except (TemplateError, _Odd):
        return ""


class _Deriver:
    def __init__(self, jinja: JinjaChatTemplate, name: str, seed: int) -> None:
        self._jinja, self._name, self._random = jinja, name, random.Random(seed)
        self._reasons: list[str] = []
        # The begin-of-text token that it writes, and the end of a conversation that is not continued.
        self._bos, self._end = "", ""
        self._last_differs = False
        self._until = time.monotonic() + _PATIENCE_S

    def derive(self) -> Derivation:
        self._jinja.check()
        try:
            closed, opened = self._render(_turn("user", _U)), self._render(_turn("user", _U), open=True)
        except TemplateError as error:
            self._note_refusal(error)
            return Derivation(reasons=tuple(self._reasons))
        bos, eos = self._jinja.bos_token, self._jinja.eos_token
        self._bos = bos if closed.startswith(bos) else ""
        if eos and closed.endswith(eos) and not opened.startswith(closed):
            self._note(f"ends a conversation that is not continued with {eos!r}")
            self._end, closed = eos, closed.removesuffix(eos)
        opening = opened.removeprefix(closed) if opened.startswith(closed) else None
        append_only, keeps, reuses = self._append_only(), self._keeps_reasoning(), self._reuses_replies()
        dated = any("strftime_now" in source for source in self._jinja.sources.values())
        if dated or "date_string" in self._jinja.reads:
            self._note("writes the date: a conversation rendered tomorrow may begin differently")
        template, preamble = None, ""
        try:
            template, preamble = self._shape(closed.removeprefix(self._bos), opening)
        except _Odd as odd:
            self._note(str(odd))
        except TemplateError as error:
            self._note_refusal(error)
        reasons = tuple(dict.fromkeys(self._reasons))
        return Derivation(template, append_only, keeps, reuses, opening or "", self._bos, preamble, reasons)

    def _note(self, reason: str) -> None:
        self._reasons.append(reason if len(reason) <= _SHOWN else f"{reason[: _SHOWN - 3]}...")

    def _note_refusal(self, error: TemplateError) -> None:
        self._note(f"refuses plain conversations: {error.message}")

    # -- reading the pieces off ------------------------------------------------------------------------------

    def _shape(self, closed: str, opening: str | None) -> tuple[ChatTemplate, str]:
        """The template and its preamble. closed, opening: one turn of the user, and the text that opens the
        reply to it."""
        user, reply = _turn("user", _U), _turn("assistant", _A)
        two = self._closed(user, reply)
        head, between, between_again, tail = _cut(
            self._closed(user, reply, _turn("user", _U + "1")), _U, _A, _U + "1"
        )
        if opening is None:
            raise _Odd("changes the text of earlier turns when a reply is opened")
        if not closed.startswith(head + _U):
            raise _Odd(f"{_PLACES}: the first turn changes when others are added")
        user_suffix = closed.removeprefix(head + _U)
        if tail != user_suffix or not between.startswith(user_suffix):
            raise _Odd(f"{_PLACES}: a user's last turn ends differently")
        assistant_prefix = between.removeprefix(user_suffix)
        assistant_suffix = two.rpartition(_A)[2]
        later_prefix = between_again.removeprefix(assistant_suffix)
        if not between_again.startswith(assistant_suffix) or not head.endswith(later_prefix):
            shared = common_prefix(between_again[::-1], head[::-1])
            later_prefix = head[len(head) - shared :]
            assistant_suffix = between_again[: len(between_again) - len(later_prefix)]
            if user_suffix and not assistant_suffix and later_prefix.startswith(user_suffix):
                # The text before the first turn ends like a turn: that mark is still the reply's end.
                assistant_suffix, later_prefix = user_suffix, later_prefix.removeprefix(user_suffix)
        self._last_differs = two != head + _U + between + _A + assistant_suffix
        if self._last_differs:
            self._note(f"{_PLACES}: a reply that ends the conversation differs")
        preamble = head[: len(head) - len(later_prefix)]
        default = None
        try:
            system, style = self._system(later_prefix, user_suffix)
        except _Odd as odd:
            self._note(str(odd))
            system, style = None, ChatTemplateStyle.PLAIN
        if preamble:
            before, after = system or ("", "")
            inner = preamble.removeprefix(before).removesuffix(after)
            default = inner if system is not None and before + inner + after == preamble else None
            self._note(f"begins every conversation with text of its own: {preamble[:60]!r}")
        if opening != assistant_prefix:
            self._note(f"opens a reply in another way than it writes one: {opening!r}, {assistant_prefix!r}")
        roles = {"user": (later_prefix, user_suffix), "assistant": (assistant_prefix, assistant_suffix)}
        if system is not None:
            roles["system"] = system
        end = assistant_suffix.strip()
        template = ChatTemplate(self._name, default, roles, (end,) if end else (), style=style)
        wrong = self._verify(template, preamble, system is not None)
        if wrong is not None and system is not None:
            # Without a system message the rest may still have the shape.
            others = {role: texts for role, texts in roles.items() if role != "system"}
            template = ChatTemplate(self._name, None, others, template.stop_str)
            if self._verify(template, preamble, False) is None:
                self._note("moves a system message, depending on the turns after it")
                wrong = None
        if wrong is not None:
            raise _Odd(f"is not verified: it writes a random conversation differently: {wrong}")
        return template, preamble

    def _closed(self, *turns: Mapping[str, Any]) -> str:
        return self._render(*turns).removeprefix(self._bos).removesuffix(self._end)

    def _system(self, user_prefix: str, user_suffix: str) -> tuple[tuple[str, str] | None, ChatTemplateStyle]:
        count, refusal = 0, ""
        try:
            text = self._closed(_turn("system", _S), _turn("user", _U))
            count = text.count(_S)
        except TemplateError as error:
            refusal = f"refuses a system message: {error.message}"
        if count != 1:
            self._note(refusal or f"prints the text of a system message {count} times")
            return None, ChatTemplateStyle.PLAIN
        before, between, after = _cut(text, _S, _U)
        if after != user_suffix:
            raise _Odd(f"{_PLACES}: a user's turn after a system message ends differently")
        if between.endswith(user_prefix):
            suffix = between[: len(between) - len(user_prefix)]
            try:
                alone = self._closed(_turn("system", _S))
            except TemplateError:
                alone = before + _S + suffix
            if not user_prefix or alone == before + _S + suffix:
                return (before, suffix), ChatTemplateStyle.PLAIN
        if user_prefix and before.startswith(user_prefix):
            self._note("puts the system message into a user's turn")
            return (before.removeprefix(user_prefix), between), ChatTemplateStyle.LLAMA2
        raise _Odd("puts the system message into a user's turn, and not before the user's text")

    # -- what holds of the whole -----------------------------------------------------------------------------

    def _append_only(self) -> bool:
        """Whether each conversation's text is a prefix of the longer one's."""
        turns = [_turn("user", "one"), _turn("assistant", "two"), _turn("user", "three"),
                 _turn("assistant", "four"), _turn("user", "five")]  # fmt: skip
        for before in ([], [_turn("system", "zero")]):
            try:
                texts = [self._render(*before, *turns[:count]) for count in range(1, len(turns) + 1)]
            except TemplateError as error:
                if before:
                    break  # refused system messages are noted elsewhere
                self._note_refusal(error)
                return False
            for shorter, longer in pairwise(texts):
                if not longer.startswith(shorter):
                    at = common_prefix(shorter, longer)
                    changed = shorter[max(0, at - 20) : at + 20]
                    self._note(f"changes the text of earlier turns when turns are added: {changed!r}")
                    return False
        return True

    def _reuses_replies(self) -> bool:
        """Whether the prompt for a reply and the reply are a prefix of the next turn's prompt."""
        question, reply, more = _turn("user", "one"), _turn("assistant", "two"), _turn("user", "three")
        for before in ((), (_turn("system", "zero"),)):
            try:
                opened = self._render(*before, question, open=True)
                if opened == self._render(*before, question):
                    # The generation prompt is empty; the reply's own prefix opens it.
                    opened = self._render(*before, question, reply).rpartition("two")[0]
                later = self._render(*before, question, reply, more, open=True)
            except TemplateError:
                if before:
                    continue
                return False
            if not later.startswith(opened + "two"):
                return False
        return True

    def _keeps_reasoning(self) -> bool:
        """Whether the reasoning of an earlier reply stays, in the content or in its own field."""
        reply = _turn("assistant", "<think>\nSq7why\n</think>\n\n" + _A)
        beside = {**_turn("assistant", _A), "reasoning_content": "Sq7why"}
        for reply_turn in (reply, beside):
            try:
                now = self._render(_turn("user", _U), reply_turn)
                later = self._render(_turn("user", _U), reply_turn, _turn("user", _U + "1"))
            except TemplateError:
                continue
            if "Sq7why" not in later and (reply_turn is reply or "Sq7why" in now):
                self._note("drops the reasoning of earlier replies")
                return False
        return True

    def _verify(self, template: ChatTemplate, preamble: str, system: bool) -> str | None:
        """Compare random conversations; returns the first difference, or None."""
        trims = self._trims(system)
        if trims:
            self._note("trims the text of turns")
        for round_ in range(_ROUNDS):
            with_system = system and round_ % 2 == 1
            turns = [_turn("system", self._text(trims))] if with_system else []
            for _ in range(self._random.randint(1, 4)):
                turns += [_turn("user", self._text(trims)), _turn("assistant", self._text(trims))]
            if self._last_differs or self._random.random() < 0.5:
                turns.pop()
            expected = self._render(*turns).removesuffix(self._end)
            derived = self._bos + ("" if with_system else preamble) + template.get_prompt(turns)
            if derived != expected:
                at = max(0, common_prefix(derived, expected) - 24)
                return f"{expected[at : at + 48]!r} instead of {derived[at : at + 48]!r}"
        return None

    def _trims(self, system: bool) -> bool:
        for space in ("  ", "\n\n\n"):
            marks = [("system", _S)] * system + [("user", _U), ("assistant", _A)]
            turns = [_turn(role, f"{space}{mark}{space}") for role, mark in marks]
            text = self._render(*turns, _turn("user", "x"))
            if any(turn["content"] not in text for turn in turns):
                return True
        return False

    def _text(self, trims: bool) -> str:
        letters = "abc XYZ 019 .,:;!?'\"(){}[]<>|/\\#*_-+=%&\n\tüß한국어🦊"
        text = "".join(self._random.choice(letters) for _ in range(self._random.randint(1, 24)))
        return (text.strip() or "x") if trims else text

    def _render(self, *turns: Mapping[str, Any], open: bool = False) -> str:
        if time.monotonic() > self._until:
            raise _TooLong
        return self._jinja.render(list(turns), add_generation_prompt=open)


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _cut(text: str, *marks: str) -> list[str]:
    """`text` split at the marks, each of which must occur in it once and in this order."""
    pieces: list[str] = []
    rest = text
    for mark in marks:
        before, separator, rest = rest.partition(mark)
        if not separator:
            raise _Odd(f"does not print {mark!r} of the turns {list(marks)}, or not in this order")
        pieces.append(before)
    for mark in marks:
        if rest.count(mark) and not any(mark in other and mark != other for other in marks):
            raise _Odd(f"prints {mark!r} of the turns {list(marks)} again")
    return [*pieces, rest]

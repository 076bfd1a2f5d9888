"""A request's prompt -> ids: text, text around a hole, messages through the chat template, or ids.

What users quote is kept from being read as control tokens here. It knows the tokenizer and the templates; how
the request goes on is not its business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from runtime.formats.chat.completion import (
    CompletionTemplate,
    choose_completion_template,
    completion_template_registry,
    fitting_completion_templates,
)
from runtime.formats.chat.content import check_media, check_parts
from runtime.formats.chat.control import ControlTokens
from runtime.formats.chat.derive import after_reply
from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.formats.chat.render import Rendered, TextTemplate, render
from runtime.formats.chat.template import ChatTemplate
from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.processes.frontend.images.pictures import PictureReader
from runtime.processes.frontend.images.placing import check_slotss, lengthened, placed
from runtime.protocol.errors import BadRequest, PromptTooLong
from runtime.protocol.messages import RAW_ROLE, ImageData, ImageInput, Message
from runtime.protocol.requests.single import SingleGenerateReq

_USUAL = 16
"""Characters that one token of a real text stands for, at most."""
_SEAM = 64
"""Tokens at the end of a text that what follows may change."""
MOST_PIXELS = 192 << 20
"""Bytes of the pictures of one prompt: they travel in one message."""
_DROPPED = 4
"""How much longer than a prompt the conversation may be that it is made of."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """text: None for a prompt of ids. stop_str: ends a turn, or the text that fills a hole. images: those of
    `ids`, in order."""

    text: str | None
    ids: list[int]
    stop_str: tuple[str, ...] = ()
    images: tuple[ImageInput, ...] = ()


class PromptReader:
    """Thread safe; holds no state of requests.

    limit: tokens that a prompt can have; a text that cannot be so few is refused before it is rendered or
    encoded, or with auto_truncate cut. allow_control_tokens: the default of requests that do not say.
    pictures: what reads them; None where the model takes text only. completion_template: for prompts with a
    suffix, a registered name or None for the one that fits the tokenizer. Raises BadRequest for an unknown
    name.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | TextTemplate | None,
        vocab_size: int,
        *,
        limit: int,
        auto_truncate: bool = False,
        allow_control_tokens: bool = False,
        pictures: PictureReader | None = None,
        completion_template: str | None = None,
    ) -> None:
        self._pictures = pictures
        takes_media = () if pictures is None else ("image",)
        self._tokenizer, self._template, self._vocab_size = tokenizer, template, vocab_size
        self._limit, self._truncates = limit, auto_truncate
        self._control = ControlTokens(tokenizer.control_texts, tokenizer.reply_tags)
        self._allow, self._takes_media = allow_control_tokens, frozenset(takes_media)
        self._completion = choose_completion_template(completion_template)

    def read(self, request: SingleGenerateReq, *, at_least: int = 0) -> Prompt:
        """Raises BadRequest or a kind of it, with the field in `where`. at_least: so many characters are read
        whatever the limit."""
        values = {"text": request.text, "input_ids": request.input_ids, "messages": request.messages}
        kinds = [name for name, value in values.items() if value is not None]
        if len(kinds) != 1:
            raise BadRequest(
                "exactly one of text, input_ids and messages is the prompt, got "
                + (" and ".join(kinds) or "none"),
                where="prompt",
            )
        if request.messages is None and (request.tools or request.template_kwargs):
            raise BadRequest(f"needs messages, not {kinds[0]}", where="tools / template_kwargs")
        if request.suffix is not None and request.text is None:
            raise BadRequest(f"needs text, not {kinds[0]}", where="suffix")
        if request.image_data:
            self._check_images(request)
        if request.input_ids is not None:
            whole, images = self._placed(self._check_ids(request.input_ids), request.image_data)
            return Prompt(None, whole, images=images)
        most = max(self._limit * self._tokenizer.longest, at_least)
        if not self._truncates:
            # A template may leave out earlier turns: that much is not held against a conversation.
            self._check_size(_size(request), _DROPPED * most if request.messages else most)
        text, media = request.text or "", Rendered("")
        stop_str: tuple[str, ...] = ()
        if request.messages is not None:
            media = self._render(request)
            text, stop_str = media.text, self._turn_stops(request)
        elif request.suffix is not None:
            text, stop_str = self._around_hole(request, text, request.suffix)
        if self._truncates:
            text = text[:most]
        self._check_size(len(text), most)
        if not at_least and not self._truncates and request.truncate_prompt_tokens is None:
            self._check_beginning(text)
        ids = self._encode(request, text)
        if not ids and request.choices is None:
            # A turn of a session goes on from the one before it, and begins no text.
            ids = [] if request.session_params else self._tokenizer.start
            if not ids:
                raise BadRequest(
                    "the prompt is empty, and this tokenizer has neither a begin-of-text nor an end-of-text "
                    "token to start from",
                    where=kinds[0],
                )
        ids, images = self._placed(ids, request.image_data or media.images)
        return Prompt(text, ids, stop_str, images)

    def check_text(self, size: int, where: str) -> None:
        """Raise PromptTooLong for a text of `size` characters, which cannot be few enough tokens."""
        self._check_size(size, self._limit * self._tokenizer.longest, where)

    def _check_size(self, size: int, most: int, where: str = "prompt") -> None:
        if size > most:
            raise PromptTooLong(
                f"the {where} has {size} characters; the {self._limit} available tokens hold at most {most}",
                where=where,
                hint="shorten it",
            )

    def _check_beginning(self, text: str) -> None:
        """Refuse what is far too long by its beginning: the rest can make no fewer tokens of it, but for the
        last few."""
        beginning = text[: _USUAL * self._limit]
        if len(beginning) == len(text):
            return
        count = self._tokenizer.count(beginning)
        if count > self._limit + _SEAM:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, {count} tokens in the first {len(beginning)}; there "
                f"is room for {self._limit} tokens",
                where="prompt",
                hint="shorten it",
            )

    def encode_with(
        self, request: SingleGenerateReq, text: str, more: str, images: Sequence[ImageInput] = ()
    ) -> list[int]:
        """Ids of a prompt's text, with its pictures, and the program's own `more` after it."""
        ids = self._encode(request, text + (self._control.trust(more) if self._hides(request) else more))
        if self._pictures is None:
            return ids
        check_slotss(ids, self._pictures.spec.image_id, len(images))
        return lengthened(ids, self._pictures.spec.image_id, images)

    def _check_images(self, request: SingleGenerateReq) -> None:
        if self._pictures is None:
            raise BadRequest(
                "image_data is not supported: this model accepts only text",
                where="image_data",
                hint="leave it out, or use a model that accepts images",
            )
        if request.messages is not None:
            raise BadRequest("needs text or input_ids; in messages, use image parts", where="image_data")

    def _placed(
        self, ids: list[int], images: Sequence[ImageData] | None
    ) -> tuple[list[int], tuple[ImageInput, ...]]:
        """The ids with pictures in place of placeholders, and these."""
        reader = self._pictures
        if reader is None:
            return ids, ()
        images = images or ()
        check_slotss(ids, reader.spec.image_id, len(images))
        if not images:
            return ids, ()
        room = self._limit - len(ids) + len(images)
        whole, inputs = placed(ids, reader.spec.image_id, reader.read(images, room))
        if sum(len(one.pixels) for one in inputs) > MOST_PIXELS:
            raise BadRequest(
                f"the resized images have more than {MOST_PIXELS} bytes in total",
                where="images",
                hint="send fewer, or smaller ones",
            )
        if self._truncates and len(whole) >= self._limit:
            raise PromptTooLong(
                f"the prompt with its images has {len(whole)} tokens, but there is room for {self._limit}; "
                "prompts with images are not truncated",
                where="prompt",
                hint="shorten it",
            )
        return whole, tuple(inputs)

    def _render(self, request: SingleGenerateReq) -> Rendered:
        messages = request.messages or []
        if not messages:
            raise BadRequest("is empty", where="messages")
        for index, message in enumerate(messages):
            if not isinstance(message.content, str):
                check_parts(message.content, index)
                check_media(message.content, index, self._takes_media)
        tools, variables = request.tools, request.template_kwargs
        if self._hides(request):
            messages = [self._control.hide(message) for message in messages]
            tools = None if tools is None else self._control.hide_value(tools)
            variables = None if variables is None else self._control.hide_variables(variables)
        try:
            return render(
                messages,
                self._template,
                tools=tools,
                template_kwargs=variables,
                image_token=self._image_token,
            )
        except BadRequest as error:
            # A template's message may quote what it rendered.
            error.message = self._control.shown(error.message)
            raise

    @cached_property
    def _image_token(self) -> str | None:
        """What stands for a picture outside of turns."""
        if self._pictures is None:
            return None
        spec = self._pictures.spec
        marks = [spec.image_id]
        if spec.around is not None:
            marks = [spec.around[0], spec.image_id, spec.around[1]]
        return self._tokenizer.decode(marks, skip_special_tokens=False)

    def _turn_stops(self, request: SingleGenerateReq) -> tuple[str, ...]:
        if not any(message.role != RAW_ROLE for message in request.messages or ()):
            return ()
        match self._template:
            case ChatTemplate():
                return self._template.stop_str
            case JinjaChatTemplate():
                return self._reply_ends
            case _:
                return ()

    @cached_property
    def _reply_ends(self) -> tuple[str, ...]:
        """The token that the Jinja template writes after a reply, where the checkpoint's own end tokens are
        none of the template's: it was trained on another format, or is a base model. Where they are, they say
        better where a reply ends (it may be of several messages)."""
        template, tokenizer = self._template, self._tokenizer
        if not isinstance(template, JinjaChatTemplate):
            return ()
        after = after_reply(template)
        written = [after, *template.sources.values()]
        ends = [tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.eos]
        if any(end in text for end in ends if end for text in written):
            return ()
        known = [text for text in tokenizer.control_texts if text and after.lstrip().startswith(text)]
        return (max(known, key=len),) if known else ()

    def _around_hole(
        self, request: SingleGenerateReq, before: str, after: str
    ) -> tuple[str, tuple[str, ...]]:
        template = self._completion or self._fitting_completion()
        if self._hides(request):
            before, after = self._control.hide_text(before), self._control.hide_text(after)
        return template.render(before, after), template.stop_str

    def _fitting_completion(self) -> CompletionTemplate:
        fitting = fitting_completion_templates(lambda text: self._tokenizer.added_id(text) is not None)
        if len(fitting) == 1:
            return fitting[0]
        why = "several templates fit" if fitting else "the tokenizer has the tokens of no known template"
        names = [template.name for template in fitting] or list(completion_template_registry)
        raise BadRequest(
            f"it is not known how this model does fill-in-the-middle: {why}",
            where="suffix",
            hint=f"start the engine with completion_template= one of {', '.join(names)}",
        )

    def _hides(self, request: SingleGenerateReq) -> bool:
        """Whether control tokens in this prompt's own texts are only letters. A plain text is all the user's
        own, and read as it stands."""
        allowed = self._allow if request.allow_control_tokens is None else request.allow_control_tokens
        return not allowed and (request.messages is not None or request.suffix is not None)

    def _encode(self, request: SingleGenerateReq, text: str) -> list[int]:
        if not self._hides(request):
            return self._tokenizer.encode(text)
        return self._tokenizer.encode_spans((span.text, span.plain) for span in self._control.spans(text))

    def _check_ids(self, ids: Any) -> list[int]:
        vocab = self._vocab_size
        if isinstance(ids, (list, tuple)) and len(ids) > 2 * self._limit and not self._truncates:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens; there is room for {self._limit}",
                where="prompt",
                hint="shorten it",
            )
        if not isinstance(ids, (list, tuple)):
            raise BadRequest(f"must be a list of token ids, got {type(ids).__name__}", where="input_ids")
        if not ids:
            raise BadRequest("the prompt is empty", where="input_ids")
        for index, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < vocab:
                raise BadRequest(
                    f"must be a token id from 0 to {vocab - 1}, got {token!r}", where=f"input_ids[{index}]"
                )
        return list(ids)


def _size(request: SingleGenerateReq) -> int:
    """Characters of what the prompt is made of."""
    return len(request.text or "") + len(request.suffix or "") + size_of_turns(request.messages or ())


def size_of_turns(messages: Iterable[Message]) -> int:
    """Characters of a conversation's texts, wherever in it they stand."""
    size = 0
    for message in messages:
        size += len(message.reasoning_content or "") + sum(len(call.arguments) for call in message.tool_calls)
        content = message.content
        size += len(content) if isinstance(content, str) else sum(len(_text_of(part)) for part in content)
    return size


def _text_of(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case _:
            return ""

"""A request's prompt -> ids: text, text with a suffix, messages through the chat template, or ids. Limits:
the numbers that a request must stay within.

Text that users quote is kept from being read as control tokens here. Knows no sampling and no scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

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
from runtime.processes.frontend.images.pictures import PictureReader, check_placeholders, expand, put_pictures
from runtime.protocol.errors import BadRequest, PromptTooLong
from runtime.protocol.messages import RAW_ROLE, ImageData, ImageInput, Message
from runtime.protocol.requests.generate import SingleGenerateReq
from runtime.protocol.sampling import UNLIMITED, SamplingParams

_USUAL = 16
"""The most characters that a token of an ordinary text stands for."""
_SEAM = 64
"""Tokens at the end of a text that the following text may change."""
MOST_PIXELS = 192 << 20
"""Bytes of the pictures of one prompt: they travel in one message."""
_DROPPED = 4
"""How much longer than its prompt a conversation may be: templates may leave out earlier turns."""


@dataclass(frozen=True, slots=True)
class Limits:
    """context: tokens of one request, prompt and output together. slots: size of the KV pool. top_logprobs,
    token_ids_logprob: how many a request may ask for at each position. auto_truncate: prompts and outputs
    that are too long are cut instead of refused. bootstrap_port: the usual one of prefill servers, None if
    prompts and outputs are computed here. adapters: whether requests may name one."""

    vocab_size: int
    context: int
    slots: int
    auto_truncate: bool = False
    top_logprobs: int = 32
    token_ids_logprob: int = 64
    bootstrap_port: int | None = None
    adapters: bool = False

    @property
    def prompt(self) -> int:
        return min(self.context, self.slots)

    @property
    def _limit_name(self) -> str:
        return "context length" if self.context <= self.slots else "KV pool"

    def check_length(self, length: int, new_tokens: int, what: str) -> None:
        if length + new_tokens <= self.prompt:
            return
        by_context, name = self.context <= self.slots, self._limit_name
        more = " and a new token" if new_tokens else ""
        raise PromptTooLong(
            f"the {what} has {length} tokens; the {name} is {self.prompt} and must contain them{more}",
            where=what,
            hint="shorten it"
            if by_context
            else "shorten it, or start the engine with a larger max_total_tokens",
        )

    def check_ids(self, ids: Sequence[Any]) -> list[int]:
        """The ids as a list. Raises BadRequest for one that is not in the vocabulary."""
        vocab = self.vocab_size
        for index, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < vocab:
                raise BadRequest(
                    f"must be a token id from 0 to {vocab - 1}, got {token!r}", where=f"input_ids[{index}]"
                )
        return list(ids)

    def fitting(self, ids: list[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        """Prompt and parameters within the limits. An output length by default is cut to the free tokens
        (finish reason "length"); one that was asked for raises PromptTooLong."""
        new, limit = params.max_new_tokens, self.prompt
        if self.auto_truncate:
            ids = ids[: limit - min(new, 1)]
        self.check_length(len(ids), min(new, 1), "prompt")
        free = min(new, limit - len(ids))
        if free == new:
            return ids, params
        if not self.auto_truncate and not is_default_length(new):
            raise PromptTooLong(
                f"{len(ids) + new} tokens are requested in total, {len(ids)} in the prompt and "
                f"{new} new ones; the {self._limit_name} is {limit}",
                where="sampling_params.max_new_tokens",
                hint=f"shorten the prompt, or ask for at most {free} new tokens",
            )
        return ids, msgspec.structs.replace(
            params, max_new_tokens=free, min_new_tokens=min(params.min_new_tokens, free)
        )

    def truncated(self, request: SingleGenerateReq, ids: list[int], new_tokens: int) -> list[int]:
        """The ids that truncate_prompt_tokens keeps."""
        most, limit, field = request.truncate_prompt_tokens, self.prompt, "truncate_prompt_tokens"
        for name in ("choices", "session_params"):
            if getattr(request, name) is not None:
                raise BadRequest(f"cannot be combined with {name}", where=field)
        if most == -1:
            most = max(1, limit - (1 if is_default_length(new_tokens) else new_tokens))
        if most is None or not 0 < most <= limit:
            raise BadRequest(f"must be -1 or from 1 to {limit}, got {most}", where=field)
        return ids[-most:] if request.truncation_side == "left" else ids[:most]


def is_default_length(max_new_tokens: int) -> bool:
    """Whether the output may be as long as the limits allow."""
    return max_new_tokens in (SamplingParams().max_new_tokens, UNLIMITED)


@dataclass(frozen=True, slots=True)
class Prompt:
    """text: None for a prompt of ids. stop_str: ends a turn, or a text with a suffix. images: of `ids`, in
    order."""

    text: str | None
    ids: list[int]
    stop_str: tuple[str, ...] = ()
    images: tuple[ImageInput, ...] = ()


class PromptReader:
    """Thread safe; holds no state of requests.

    A text that cannot be few enough tokens is refused, or with auto_truncate cut, before it is encoded.
    allow_control_tokens: the default of requests. pictures: None for models that take text only.
    completion_template: for prompts with a suffix, a registered name, or None for the one that fits the
    tokenizer. Raises BadRequest for an unknown name.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | TextTemplate | None,
        limits: Limits,
        *,
        allow_control_tokens: bool = False,
        pictures: PictureReader | None = None,
        completion_template: str | None = None,
    ) -> None:
        self._tokenizer, self._template, self._limits, self._pictures = tokenizer, template, limits, pictures
        self._limit, self._truncates = limits.prompt, limits.auto_truncate
        self._control = ControlTokens(tokenizer.control_texts, tokenizer.reply_tags)
        self._allow = allow_control_tokens
        self._takes_media = frozenset(() if pictures is None else ("image",))
        self._completion = choose_completion_template(completion_template)

    def read(self, request: SingleGenerateReq, *, at_least: int = 0) -> Prompt:
        """Raises BadRequest or a kind of it, with the field in `where`. at_least: characters that are read
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
            ids, images = self._with_pictures(self._check_ids(request.input_ids), request.image_data)
            return Prompt(None, ids, images=images)
        most = max(self._limit * self._tokenizer.longest, at_least)
        if not self._truncates:
            size = len(request.text or "") + len(request.suffix or "") + size_of_turns(request.messages or ())
            self._check_size(size, _DROPPED * most if request.messages else most)
        text, media = request.text or "", Rendered("")
        stop_str: tuple[str, ...] = ()
        if request.messages is not None:
            media = self._render(request)
            text, stop_str = media.text, self._turn_stops(request)
        elif request.suffix is not None:
            text, stop_str = self._with_suffix(request, text, request.suffix)
        if self._truncates:
            text = text[:most]
        self._check_size(len(text), most)
        if not at_least and not self._truncates and request.truncate_prompt_tokens is None:
            self._check_beginning(text)
        ids = self._encode(request, text)
        if not ids and request.choices is None:
            # A turn of a session continues the one before it.
            ids = [] if request.session_params else self._tokenizer.start
            if not ids:
                raise BadRequest(
                    "the prompt is empty, and this tokenizer has neither a begin-of-text nor an end-of-text "
                    "token to start from",
                    where=kinds[0],
                )
        ids, images = self._with_pictures(ids, request.image_data or media.images)
        return Prompt(text, ids, stop_str, images)

    def check_text(self, size: int, field: str) -> None:
        self._check_size(size, self._limit * self._tokenizer.longest, field)

    def _check_size(self, size: int, most: int, field: str = "prompt") -> None:
        if size > most:
            raise PromptTooLong(
                f"the {field} has {size} characters; the {self._limit} available tokens hold at most {most}",
                where=field,
                hint="shorten it",
            )

    def _check_beginning(self, text: str) -> None:
        """Refuse a text whose beginning alone is too long: the rest changes only its last few tokens."""
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
        """Ids of a prompt's text, with its pictures, and of the trusted text `more` after it."""
        ids = self._encode(request, text + (self._control.trust(more) if self._hides(request) else more))
        if self._pictures is None:
            return ids
        check_placeholders(ids, self._pictures.spec.image_id, len(images))
        return expand(ids, self._pictures.spec.image_id, images)

    def _check_images(self, request: SingleGenerateReq) -> None:
        if self._pictures is None:
            raise BadRequest(
                "image_data is not supported: this model accepts only text",
                where="image_data",
                hint="leave it out, or use a model that accepts images",
            )
        if request.messages is not None:
            raise BadRequest("needs text or input_ids; in messages, use image parts", where="image_data")

    def _with_pictures(
        self, ids: list[int], images: Sequence[ImageData] | None
    ) -> tuple[list[int], tuple[ImageInput, ...]]:
        """The ids with pictures in place of placeholders, and the pictures."""
        reader = self._pictures
        if reader is None:
            return ids, ()
        images = images or ()
        check_placeholders(ids, reader.spec.image_id, len(images))
        if not images:
            return ids, ()
        pictures = reader.read(images, self._limit - len(ids) + len(images))
        whole, inputs = put_pictures(ids, reader.spec.image_id, pictures)
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
            # A template's message may quote the rendered text.
            error.message = self._control.shown(error.message)
            raise

    @cached_property
    def _image_token(self) -> str | None:
        """The placeholder of a picture outside of turns."""
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
        """The token that the Jinja template writes after a reply, unless the template has one of the
        checkpoint's end tokens: those end a reply of several messages, too."""
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

    def _with_suffix(
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
        names = sorted(template.name for template in fitting) or list(completion_template_registry)
        raise BadRequest(
            f"it is not known how this model does fill-in-the-middle: {why}",
            where="suffix",
            hint=f"start the engine with completion_template= one of {', '.join(names)}",
        )

    def _hides(self, request: SingleGenerateReq) -> bool:
        """Whether control tokens in the texts of this prompt are read as letters. A plain text is read as it
        is."""
        allowed = self._allow if request.allow_control_tokens is None else request.allow_control_tokens
        return not allowed and (request.messages is not None or request.suffix is not None)

    def _encode(self, request: SingleGenerateReq, text: str) -> list[int]:
        if not self._hides(request):
            return self._tokenizer.encode(text)
        return self._tokenizer.encode_spans((span.text, span.plain) for span in self._control.spans(text))

    def _check_ids(self, ids: Any) -> list[int]:
        if not isinstance(ids, (list, tuple)):
            raise BadRequest(f"must be a list of token ids, got {type(ids).__name__}", where="input_ids")
        if len(ids) > 2 * self._limit and not self._truncates:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens; there is room for {self._limit}",
                where="prompt",
                hint="shorten it",
            )
        if not ids:
            raise BadRequest("the prompt is empty", where="input_ids")
        return self._limits.check_ids(ids)


def size_of_turns(messages: Iterable[Message]) -> int:
    size = 0
    for message in messages:
        size += len(message.reasoning_content or "") + sum(len(call.arguments) for call in message.tool_calls)
        if isinstance(message.content, str):
            size += len(message.content)
        else:
            texts = (part.get("text") for part in message.content if part.get("type") == "text")
            size += sum(len(text) for text in texts if isinstance(text, str))
    return size


def has_media(messages: Iterable[Message]) -> bool:
    parts = (part for message in messages if isinstance(message.content, list) for part in message.content)
    return any(part.get("type") != "text" for part in parts)

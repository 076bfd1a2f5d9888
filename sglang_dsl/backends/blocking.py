"""BaseBackend: base class for backends written for sglang, with blocking methods. Knows no programs."""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from runtime.formats.chat import get_chat_template
from runtime.formats.chat.render import render_prompt
from runtime.formats.chat.template import ChatTemplate
from sglang_dsl.backends import base
from sglang_dsl.choices import METHODS, ChoicesDecision
from sglang_dsl.concurrency.threads import Threads, awaited
from sglang_dsl.errors import BackendError, Unsupported

T = TypeVar("T")
MOST_AT_ONCE = 64
_FORMS = ("regex", "json_schema")
_OPTIONS = frozenset({"return_text_in_logprobs"})


@dataclass
class SglSamplingParams:
    """The sampling parameters of a generation. `dtype` is None: a dtype is sent as its regex."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] | None = ()
    stop_regex: str | Sequence[str] | None = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    json_schema: str | None = None
    dtype: str | None = None
    regex: str | None = None

    def clone(self) -> SglSamplingParams:
        return copy.deepcopy(self)

    def to_openai_kwargs(self) -> dict[str, Any]:
        """As parameters of OpenAI's APIs."""
        same = ("stop", "temperature", "top_p", "frequency_penalty", "presence_penalty")
        return self._named(*same, max_new_tokens="max_tokens")

    to_litellm_kwargs = to_openai_kwargs

    def to_anthropic_kwargs(self) -> dict[str, Any]:
        """As parameters of Anthropic's API."""
        return self._named(
            "temperature", "top_p", "top_k", stop="stop_sequences", max_new_tokens="max_tokens"
        )

    def to_vertexai_kwargs(self) -> dict[str, Any]:
        """As parameters of Vertex AI's generation config."""
        return self._named(
            "temperature", "top_p", "top_k", stop="stop_sequences", max_new_tokens="max_output_tokens"
        )

    def to_srt_kwargs(self) -> dict[str, Any]:
        """As `sampling_params` of POST /generate."""
        return self._named(
            "max_new_tokens", "min_new_tokens", "n", "stop", "stop_token_ids", "stop_regex", "temperature",
            "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "ignore_eos", "regex",
            "json_schema",
        )  # fmt: skip

    def _named(self, *same: str, **renamed: str) -> dict[str, Any]:
        names = {name: name for name in same} | renamed
        return {
            target: list(value) if isinstance(value, tuple) else value
            for name, target in names.items()
            if (value := getattr(self, name)) not in (None, ()) and not (name == "top_k" and value == -1)
        }


@dataclass
class StateView:
    """The state, for the methods of a BaseBackend.

    text_          the prompt, turns as the backend's chat template writes them
    messages_      the finished turns
    cur_role       the turn that is open, None outside
    chat_template  the backend's
    """

    text_: str
    messages_: list[dict[str, Any]]
    cur_role: str | None
    chat_template: ChatTemplate
    images_: list[Any] = field(default_factory=list)

    def text(self) -> str:
        return self.text_

    def messages(self) -> list[dict[str, Any]]:
        return self.messages_


class BaseBackend(abc.ABC):  # noqa: B024 - it can be instantiated, as in sglang
    """Subclass it with `generate`, and with `generate_stream` and `select` if the backend has them. Each call
    runs on a thread of its own, MOST_AT_ONCE at a time; the result of a cancelled one is dropped. The
    package's own backends, which are asynchronous (sglang_dsl.backends.base.Backend), count as instances."""

    support_concate_and_append = False
    chat_template: ChatTemplate | None = None

    @functools.cached_property
    def endpoint(self) -> base.Backend:
        """The backend that programs run on."""
        return _OnThreads(self)

    def get_model_name(self) -> str:
        """The name of the model."""
        return type(self).__name__

    def get_chat_template(self) -> ChatTemplate:
        """The template of `s.text_`."""
        return self.chat_template or get_chat_template("default")

    def generate(self, s: StateView, sampling_params: SglSamplingParams) -> tuple[Any, dict[str, Any]]:
        """The text (for n > 1 a list) and its meta."""
        raise NotImplementedError

    def generate_stream(
        self, s: StateView, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Pieces of the text, each with its meta. Optional."""
        raise NotImplementedError

    def select(
        self, s: StateView, choices: list[str], temperature: float, choices_method: Any = None
    ) -> ChoicesDecision:
        """One of `choices`."""
        raise NotImplementedError

    def cache_prefix(self, prefix_str: str) -> None:
        """Compute the beginning of a prompt. Does nothing unless overridden, like the methods below."""
        return

    def flush_cache(self) -> bool | None:
        """Drop what is cached."""
        return False

    def get_server_info(self) -> dict[str, Any]:
        """What the backend reports about itself."""
        return {}

    def shutdown(self) -> None:
        """Called when the backend is closed."""
        return


BaseBackend.register(base.Backend)  # type: ignore[type-abstract]


class _OnThreads(base.Backend):
    """A BaseBackend, called on threads."""

    def __init__(self, inner: BaseBackend) -> None:
        self._inner, self.name = inner, type(inner).__name__
        self._threads = self._pool()

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def identity(self) -> str:
        return f"{self.name}:{self._inner.get_model_name()}"

    async def generate(self, call: base.Call) -> base.Completion:
        view, params = self._view(call.prompt), self._params(call)
        text, meta = await self._call(self._inner.generate, view, params)
        texts = tuple(text) if isinstance(text, list | tuple) else (text,)
        if len(texts) != call.n or not all(isinstance(one, str) for one in texts):
            raise BackendError(f"generate returned {text!r:.200} instead of {call.n} texts")
        return base.Completion(texts, dict(meta or {}))

    async def stream(self, call: base.Call) -> AsyncIterator[base.Delta]:
        if type(self._inner).generate_stream is BaseBackend.generate_stream:
            done = await self.generate(call)
            yield base.Delta(done.texts[0], done.meta)
            return
        view, params = self._view(call.prompt), self._params(call)
        pieces = await self._call(self._inner.generate_stream, view, params)
        meta: dict[str, Any] = {}
        while (piece := await self._call(next, pieces, None)) is not None:
            text, more = piece
            meta |= more or {}
            if text:
                yield base.Delta(text)
        yield base.Delta("", meta)

    async def score(self, call: base.ChoiceCall) -> base.ChoiceScores:
        view = self._view(call.prompt)
        name = "unconditional_likelihood_normalized" if call.unconditional else "token_length_normalized"
        result: Any = await self._call(
            self._inner.select, view, list(call.choices), call.temperature, METHODS[name]
        )
        choice, extra = (
            (result.decision, result.meta_info) if isinstance(result, ChoicesDecision) else (result, {})
        )
        if choice not in call.choices:
            raise BackendError(f"select returned {choice!r:.80}, which is not one of the options")
        index, prior = call.choices.index(choice), (0.0,) if call.unconditional else None
        scores = (
            base.ChoiceScore((0.0 if at == index else -math.inf,), (), prior)
            for at in range(len(call.choices))
        )
        return base.ChoiceScores(tuple(scores), {**extra, "exact": False, "how": "the backend's own select"})

    async def commit(self, prompt: base.Prompt) -> None:
        await self._call(self._inner.cache_prefix, self._view(prompt).text_)

    async def aflush_cache(self) -> bool:
        return bool(await self._call(self._inner.flush_cache))

    async def info(self) -> dict[str, Any]:
        return {"backend": self.name, **(await self._call(self._inner.get_server_info) or {})}

    async def aclose(self) -> None:
        await self._call(self._inner.shutdown)
        self._threads.close(wait=False)
        self._threads = self._pool()  # without a thread until the next call

    def _pool(self) -> Threads:
        return Threads(MOST_AT_ONCE, f"sglang-dsl-{self.name}")

    def _view(self, prompt: base.Prompt) -> StateView:
        template, text = self._inner.get_chat_template(), prompt.plain_text
        last = prompt.messages[-1] if prompt.messages else None
        done = [
            {"role": message.role, "content": copy.deepcopy(message.content)}
            for message in prompt.messages
            if not message.open and message.role != "raw"
        ]
        return StateView(
            render_prompt(prompt.messages, template) if text is None else text,
            done,
            last.role if last is not None and last.open and last.role != "raw" else None,
            template,
        )

    def _params(self, call: base.Call) -> SglSamplingParams:
        """Raises Unsupported for parameters that they do not have."""
        fields = {one.name for one in dataclasses.fields(SglSamplingParams)}
        values = {
            name: getattr(call.sampling, name) for name in call.sampling.__struct_fields__ if name != "n"
        }
        unchanged = type(call.sampling)()
        unable = [
            name for name, value in values.items() if name not in fields and value != getattr(unchanged, name)
        ]
        constraint = call.constraint
        if constraint is not None and constraint.kind not in _FORMS:
            unable.append(constraint.kind)
        if unable := sorted({*unable, *(call.options.keys() - _OPTIONS)}):
            raise Unsupported(f"a BaseBackend does not support {', '.join(unable)}")
        form: dict[str, Any] = {} if constraint is None else {constraint.kind: constraint.spec}
        return SglSamplingParams(
            **{name: value for name, value in values.items() if name in fields},
            n=call.n,
            return_logprob=call.return_logprob or None,
            logprob_start_len=call.logprob_start_len if call.logprob_start_len >= 0 else None,
            top_logprobs_num=call.top_logprobs or None,
            return_text_in_logprobs=call.options.get("return_text_in_logprobs"),
            **form,
        )

    async def _call(self, method: Callable[..., T], *arguments: Any) -> T:
        """Call a method on a thread. Raises Unsupported if the subclass does not implement it."""
        try:
            return await awaited(self._threads.submit, functools.partial(method, *arguments))
        except NotImplementedError as error:
            raise Unsupported(f"{self.name} has no {getattr(method, '__name__', 'this')}") from error

"""ApiBackend: a model behind another provider's API. It checks what the API supports, sends the request, and
reads the reply: whole, as a stream, or as a choice. Knows no API's wire format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from runtime.protocol.sampling import SamplingParams
from sglang_dsl.backends.base import Backend, Call, ChoiceCall, ChoiceScores, Completion, Delta
from sglang_dsl.backends.common.chat_choices import ChatChoices, choice_form
from sglang_dsl.backends.common.prompts import faults
from sglang_dsl.backends.common.remote import Shaped, form_for, renamed
from sglang_dsl.backends.common.transport import Limits, Transport, json_body, json_event
from sglang_dsl.conversation.requests import TokenUsage
from sglang_dsl.errors import BackendError, Unsupported


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A request: `body` is sent as JSON to `path`, which is relative to the API's address."""

    path: str
    body: dict[str, Any]


class ApiReply(ABC):
    """Reads the reply to one request, either whole or as a stream of events.

    finished  whether the stream has reported the end of the reply
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.finished = False

    @abstractmethod
    def read(self, answer: Any, n: int) -> tuple[list[str], list[dict[str, Any]]]:
        """The n texts of a whole reply, and their metadata. Raises BackendError."""

    @abstractmethod
    def event(self, data: dict[str, Any]) -> Delta:
        """The text and the reasoning in one event of a stream. Raises BackendError."""

    @abstractmethod
    def meta(self) -> dict[str, Any]:
        """The metadata of a finished stream. Raises BackendError."""


class ApiBackend(Backend):
    """Base class of the backends for other providers' APIs. A subclass writes requests (`request`) and reads
    replies (`reply`); it says what its API can do with these attributes:

    takes            the sampling parameters that the API has: our name -> its name
    samples          whether one request can ask for several texts (n > 1)
    logprobs         whether replies can have log-probabilities
    constraint_hint  what to do about a constraint that the API cannot enforce

    What the API cannot do raises Unsupported before anything is sent, in `generate`, `stream` and `score`.
    token_usage counts what was charged.
    """

    speculates = calls_tools = True
    takes: Mapping[str, str]
    samples: ClassVar[bool] = True
    logprobs: ClassVar[bool] = True
    constraint_hint: ClassVar[str] = "use json_schema or choices"
    _transport: Transport

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.token_usage = TokenUsage()
        self._choices = ChatChoices(self.name)

    def _connect(
        self,
        url: str,
        headers: Mapping[str, str],
        default_headers: Mapping[str, str] | None,
        timeout: float,
        max_retries: int,
    ) -> None:
        """Send requests to this address. Opens no connection yet."""
        self._transport = Transport(
            url.rstrip("/"),
            {**headers, **(default_headers or {})},
            limits=Limits(read_s=timeout, retries=max_retries),
            name=self.name,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model_name!r})"

    def get_model_name(self) -> str:
        """The model's name, as passed."""
        return self.model_name

    @property
    def identity(self) -> str:
        return f"{self.name}:{self.model_name}"

    # -- what a subclass does --------------------------------------------------------------------------------

    @abstractmethod
    def request(self, call: Call, sampling: dict[str, Any], shaped: Shaped, *, stream: bool) -> ApiRequest:
        """The request for a call. Raises Unsupported.

        sampling  the sampling parameters under the API's names, without max_new_tokens
        shaped    has the JSON schema to ask for, if there is one
        """

    @abstractmethod
    def reply(self, request: ApiRequest) -> ApiReply:
        """A reader for the reply to this request."""

    def shape(self, call: Call) -> Shaped:
        """How the API is asked for the call's constraint. Raises Unsupported."""
        return Shaped(call, form_for(call, self.name, self.constraint_hint))

    async def send(self, request: ApiRequest, timeout: float | None) -> Any:
        """The JSON of the whole answer. Raises BackendError."""
        with faults(self.name):
            return await self._transport.post(request.path, json_body(request.body), timeout)

    async def events(self, request: ApiRequest, timeout: float | None) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed answer. Raises BackendError."""
        with faults(self.name):
            events = self._transport.events(request.path, json_body(request.body), timeout)
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    if event == "[DONE]":
                        return
                    yield json_event(event, self.name)

    # -- the verbs -------------------------------------------------------------------------------------------

    async def generate(self, call: Call) -> Completion:
        request, shaped = self._negotiated(call)
        texts, metas = await self._texts(request, call)
        return shaped.completion(texts, metas)

    async def stream(self, call: Call) -> AsyncIterator[Delta]:
        self._check(call)
        if call.n != 1:
            raise Unsupported("a stream holds one text", hint="use n=1, or run without stream")
        if call.may_call_tools:
            async for delta in self.whole(call):
                yield delta
            return
        request, shaped = self._negotiated(call, stream=True)
        reply = self.reply(request)
        length = 0
        reasoning: list[str] = []
        async with aclosing(self.events(request, call.timeout)) as events:  # type: ignore[type-var]
            async for data in events:
                delta = reply.event(data)
                length += len(delta.text)
                if delta.reasoning:
                    reasoning.append(delta.reasoning)
                piece = shaped.piece(delta.text)
                if piece or delta.reasoning:
                    yield Delta(piece, reasoning=delta.reasoning)
        if not reply.finished:
            raise BackendError(
                f"the stream broke off after {length} characters",
                backend=self.name,
                retryable=True,
                hint="the connection or the server failed; the text so far is incomplete",
            )
        meta = reply.meta()
        if reasoning:
            meta["reasoning_content"] = "".join(reasoning)
        self.token_usage.count(meta)
        yield shaped.last(meta)

    async def score(self, call: ChoiceCall) -> ChoiceScores:
        """One reply constrained to the options. The other options are not scored, which the metadata
        reports."""

        async def ask(max_tokens: int, sampling: dict[str, Any]) -> tuple[str, dict[str, Any]]:
            limit = SamplingParams(max_new_tokens=max_tokens)
            one = Call(call.prompt, limit, timeout=call.timeout, tool_choice="none")
            request = self._build(one, dict(sampling), Shaped(one, choice_form(call.choices)))
            texts, metas = await self._texts(request, one)
            return texts[0], metas[0]

        return await self._choices.scores(call, ask)

    async def aclose(self) -> None:
        await self._transport.aclose()

    # -- negotiation -----------------------------------------------------------------------------------------

    def _negotiated(self, call: Call, *, stream: bool = False) -> tuple[ApiRequest, Shaped]:
        """The request for a call, and how its reply is read. Raises Unsupported."""
        self._check(call)
        shaped = self.shape(call)
        sampling: dict[str, Any] = msgspec.to_builtins(call.sampling)
        sampling.pop("max_new_tokens", None)
        return self._build(call, sampling, shaped, stream=stream), shaped

    def _check(self, call: Call) -> None:
        """Raise Unsupported for what no request to this API can ask for."""
        refused = sorted(call.options)
        if call.n > 1 and not self.samples:
            refused.append("n above 1")
        if call.return_logprob and not self.logprobs:
            refused.append("return_logprob")
        if call.top_logprobs > 0 and not self.logprobs:
            refused.append("top_logprobs_num")
        if call.logprob_start_len >= 0:
            refused.append("logprob_start_len")
        if refused:
            of_prompt = "the API returns no log-probabilities of the prompt"
            raise Unsupported(
                f"{self.name} does not take {', '.join(refused)}",
                backend=self.name,
                hint=of_prompt if call.logprob_start_len >= 0 else None,
            )

    def _build(
        self, call: Call, sampling: dict[str, Any], shaped: Shaped, *, stream: bool = False
    ) -> ApiRequest:
        """The request with these sampling parameters, under our names. Raises Unsupported for those that the
        API does not have."""
        if stops := shaped.stops(sampling.pop("stop", ())):
            sampling["stop"] = stops
        return self.request(call, renamed(sampling, self.takes, self.name), shaped, stream=stream)

    async def _texts(self, request: ApiRequest, call: Call) -> tuple[list[str], list[dict[str, Any]]]:
        """The texts of the answer to a request, and their metadata. Raises BackendError."""
        answer = await self.send(request, call.timeout)
        texts, metas = self.reply(request).read(answer, call.n)
        self.token_usage.count(metas[0])
        return texts, metas

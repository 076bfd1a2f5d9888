"""ApiBackend: a model behind another provider's API. Knows no API's wire format."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from runtime.protocol.constraint import JSON_OPTIONS, Constraint
from runtime.protocol.sampling import SamplingParams
from sglang_dsl.backends.base import Backend, Call, ChoiceCall, ChoiceScore, ChoiceScores, Completion, Delta
from sglang_dsl.backends.common.prompts import faults
from sglang_dsl.backends.common.remote import JsonForm, Shaped, can_check_schemas, json_form
from sglang_dsl.backends.common.transport import Limits, Transport, json_body, json_event
from sglang_dsl.conversation.requests import TokenUsage
from sglang_dsl.errors import BackendError, Unsupported
from sglang_dsl.ir.typed import json_in, unfenced

_REASONING_TOKENS = 8192
"""Tokens for a model that reasons before it takes an option."""


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A request: `body` is sent as JSON to `path`, which is relative to the API's address."""

    path: str
    body: dict[str, Any]


class ApiReply(ABC):
    """Reads the reply to one request from its events; each text of a whole answer is read as one event.

    finished  whether the end of the reply was reported
    """

    finished = False

    @staticmethod
    @abstractmethod
    def samples(answer: Any, n: int) -> list[dict[str, Any]]:
        """A whole answer as an event for each of its n texts. Raises BackendError."""

    @abstractmethod
    def event(self, data: dict[str, Any]) -> Delta:
        """The text and the reasoning in one event. Raises BackendError."""

    @abstractmethod
    def meta(self) -> dict[str, Any]:
        """The metadata of the events so far. Raises BackendError."""


class ApiBackend(Backend):
    """Base class of the backends for other providers' APIs. A subclass writes requests (`request`) and says
    what its API can do with these attributes:

    reply            the class that reads replies
    takes            the sampling parameters that the API has: our name -> its name
    samples          whether one request can ask for several texts (n > 1)
    logprobs         whether replies can have log-probabilities
    constraint_hint  what to do about a constraint that the API cannot enforce

    What the API cannot do raises Unsupported before anything is sent, in `generate`, `stream` and `score`.
    token_usage counts what was charged.
    """

    speculates = calls_tools = True
    reply: ClassVar[type[ApiReply]]
    takes: Mapping[str, str]
    samples: ClassVar[bool] = True
    logprobs: ClassVar[bool] = True
    constraint_hint: ClassVar[str] = "use json_schema or choices"
    _transport: Transport

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.token_usage = TokenUsage()
        # As reasoning models do: choices at temperature 0 are then requested without one.
        self._refuses_temperature = False

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

    def shape(self, call: Call) -> Shaped:
        """How the API is asked for the call's constraint. Raises Unsupported."""
        return Shaped(call, None if call.constraint is None else self._form(call.constraint))

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
        reply = self.reply()
        length = 0
        reasoning: list[str] = []
        async with aclosing(self.events(request, call.timeout)) as events:  # type: ignore[type-var]
            async for data in events:
                delta = reply.event(data)
                length += len(delta.text)
                reasoning.append(delta.reasoning)
                piece = shaped.piece(delta.text)
                if piece or delta.reasoning:
                    yield Delta(piece, reasoning=delta.reasoning)
        if not reply.finished:
            raise BackendError(
                f"the stream broke off after {length} characters",
                retryable=True,
                hint="the connection or the server failed; the text so far is incomplete",
            )
        meta = _with_reasoning(reply.meta(), "".join(reasoning))
        self.token_usage.count(meta)
        yield shaped.last(meta)

    async def score(self, call: ChoiceCall) -> ChoiceScores:
        """One reply constrained to the options; the others are not scored, which the metadata reports."""
        if call.unconditional:
            raise Unsupported(
                "a chat API returns no probabilities of texts without their prompt",
                hint="use the method token_length_normalized",
            )
        max_tokens = 64 + 4 * max(map(len, call.choices))
        sampling: dict[str, Any] = {"temperature": call.temperature}
        if call.temperature and call.seed is not None:
            sampling["seed"] = call.seed
        if self._refuses_temperature and not call.temperature:
            max_tokens, sampling = max_tokens + _REASONING_TOKENS, {}
        try:
            text, meta = await self._option(call, max_tokens, sampling)
        except BackendError as error:
            if not sampling or not _is_about_temperature(error):
                raise
            if call.temperature:
                raise Unsupported(
                    f"the model draws nothing at temperature {call.temperature:g}: {error.message}",
                    status=error.status,
                    hint="leave the temperature of select out",
                ) from error
            self._refuses_temperature = True
            return await self.score(call)
        cut = (meta.get("finish_reason") or {}).get("type") == "length"
        if cut and json_in(text) is None and max_tokens < _REASONING_TOKENS:
            # The model used up the tokens for its reasoning.
            text, meta = await self._option(call, max_tokens + _REASONING_TOKENS, sampling)
        return _picked(call, text, meta if sampling else {**meta, "temperature": None})

    async def _option(
        self, call: ChoiceCall, max_tokens: int, sampling: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        limit = SamplingParams(max_new_tokens=max_tokens)
        one = Call(call.prompt, limit, timeout=call.timeout, tool_choice="none")
        request = self._build(one, dict(sampling), Shaped(one, _choice_form(call.choices)))
        [text], [meta] = await self._texts(request, one)
        return text, meta

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
        unable = {
            "n above 1": call.n > 1 and not self.samples,
            "return_logprob": call.return_logprob and not self.logprobs,
            "top_logprobs_num": call.top_logprobs > 0 and not self.logprobs,
            "logprob_start_len": call.logprob_start_len >= 0,
        }
        if refused := [*sorted(call.options), *(name for name, refuses in unable.items() if refuses)]:
            of_prompt = "the API returns no log-probabilities of the prompt"
            raise Unsupported(
                f"{self.name} does not take {', '.join(refused)}",
                hint=of_prompt if call.logprob_start_len >= 0 else None,
            )

    def _build(
        self, call: Call, sampling: dict[str, Any], shaped: Shaped, *, stream: bool = False
    ) -> ApiRequest:
        """The request with these sampling parameters, under our names. Raises Unsupported."""
        if stops := shaped.stops(sampling.pop("stop", ())):
            sampling["stop"] = stops
        return self.request(call, self.renamed(sampling), shaped, stream=stream)

    def renamed(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Sampling parameters under the API's names. Raises Unsupported for those that it does not take."""
        if unknown := sorted(name for name in sampling if name not in self.takes):
            raise Unsupported(
                f"{self.name} does not take {', '.join(unknown)}",
                hint=f"it supports {', '.join(sorted(self.takes))}; leave the others out for this backend",
            )
        return {self.takes[name]: value for name, value in sampling.items()}

    def check_options(self, constraint: Constraint) -> None:
        """Raise Unsupported if the constraint has more than its kind and text, which no API takes."""
        if fields := [name for name in JSON_OPTIONS if getattr(constraint, name) is not None]:
            raise Unsupported(
                f"{self.name} does not take {', '.join(fields)} together with a constraint",
                hint="leave it out for this backend",
            )

    def _form(self, constraint: Constraint) -> JsonForm:
        """The JSON schema that asks the API for a constraint. Raises Unsupported."""
        self.check_options(constraint)
        form = json_form(constraint)
        if form is None:
            raise Unsupported(
                f"{self.name} cannot enforce {constraint.kind} {constraint.spec:.60}",
                hint=self.constraint_hint,
            )
        if not form.strict and not can_check_schemas():
            raise Unsupported(
                f"{self.name} does not guarantee this schema, and without jsonschema-rs it cannot be checked",
                hint="make every property required and additionalProperties false, or pip install "
                "jsonschema-rs",
            )
        return form

    async def _texts(self, request: ApiRequest, call: Call) -> tuple[list[str], list[dict[str, Any]]]:
        return self.read(await self.send(request, call.timeout), call.n)

    def read(self, answer: Any, n: int) -> tuple[list[str], list[dict[str, Any]]]:
        """The n texts of a whole answer, which is charged, and their metadata. Raises BackendError."""
        texts, metas = [], []
        for data in self.reply.samples(answer, n):
            reply = self.reply()
            delta = reply.event(data)
            texts.append(delta.text)
            metas.append(_with_reasoning(reply.meta(), delta.reasoning))
        self.token_usage.count(metas[0])
        return texts, metas


def _with_reasoning(meta: dict[str, Any], reasoning: str) -> dict[str, Any]:
    return {**meta, "reasoning_content": reasoning} if reasoning else meta


# -- choices -------------------------------------------------------------------------------------------------


def _choice_form(choices: Sequence[str]) -> JsonForm:
    """The reply to ask for: {"choice": one of the options}."""
    schema = {
        "type": "object",
        "properties": {"choice": {"type": "string", "enum": list(dict.fromkeys(choices))}},
        "required": ["choice"],
        "additionalProperties": False,
    }
    return JsonForm(schema, wrapped=False, plain=False, strict=True, name="choice")


def _is_about_temperature(error: BackendError) -> bool:
    refused = isinstance(error, Unsupported) or error.status in (400, 422)
    return refused and "temperature" in error.message.lower()


def _picked(call: ChoiceCall, text: str, meta: dict[str, Any]) -> ChoiceScores:
    """The scores of a reply; meta["invalid"] and meta["reply"] if it is none of the options."""
    meta = {**meta, "exact": False, "how": "structured output"}
    json_text = json_in(text)
    value = unfenced(text) if json_text is None else json.loads(json_text)
    if isinstance(value, dict):
        value = value.get("choice")
    option = value if isinstance(value, str) else json.dumps(value)
    if option not in call.choices:
        meta |= {"reply": text, "invalid": "it is not one of the choices"}
        return ChoiceScores((ChoiceScore((-math.inf,)),) * len(call.choices), meta)
    index = call.choices.index(option)
    scores = (ChoiceScore((0.0 if at == index else -math.inf,)) for at in range(len(call.choices)))
    return ChoiceScores(tuple(scores), meta)

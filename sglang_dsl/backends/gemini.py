"""Gemini: generateContent and streamGenerateContent, of the Gemini API or of Vertex AI, over HTTP.

The wire format is that of ai.google.dev/api/generate-content. Nothing is dropped: what the API cannot say
raises Unsupported. It fetches no credentials: the Gemini API takes a key, Vertex AI an access token.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from runtime.protocol.messages import Message
from sglang_dsl.backends.base import Backend, Call, ChoiceCall, ChoiceScores, Completion, Delta, Prompt
from sglang_dsl.backends.common.remote import (
    Shaped,
    faults,
    form_for,
    image_of,
    options_schema,
    picked,
    room_for,
    spoken,
    turns,
)
from sglang_dsl.backends.common.transport import Limits, Transport
from sglang_dsl.conversation.usage import TokenUsage
from sglang_dsl.errors import BackendError, Unsupported

BASE_URL = "https://generativelanguage.googleapis.com"
TAKES = {
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "stop": "stopSequences",
    "seed": "seed",
    "frequency_penalty": "frequencyPenalty",
    "presence_penalty": "presencePenalty",
}
_FINISHES = {"STOP": "stop", "MAX_TOKENS": "length"}


class Gemini(Backend):
    """`model_name` at the Gemini API. api_key None: the environment's GEMINI_API_KEY or GOOGLE_API_KEY.

    safety_settings  sent as given: a list of {"category", "threshold"}, or a mapping from one to the other
    retries          how often a request that did not begin is sent again (no connection, 429, 503)

    json_schema, choices and the dtypes become structured output (responseJsonSchema). token_usage counts what
    was charged.
    """

    name = "gemini"
    speculates = prefills = True

    def __init__(
        self,
        model_name: str,
        safety_settings: Any = None,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        default_headers: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        max_retries: int = 3,
    ) -> None:
        self.model_name = model_name
        self.token_usage = TokenUsage()
        self._safety = _safety(safety_settings)
        environment = os.environ.get("GEMINI_API_KEY") or os.environ.get("GOOGLE_API_KEY") or ""
        key = environment if api_key is None else api_key
        self._connect(
            base_url or BASE_URL,
            {"x-goog-api-key": key} if key else {},
            default_headers,
            timeout,
            max_retries,
        )

    def _connect(
        self, url: str, own: dict[str, str], more: Mapping[str, str] | None, timeout: float, retries: int
    ) -> None:
        self._transport = Transport(
            url.rstrip("/"),
            own | dict(more or {}),
            limits=Limits(read_s=timeout, retries=retries),
            name=self.name,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model_name!r})"

    def get_model_name(self) -> str:
        """The model's name, as it was given."""
        return self.model_name

    @property
    def identity(self) -> str:
        return f"{self.name}:{self.model_name}"

    def _path(self, verb: str) -> str:
        return f"/v1beta/models/{self.model_name}:{verb}"

    # -- the verbs -------------------------------------------------------------------------------------------

    async def generate(self, call: Call) -> Completion:
        body, shaped = self._request(call)
        answer = await self._post(body, call.timeout)
        texts, metas = _whole(answer, call.n, self.name)
        self._charge(metas[0])
        texts = [shaped.whole(text) for text in texts]
        return Completion(tuple(texts), metas[0] if call.n == 1 else {**metas[0], "samples": metas})

    async def stream(self, call: Call) -> AsyncIterator[Delta]:
        if call.n != 1:
            raise Unsupported("a stream holds one text", hint="use n=1, or run without stream")
        body, shaped = self._request(call)
        length, finish = 0, None
        last: dict[str, Any] = {}
        with faults(self.name):
            path = self._path("streamGenerateContent") + "?alt=sse"
            events = self._transport.events(path, json.dumps(body).encode(), call.timeout)
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    piece, told, last = _event(event, last, self.name)
                    finish = told or finish
                    length += len(piece)
                    if piece := shaped.piece(piece):
                        yield Delta(piece)
        if finish is None:
            raise BackendError(
                f"the stream broke off after {length} characters",
                backend=self.name,
                retryable=True,
                hint="the connection or the server failed; what came so far is not the whole reply",
            )
        meta = _meta(last, finish, self.name)
        self._charge(meta)
        yield Delta(shaped.rest(), meta)

    async def score(self, call: ChoiceCall) -> ChoiceScores:
        """One reply held to the options; the others are not scored, and meta says so."""
        if call.unconditional:
            raise Unsupported("the API gives no probabilities of given texts", backend=self.name)
        config = {
            "maxOutputTokens": room_for(call.choices),
            **_json_schema(options_schema(call.choices)),
        }
        body = {**self._conversation(call.prompt), "generationConfig": config}
        texts, metas = _whole(await self._post(body, call.timeout), 1, self.name)
        self._charge(metas[0])
        return picked(call, texts[0], metas[0], self.name)

    async def aclose(self) -> None:
        await self._transport.aclose()

    # -- requests --------------------------------------------------------------------------------------------

    async def _post(self, body: dict[str, Any], timeout: float | None) -> Any:
        with faults(self.name):
            path = self._path("generateContent")
            return await self._transport.post(path, json.dumps(body).encode(), timeout)

    def _request(self, call: Call) -> tuple[dict[str, Any], Shaped]:
        if call.options or call.logprob_start_len >= 0:
            words = ", ".join([*sorted(call.options), *["logprob_start_len"] * (call.logprob_start_len >= 0)])
            raise Unsupported(f"{self.name} does not take {words}", backend=self.name)
        config: dict[str, Any] = {
            "maxOutputTokens": call.sampling.max_new_tokens,
            **spoken(call.sampling, TAKES, self.name),
        }
        if call.n > 1:
            config["candidateCount"] = call.n
        if call.return_logprob:
            config |= {"responseLogprobs": True, "logprobs": max(1, call.top_logprobs)}
        form = form_for(call, self.name)
        if form is not None:
            config |= _json_schema(form.schema)
        shaped = Shaped(call, form, config, TAKES["stop"])
        return {**self._conversation(call.prompt), "generationConfig": config}, shaped

    def _conversation(self, prompt: Prompt) -> dict[str, Any]:
        done, prefill = turns(prompt, self.name)
        system = [part for m in done if m.role in ("system", "developer") for part in _parts(m, self.name)]
        rest = [m for m in done if m.role not in ("system", "developer")]
        contents = [_wire(message, self.name) for message in [*rest, *([prefill] if prefill else [])]]
        if not contents:
            raise Unsupported(f"{self.name} needs a user turn to reply to", backend=self.name)
        body: dict[str, Any] = {"contents": contents}
        if system:
            body["systemInstruction"] = {"parts": system}
        if self._safety:
            body["safetySettings"] = self._safety
        return body

    def _charge(self, meta: Mapping[str, Any]) -> None:
        self.token_usage.add(meta.get("prompt_tokens") or 0, meta.get("completion_tokens") or 0)


class VertexAI(Gemini):
    """The same models at Vertex AI. project_id and location None: the environment's GCP_PROJECT_ID and
    GCP_LOCATION. `access_token`: an OAuth token, or a function that gives a fresh one; None: the
    environment's GCP_ACCESS_TOKEN."""

    name = "vertexai"

    def __init__(
        self,
        model_name: str,
        safety_settings: Any = None,
        *,
        project_id: str | None = None,
        location: str | None = None,
        access_token: str | Callable[[], str] | None = None,
        base_url: str | None = None,
        default_headers: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        max_retries: int = 3,
    ) -> None:
        super().__init__(model_name, safety_settings, api_key="")
        self._project = project_id or os.environ.get("GCP_PROJECT_ID", "")
        self._location = location or os.environ.get("GCP_LOCATION") or "us-central1"
        if not self._project:
            raise ValueError("VertexAI needs project_id, or GCP_PROJECT_ID in the environment")
        token = os.environ.get("GCP_ACCESS_TOKEN", "") if access_token is None else access_token
        said = token() if callable(token) else token
        url = base_url or f"https://{self._location}-aiplatform.googleapis.com"
        headers = {"Authorization": f"Bearer {said}"} if said else {}
        self._connect(url, headers, default_headers, timeout, max_retries)

    def _path(self, verb: str) -> str:
        where = f"projects/{self._project}/locations/{self._location}"
        return f"/v1/{where}/publishers/google/models/{self.model_name}:{verb}"


def _json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"responseMimeType": "application/json", "responseJsonSchema": schema}


def _safety(given: Any) -> list[dict[str, Any]]:
    if not given:
        return []
    if isinstance(given, Mapping):
        return [{"category": category, "threshold": threshold} for category, threshold in given.items()]
    return [dict(one) for one in given]


def _wire(message: Message, backend: str) -> dict[str, Any]:
    roles = {"user": "user", "assistant": "model", "model": "model"}
    if message.role not in roles or message.tool_calls:
        what = "calls of tools" if message.tool_calls else f"turns of {message.role!r}"
        raise Unsupported(f"{backend} cannot be sent {what} here", backend=backend)
    return {"role": roles[message.role], "parts": _parts(message, backend)}


def _parts(message: Message, backend: str) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"text": message.content}]
    parts: list[dict[str, Any]] = []
    for part in message.content:
        match part:
            case {"type": "text", "text": str(text)}:
                parts.append({"text": text})
            case {"type": "image_url"}:
                image = image_of(part)
                if image.data is not None:
                    parts.append({"inlineData": {"mimeType": image.mime, "data": image.data}})
                else:
                    parts.append({"fileData": {"fileUri": image.url}})
            case _:
                raise Unsupported(
                    f"{backend} takes text and images, not {part.get('type')!r}", backend=backend
                )
    return parts


def _whole(answer: Any, n: int, backend: str) -> tuple[list[str], list[dict[str, Any]]]:
    match answer:
        case {"candidates": list(candidates)} if len(candidates) == n:
            pass
        case {"promptFeedback": {"blockReason": reason}}:
            raise BackendError(f"the prompt was blocked: {reason}", backend=backend)
        case _:
            raise BackendError(
                f"the API's answer has not {n} candidates: {str(answer)[:200]!r}", backend=backend
            )
    texts = [_said(candidate) for candidate in candidates]
    return texts, [_meta(answer, candidate.get("finishReason"), backend) for candidate in candidates]


def _said(candidate: Mapping[str, Any]) -> str:
    parts = (candidate.get("content") or {}).get("parts") or ()
    return "".join(part.get("text", "") for part in parts if not part.get("thought"))


def _event(event: str, last: dict[str, Any], backend: str) -> tuple[str, str | None, dict[str, Any]]:
    """The piece, the finish reason where it is told, and what is known of the whole by now."""
    try:
        data = json.loads(event)
    except ValueError as error:
        raise BackendError(f"an event of the stream is no JSON: {event[:200]!r}") from error
    match data:
        case {"error": {"message": message}}:
            raise BackendError(f"the stream ended with an error: {message}", backend=backend)
        case {"promptFeedback": {"blockReason": reason}}:
            raise BackendError(f"the prompt was blocked: {reason}", backend=backend)
        case dict():
            pass
        case _:
            raise BackendError(f"an event of the stream is no object: {event[:200]!r}", backend=backend)
    known = last | {k: data[k] for k in ("usageMetadata", "modelVersion", "responseId") if k in data}
    candidates = data.get("candidates") or [{}]
    return _said(candidates[0]), candidates[0].get("finishReason"), known


def _meta(answer: Mapping[str, Any], reason: Any, backend: str) -> dict[str, Any]:
    if reason not in (None, *_FINISHES):
        raise BackendError(f"the reply was stopped: {reason}", backend=backend)
    usage = answer.get("usageMetadata") or {}
    thought = usage.get("thoughtsTokenCount") or 0
    meta: dict[str, Any] = {"finish_reason": {"type": _FINISHES.get(str(reason), "stop"), "reason": reason}}
    if answer.get("responseId"):
        meta["id"] = answer["responseId"]
    if answer.get("modelVersion"):
        meta["model"] = answer["modelVersion"]
    return meta | {
        "prompt_tokens": usage.get("promptTokenCount") or 0,
        "completion_tokens": (usage.get("candidatesTokenCount") or 0) + thought,
        "cached_tokens": usage.get("cachedContentTokenCount") or 0,
        "reasoning_tokens": thought,
    }

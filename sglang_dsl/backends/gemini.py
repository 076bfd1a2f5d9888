"""Gemini: generateContent and streamGenerateContent, of the Gemini API or of Vertex AI, over HTTP.

The wire format is that of ai.google.dev/api/generate-content. Nothing is dropped: what the API cannot express
raises Unsupported. It fetches no credentials: the Gemini API needs a key, Vertex AI an access token.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from runtime.protocol.messages import Message
from sglang_dsl.backends.base import Backend, Call, ChoiceCall, ChoiceScores, Completion, Delta, Prompt
from sglang_dsl.backends.common.chat_choices import ChatChoices, options_schema
from sglang_dsl.backends.common.prompts import arguments, faults, image_of, turns
from sglang_dsl.backends.common.remote import Shaped, form_for, spoken
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
_NUMBERED = "call-"
_FINISHES = {"STOP": "stop", "MAX_TOKENS": "length"}


class Gemini(Backend):
    """The model `model_name` at the Gemini API.

    api_key          None: GEMINI_API_KEY or GOOGLE_API_KEY from the environment
    safety_settings  sent as given: a list of {"category", "threshold"}, or a mapping from one to the other
    max_retries      how often a request is sent again that was not started (no connection, 429, 503)

    json_schema, choices and the dtypes become structured output (responseJsonSchema). token_usage counts what
    was charged.
    """

    name = "gemini"
    speculates = prefills = calls_tools = True

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
        self._choices = ChatChoices(self.name)
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
        return shaped.completion(texts, metas)

    async def stream(self, call: Call) -> AsyncIterator[Delta]:
        if call.n != 1:
            raise Unsupported("a stream holds one text", hint="use n=1, or run without stream")
        if call.prompt.tools and call.tool_choice != "none":
            async for delta in self.whole(call):
                yield delta
            return
        body, shaped = self._request(call)
        length, finish = 0, None
        last: dict[str, Any] = {}
        thoughts: list[str] = []
        with faults(self.name):
            path = self._path("streamGenerateContent") + "?alt=sse"
            events = self._transport.events(path, json.dumps(body).encode(), call.timeout)
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    delta, told, last = _event(event, last, self.name)
                    finish = told or finish
                    length += len(delta.text)
                    thoughts.append(delta.reasoning)
                    piece = shaped.piece(delta.text)
                    if piece or delta.reasoning:
                        yield Delta(piece, reasoning=delta.reasoning)
        if finish is None:
            raise BackendError(
                f"the stream broke off after {length} characters",
                backend=self.name,
                retryable=True,
                hint="the connection or the server failed; the text so far is incomplete",
            )
        meta = _meta(last, finish, self.name) | _thought("".join(thoughts))
        self._charge(meta)
        yield shaped.last(meta)

    async def score(self, call: ChoiceCall) -> ChoiceScores:
        """One reply constrained to the options. The other options are not scored, which the metadata
        reports."""

        async def ask(room: int, words: dict[str, Any]) -> tuple[str, dict[str, Any]]:
            config = {
                "maxOutputTokens": room,
                **{TAKES[word]: value for word, value in words.items()},
                **_json_schema(options_schema(call.choices)),
            }
            body = {
                **self._conversation(call.prompt),
                **self._tools(call.prompt.tools),
                "generationConfig": config,
            }
            texts, metas = _whole(await self._post(body, call.timeout), 1, self.name)
            self._charge(metas[0])
            return texts[0], metas[0]

        return await self._choices.scores(call, ask)

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
        tools = self._tools(call.prompt.tools, call.tool_choice, call.parallel_tools)
        return {**self._conversation(call.prompt), **tools, "generationConfig": config}, shaped

    def _tools(
        self, tools: Sequence[Mapping[str, Any]], choice: str = "none", parallel: bool = True
    ) -> dict[str, Any]:
        """Fields of a request that offer tools; none without any. Raises Unsupported."""
        if not tools:
            return {}
        if not parallel:
            raise Unsupported(
                f"{self.name} cannot be limited to one call per reply",
                backend=self.name,
                hint="leave parallel=False out",
            )
        said = []
        for function in (tool["function"] for tool in tools):
            about = {"description": function["description"]} if function.get("description") else {}
            schema = {"parametersJsonSchema": function["parameters"]} if function.get("parameters") else {}
            said.append({"name": function["name"], **about, **schema})
        mode: dict[str, Any] = {"mode": {"auto": "AUTO", "none": "NONE"}.get(choice, "ANY")}
        if choice.startswith("="):
            mode["allowedFunctionNames"] = [choice[1:]]
        return {"tools": [{"functionDeclarations": said}], "toolConfig": {"functionCallingConfig": mode}}

    def _conversation(self, prompt: Prompt) -> dict[str, Any]:
        done, prefill = turns(prompt, self.name)
        system = [part for m in done if m.role in ("system", "developer") for part in _parts(m, self.name)]
        rest = [m for m in done if m.role not in ("system", "developer")]
        contents = _contents([*rest, *([prefill] if prefill else [])], self.name)
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
    """The same models at Vertex AI.

    project_id, location  None: GCP_PROJECT_ID and GCP_LOCATION from the environment
    access_token          an OAuth token, or a function that returns a fresh one; None: GCP_ACCESS_TOKEN from
                          the environment

    Other keyword arguments as for Gemini.
    """

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


def _contents(messages: Sequence[Message], backend: str) -> list[dict[str, Any]]:
    """Turns as the API takes them; the results of one turn's calls stand in one turn."""
    contents: list[dict[str, Any]] = []
    names: dict[str | None, str] = {}
    before = ""
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        if message.role != "tool":
            contents.append(_wire(message, backend))
        elif message.tool_call_id not in names:
            raise Unsupported(
                f"{backend} supports a tool turn only after a call of that tool", backend=backend
            )
        else:
            result = _result(message, names[message.tool_call_id], backend)
            if before == "tool":
                contents[-1]["parts"].append(result)
            else:
                contents.append({"role": "user", "parts": [result]})
        before = message.role
    return contents


def _result(message: Message, name: str, backend: str) -> dict[str, Any]:
    """A tool's answer, which is an object for this API."""
    text = "".join(part.get("text", "") for part in _parts(message, backend))
    try:
        data = json.loads(text)
    except ValueError:
        data = text
    own = {} if _made_up(message.tool_call_id) else {"id": (message.tool_call_id or "").partition("#")[0]}
    response = data if isinstance(data, dict) else {"result": data}
    return {"functionResponse": {**own, "name": name, "response": response}}


def _wire(message: Message, backend: str) -> dict[str, Any]:
    roles = {"user": "user", "assistant": "model", "model": "model"}
    if message.role not in roles:
        raise Unsupported(f"{backend} does not support turns of {message.role!r} here", backend=backend)
    parts = _parts(message, backend) if message.content or not message.tool_calls else []
    for call in message.tool_calls:
        own, _, signature = (call.id or "").partition("#")
        said = {} if _made_up(call.id) else {"id": own}
        part: dict[str, Any] = {"functionCall": {**said, "name": call.name, "args": arguments(call)}}
        if signature:
            part["thoughtSignature"] = signature
        parts.append(part)
    return {"role": roles[message.role], "parts": parts}


def _called(candidate: Mapping[str, Any]) -> dict[str, Any]:
    """What meta tells of a candidate's calls. The API may give a call no id, and a signature of the model's
    thoughts that it wants to see again: both travel in the id, "ID#SIGNATURE"."""
    found: list[dict[str, Any]] = []
    for part in (candidate.get("content") or {}).get("parts") or ():
        match part:
            case {"functionCall": {"name": str(name), **more}}:
                signature = part.get("thoughtSignature")
                own = more.get("id") or f"{_NUMBERED}{len(found)}"
                call_id = f"{own}#{signature}" if signature else own
                found.append({"id": call_id, "name": name, "arguments": json.dumps(more.get("args") or {})})
    return {"tool_calls": found} if found else {}


def _made_up(call_id: str | None) -> bool:
    """Whether a call's id is not the API's own."""
    return not call_id or call_id.startswith(_NUMBERED)


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
                    f"{backend} supports text and images, not {part.get('type')!r}", backend=backend
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
                f"the API's answer does not have {n} candidates: {str(answer)[:200]!r}", backend=backend
            )
    texts = [_said(candidate) for candidate in candidates]
    reasons = [_meta(answer, candidate.get("finishReason"), backend) for candidate in candidates]
    found = zip(reasons, candidates, strict=True)
    return texts, [meta | _thought(_said(one, thought=True)) | _called(one) for meta, one in found]


def _said(candidate: Mapping[str, Any], *, thought: bool = False) -> str:
    """The text of a candidate, or its thoughts."""
    parts = (candidate.get("content") or {}).get("parts") or ()
    return "".join(part.get("text", "") for part in parts if bool(part.get("thought")) is thought)


def _thought(text: str) -> dict[str, Any]:
    return {"reasoning_content": text} if text else {}


def _event(event: str, last: dict[str, Any], backend: str) -> tuple[Delta, str | None, dict[str, Any]]:
    """The piece, the finish reason where it is told, and what is known of the whole by now."""
    try:
        data = json.loads(event)
    except ValueError as error:
        raise BackendError(f"an event of the stream is not JSON: {event[:200]!r}") from error
    match data:
        case {"error": {"message": message}}:
            raise BackendError(f"the stream ended with an error: {message}", backend=backend)
        case {"promptFeedback": {"blockReason": reason}}:
            raise BackendError(f"the prompt was blocked: {reason}", backend=backend)
        case dict():
            pass
        case _:
            raise BackendError(f"an event of the stream is not an object: {event[:200]!r}", backend=backend)
    known = last | {k: data[k] for k in ("usageMetadata", "modelVersion", "responseId") if k in data}
    candidates = data.get("candidates") or [{}]
    first = candidates[0]
    return Delta(_said(first), reasoning=_said(first, thought=True)), first.get("finishReason"), known


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

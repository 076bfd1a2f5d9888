"""Gemini: generateContent and streamGenerateContent (ai.google.dev/api/generate-content), of the Gemini API
or of Vertex AI. What the API cannot express raises Unsupported. It fetches no credentials.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.protocol.messages import Message
from sglang_dsl.backends.base import Call, Delta, Prompt
from sglang_dsl.backends.common.api import ApiBackend, ApiReply, ApiRequest
from sglang_dsl.backends.common.prompts import Part, arguments_of, parts_of, turns
from sglang_dsl.backends.common.remote import Shaped
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


class GeminiReply(ApiReply):
    """A generateContent response, or the responses of a stream."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}
        self._reason: str | None = None
        # As in the runtime's own meta: (log-probability, id, text) per token.
        self._logprobs: list[tuple[float, int | None, str]] = []
        self._tops: list[list[tuple[float, int | None, str]]] = []
        self._calls: list[dict[str, Any]] = []

    @staticmethod
    def samples(answer: Any, n: int) -> list[dict[str, Any]]:
        match answer:
            case {"candidates": list(candidates)} if len(candidates) == n:
                return [{**answer, "candidates": [one]} for one in candidates]
            case {"promptFeedback": {"blockReason": reason}}:
                raise BackendError(f"the prompt was blocked: {reason}")
            case _:
                raise BackendError(f"the API's answer does not have {n} candidates: {str(answer)[:200]!r}")

    def event(self, data: dict[str, Any]) -> Delta:
        match data:
            case {"error": {"message": message}}:
                raise BackendError(f"the stream ended with an error: {message}")
            case {"promptFeedback": {"blockReason": reason}}:
                raise BackendError(f"the prompt was blocked: {reason}")
        self._known |= {k: data[k] for k in ("usageMetadata", "modelVersion", "responseId") if k in data}
        candidate = (data.get("candidates") or [{}])[0]
        result = candidate.get("logprobsResult") or {}
        self._logprobs += map(_token, result.get("chosenCandidates") or ())
        for step in result.get("topCandidates") or ():
            self._tops.append([_token(one) for one in step.get("candidates") or ()])
        self._reason = candidate.get("finishReason") or self._reason
        self.finished = self._reason is not None
        text = reasoning = ""
        for part in (candidate.get("content") or {}).get("parts") or ():
            if part.get("thought"):
                reasoning += part.get("text", "")
            else:
                text += part.get("text", "")
            if (call := part.get("functionCall")) and "name" in call:
                self._add_call(call, part.get("thoughtSignature"))
        return Delta(text, reasoning=reasoning)

    def _add_call(self, call: Mapping[str, Any], signature: str | None) -> None:
        """The id keeps the signature of the thoughts, which the API expects back: "ID#SIGNATURE"."""
        api_id = call.get("id") or f"{_NUMBERED}{len(self._calls)}"
        call_id = f"{api_id}#{signature}" if signature else api_id
        arguments = json.dumps(call.get("args") or {})
        self._calls.append({"id": call_id, "name": call["name"], "arguments": arguments})

    def meta(self) -> dict[str, Any]:
        if self._reason not in (None, *_FINISHES):
            raise BackendError(f"the reply was stopped: {self._reason}")
        usage = self._known.get("usageMetadata") or {}
        thought = usage.get("thoughtsTokenCount") or 0
        kind = _FINISHES.get(str(self._reason), "stop")
        meta: dict[str, Any] = {"finish_reason": {"type": kind, "reason": self._reason}}
        for name, key in (("id", "responseId"), ("model", "modelVersion")):
            if self._known.get(key):
                meta[name] = self._known[key]
        meta |= {
            "prompt_tokens": usage.get("promptTokenCount") or 0,
            "completion_tokens": (usage.get("candidatesTokenCount") or 0) + thought,
            "cached_tokens": usage.get("cachedContentTokenCount") or 0,
            "reasoning_tokens": thought,
        }
        if self._logprobs:
            meta |= {"output_token_logprobs": self._logprobs, "output_top_logprobs": self._tops}
        return meta | ({"tool_calls": self._calls} if self._calls else {})


def _token(candidate: Mapping[str, Any]) -> tuple[float, int | None, str]:
    # Fields at their defaults may be missing, as in all of Google's JSON.
    return candidate.get("logProbability", 0.0), candidate.get("tokenId"), candidate.get("token", "")


class Gemini(ApiBackend):
    """The model `model_name` at the Gemini API.

    api_key          None: GEMINI_API_KEY or GOOGLE_API_KEY from the environment
    safety_settings  sent as given: a list of {"category", "threshold"}, or a mapping from one to the other
    max_retries      how often a request is sent again that was not started (no connection, 429, 503)

    json_schema, choices and the dtypes become structured output (responseJsonSchema). token_usage counts what
    was charged.
    """

    name = "gemini"
    reply = GeminiReply
    prefills = True
    takes = TAKES

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
        super().__init__(model_name)
        self._safety = _safety(safety_settings)
        environment = os.environ.get("GEMINI_API_KEY") or os.environ.get("GOOGLE_API_KEY") or ""
        key = environment if api_key is None else api_key
        headers = {"x-goog-api-key": key} if key else {}
        self._connect(base_url or BASE_URL, headers, default_headers, timeout, max_retries)

    def _path(self, verb: str) -> str:
        return f"/v1beta/models/{self.model_name}:{verb}"

    def request(self, call: Call, sampling: dict[str, Any], shaped: Shaped, *, stream: bool) -> ApiRequest:
        config: dict[str, Any] = {"maxOutputTokens": call.sampling.max_new_tokens, **sampling}
        if call.n > 1:
            config["candidateCount"] = call.n
        if call.wants_logprobs:
            config |= {"responseLogprobs": True, "logprobs": max(1, call.top_logprobs)}
        if shaped.form is not None:
            config |= {"responseMimeType": "application/json", "responseJsonSchema": shaped.form.schema}
        body = {
            **self._conversation(call.prompt),
            **self._tools(call.prompt.tools, call.tool_choice, call.parallel_tools),
            "generationConfig": config,
        }
        return ApiRequest(self._path("streamGenerateContent?alt=sse" if stream else "generateContent"), body)

    def _tools(self, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> dict[str, Any]:
        """Fields of a request that offer tools; none without any. Raises Unsupported."""
        if not tools:
            return {}
        if not parallel:
            raise Unsupported(
                f"{self.name} cannot be limited to one call per reply", hint="leave parallel=False out"
            )
        declared = []
        for function in (tool["function"] for tool in tools):
            about = {"description": function["description"]} if function.get("description") else {}
            schema = {"parametersJsonSchema": function["parameters"]} if function.get("parameters") else {}
            declared.append({"name": function["name"], **about, **schema})
        mode: dict[str, Any] = {"mode": {"auto": "AUTO", "none": "NONE"}.get(choice, "ANY")}
        if choice.startswith("="):
            mode["allowedFunctionNames"] = [choice[1:]]
        return {"tools": [{"functionDeclarations": declared}], "toolConfig": {"functionCallingConfig": mode}}

    def _conversation(self, prompt: Prompt) -> dict[str, Any]:
        done, prefill = turns(prompt, self.name)
        system = [part for m in done if m.role in ("system", "developer") for part in _parts(m, self.name)]
        rest = [m for m in done if m.role not in ("system", "developer")]
        contents = _contents([*rest, *([prefill] if prefill else [])], self.name)
        if not contents:
            raise Unsupported(f"{self.name} needs a user turn to reply to")
        body: dict[str, Any] = {"contents": contents}
        if system:
            body["systemInstruction"] = {"parts": system}
        if self._safety:
            body["safetySettings"] = self._safety
        return body


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
        self._project = project_id or os.environ.get("GCP_PROJECT_ID", "")
        self._location = location or os.environ.get("GCP_LOCATION") or "us-central1"
        if not self._project:
            raise ValueError("VertexAI needs project_id, or GCP_PROJECT_ID in the environment")
        token = os.environ.get("GCP_ACCESS_TOKEN", "") if access_token is None else access_token
        bearer = token() if callable(token) else token
        super().__init__(
            model_name,
            safety_settings,
            api_key="",
            base_url=base_url or f"https://{self._location}-aiplatform.googleapis.com",
            default_headers={
                **({"Authorization": f"Bearer {bearer}"} if bearer else {}),
                **(default_headers or {}),
            },
            timeout=timeout,
            max_retries=max_retries,
        )

    def _path(self, verb: str) -> str:
        location = f"projects/{self._project}/locations/{self._location}"
        return f"/v1/{location}/publishers/google/models/{self.model_name}:{verb}"


def _safety(settings: Any) -> list[dict[str, Any]]:
    if not settings:
        return []
    if isinstance(settings, Mapping):
        return [{"category": category, "threshold": threshold} for category, threshold in settings.items()]
    return [dict(one) for one in settings]


def _contents(messages: Sequence[Message], backend: str) -> list[dict[str, Any]]:
    """Turns as the API takes them; the results of one turn's calls are one turn."""
    contents: list[dict[str, Any]] = []
    names: dict[str | None, str] = {}
    before = ""
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        if message.role != "tool":
            contents.append(_wire(message, backend))
        elif message.tool_call_id not in names:
            raise Unsupported(f"{backend} supports a tool turn only after a call of that tool")
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
    call_id = (
        {} if _is_numbered(message.tool_call_id) else {"id": (message.tool_call_id or "").partition("#")[0]}
    )
    response = data if isinstance(data, dict) else {"result": data}
    return {"functionResponse": {**call_id, "name": name, "response": response}}


def _wire(message: Message, backend: str) -> dict[str, Any]:
    roles = {"user": "user", "assistant": "model", "model": "model"}
    if message.role not in roles:
        raise Unsupported(f"{backend} does not support turns of {message.role!r} here")
    parts = _parts(message, backend) if message.content or not message.tool_calls else []
    for call in message.tool_calls:
        api_id, _, signature = (call.id or "").partition("#")
        call_id = {} if _is_numbered(call.id) else {"id": api_id}
        arguments = arguments_of(call.arguments) or {}
        part: dict[str, Any] = {"functionCall": {**call_id, "name": call.name, "args": arguments}}
        if signature:
            part["thoughtSignature"] = signature
        parts.append(part)
    return {"role": roles[message.role], "parts": parts}


def _is_numbered(call_id: str | None) -> bool:
    """Whether a call's id is not the API's own."""
    return not call_id or call_id.startswith(_NUMBERED)


def _parts(message: Message, backend: str) -> list[Part]:
    return parts_of(message, backend, lambda text: {"text": text}, _image)


def _image(url: str, mime: str, data: str | None) -> Part:
    if data is None:
        return {"fileData": {"fileUri": url}}
    return {"inlineData": {"mimeType": mime, "data": data}}

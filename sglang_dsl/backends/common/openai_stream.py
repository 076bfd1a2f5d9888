"""Replies in OpenAI's wire format, whole or as server-sent events. Knows no requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dsl.backends.base import Delta
from sglang_dsl.backends.common.api import ApiReply
from sglang_dsl.backends.common.openai_chat import called
from sglang_dsl.errors import BackendError

_FINISHES = {"stop": "stop", "length": "length", "tool_calls": "stop", "function_call": "stop"}


class OpenAIReply(ApiReply):
    """The reply to a request of chat completions (`chat`), or of completions."""

    def __init__(self, backend: str, *, chat: bool) -> None:
        super().__init__(backend)
        self.chat = chat
        self._known: dict[str, Any] = {}
        self._logprobs: list[tuple[float, None, str]] = []
        self._tops: list[list[tuple[float, None, str]]] = []

    def read(self, answer: Any, n: int) -> tuple[list[str], list[dict[str, Any]]]:
        match answer:
            case {"choices": list(choices)} if len(choices) == n:
                pass
            case {"choices": list(choices)}:
                raise BackendError(f"the API sent {len(choices)} texts for {n}", backend=self.backend)
            case _:
                raise self._no_answer(answer)
        texts, metas = [], []
        for choice in sorted(choices, key=lambda one: one.get("index", 0)):
            message = choice.get("message") or {}
            if isinstance(message.get("refusal"), str):
                raise self._refused(message["refusal"])
            text = message.get("content") if self.chat else choice.get("text")
            self._logprobs, self._tops = [], []
            self._take_logprobs(choice.get("logprobs"))
            meta = self._meta(answer, choice.get("finish_reason"))
            if reasoning := _reasoning(message):
                meta["reasoning_content"] = reasoning
            meta |= called(message)
            texts.append(text or "")
            metas.append(meta)
        return texts, metas

    def event(self, data: dict[str, Any]) -> Delta:
        if "error" in data:
            error = data["error"]
            message = error.get("message") if isinstance(error, dict) else error
            raise BackendError(f"the stream ended with an error: {message}", backend=self.backend)
        if data.get("usage"):
            self._known |= _usage(data["usage"])
        self._known |= {key: data[key] for key in ("id", "model") if data.get(key)}
        text = reasoning = ""
        for choice in data.get("choices") or ():
            delta = choice.get("delta") or {}
            if isinstance(delta.get("refusal"), str):
                raise self._refused(delta["refusal"])
            reasoning += _reasoning(delta)
            text += (delta.get("content") if self.chat else choice.get("text")) or ""
            self._take_logprobs(choice.get("logprobs"))
            if choice.get("finish_reason") is not None:
                self.finished = True
                self._known |= self._meta({}, choice["finish_reason"])
        return Delta(text, reasoning=reasoning)

    def meta(self) -> dict[str, Any]:
        return self._known

    def _meta(self, answer: Mapping[str, Any], finish: Any) -> dict[str, Any]:
        meta: dict[str, Any] = {key: answer[key] for key in ("id", "model") if answer.get(key)}
        kind = _FINISHES.get(str(finish), str(finish))
        meta["finish_reason"] = {"type": kind} if kind == finish else {"type": kind, "reason": finish}
        meta |= _usage(answer.get("usage") or {})
        if self._logprobs:
            meta["output_token_logprobs"] = list(self._logprobs)
            meta["output_top_logprobs"] = list(self._tops)
        return meta

    def _take_logprobs(self, logprobs: Any) -> None:
        """Keep (log-probability, id, text) of each token, as the runtime's own meta has them. The API returns
        no ids."""
        if not isinstance(logprobs, dict):
            return
        if isinstance(logprobs.get("content"), list):
            for token in logprobs["content"]:
                self._logprobs.append((token["logprob"], None, token["token"]))
                tops = token.get("top_logprobs") or ()
                self._tops.append([(top["logprob"], None, top["token"]) for top in tops])
            return
        tokens, values = logprobs.get("tokens") or (), logprobs.get("token_logprobs") or ()
        best = logprobs.get("top_logprobs") or [None] * len(tokens)
        for token, value, tops in zip(tokens, values, best):
            self._logprobs.append((value, None, token))
            self._tops.append([(lp, None, text) for text, lp in (tops or {}).items()])

    def _no_answer(self, answer: Any) -> BackendError:
        return BackendError(
            f"the API's answer is not a completion: {str(answer)[:200]!r}", backend=self.backend
        )

    def _refused(self, text: str) -> BackendError:
        return BackendError(f"the model refused: {text[:500]}", backend=self.backend)


def _reasoning(message: Mapping[str, Any]) -> str:
    """The reasoning in a message or delta. Servers use one of two names for it, or both."""
    text = message.get("reasoning_content") or message.get("reasoning")
    return text if isinstance(text, str) else ""


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    meta = {key: usage[key] for key in ("prompt_tokens", "completion_tokens") if usage.get(key) is not None}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    if cached is not None:
        meta["cached_tokens"] = cached
    if reasoning is not None:
        meta["reasoning_tokens"] = reasoning
    return meta

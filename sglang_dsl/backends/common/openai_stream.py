"""Replies in OpenAI's wire format, whole or as server-sent events. Knows no requests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from sglang_dsl.backends.base import Delta
from sglang_dsl.backends.common.openai_chat import called
from sglang_dsl.errors import BackendError

_FINISHES = {"stop": "stop", "length": "length", "tool_calls": "stop", "function_call": "stop"}


class Reply:
    """One request's answer. `chat`: of chat completions, else of completions."""

    def __init__(self, backend: str, *, chat: bool) -> None:
        self.backend, self.chat = backend, chat
        self.meta: dict[str, Any] = {}
        self.finished = False
        self.length = 0
        self._thoughts: list[str] = []
        self._logprobs: list[tuple[float, None, str]] = []
        self._tops: list[list[tuple[float, None, str]]] = []

    def whole(self, answer: Any, n: int) -> tuple[list[str], list[dict[str, Any]]]:
        """Texts and metas of a whole answer. Raises BackendError for an answer that is none, or a refusal."""
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

    def event(self, data: Mapping[str, Any]) -> Delta:
        """The pieces of text and reasoning in one event of a stream; what else it says is kept."""
        if "error" in data:
            error = data["error"]
            said = error.get("message") if isinstance(error, dict) else error
            raise BackendError(f"the stream ended with an error: {said}", backend=self.backend)
        if data.get("usage"):
            self.meta |= _usage(data["usage"])
        self.meta |= {key: data[key] for key in ("id", "model") if data.get(key)}
        piece = thought = ""
        for choice in data.get("choices") or ():
            delta = choice.get("delta") or {}
            if isinstance(delta.get("refusal"), str):
                raise self._refused(delta["refusal"])
            thought += _reasoning(delta)
            piece += (delta.get("content") if self.chat else choice.get("text")) or ""
            self._take_logprobs(choice.get("logprobs"))
            if choice.get("finish_reason") is not None:
                self.finished = True
                self.meta |= self._meta({}, choice["finish_reason"])
        self.length += len(piece)
        self._thoughts.append(thought)
        return Delta(piece, reasoning=thought)

    def last(self) -> dict[str, Any]:
        """The meta of a stream that is over. Raises BackendError where it broke off."""
        if not self.finished:
            raise BackendError(
                f"the stream broke off after {self.length} characters",
                backend=self.backend,
                retryable=True,
                hint="the connection or the server failed; the text so far is incomplete",
            )
        thought = "".join(self._thoughts)
        return {**self.meta, "reasoning_content": thought} if thought else self.meta

    def _meta(self, answer: Mapping[str, Any], finish: Any) -> dict[str, Any]:
        meta: dict[str, Any] = {key: answer[key] for key in ("id", "model") if answer.get(key)}
        kind = _FINISHES.get(str(finish), str(finish))
        meta["finish_reason"] = {"type": kind} if kind == finish else {"type": kind, "reason": finish}
        meta |= _usage(answer.get("usage") or {})
        if self._logprobs:
            meta["output_token_logprobs"] = list(self._logprobs)
            meta["output_top_logprobs"] = list(self._tops)
        return meta

    def _take_logprobs(self, told: Any) -> None:
        """(log-probability, id, text) as the runtime's own meta has them; the API tells no ids."""
        if not isinstance(told, dict):
            return
        if isinstance(told.get("content"), list):
            for token in told["content"]:
                self._logprobs.append((token["logprob"], None, token["token"]))
                tops = token.get("top_logprobs") or ()
                self._tops.append([(top["logprob"], None, top["token"]) for top in tops])
            return
        tokens, values = told.get("tokens") or (), told.get("token_logprobs") or ()
        best = told.get("top_logprobs") or [None] * len(tokens)
        for token, value, tops in zip(tokens, values, best):
            self._logprobs.append((value, None, token))
            self._tops.append([(lp, None, text) for text, lp in (tops or {}).items()])

    def _no_answer(self, answer: Any) -> BackendError:
        return BackendError(
            f"the API's answer is not a completion: {str(answer)[:200]!r}", backend=self.backend
        )

    def _refused(self, text: str) -> BackendError:
        return BackendError(f"the model refused: {text[:500]}", backend=self.backend)


def _reasoning(said: Mapping[str, Any]) -> str:
    """The reasoning in a message or delta. Servers call it by one of two names, or by both."""
    found = said.get("reasoning_content") or said.get("reasoning")
    return found if isinstance(found, str) else ""


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    made = {key: usage[key] for key in ("prompt_tokens", "completion_tokens") if usage.get(key) is not None}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    if cached is not None:
        made["cached_tokens"] = cached
    if thought is not None:
        made["reasoning_tokens"] = thought
    return made


async def pieces_of(events: AsyncIterator[str], reply: Reply) -> AsyncIterator[Delta]:
    """The stream's pieces; the last one carries the meta. Events may be cut and joined as they like."""
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            if event == "[DONE]":
                break
            try:
                data = json.loads(event)
            except ValueError as error:
                raise BackendError(f"an event of the stream is not JSON: {event[:200]!r}") from error
            if not isinstance(data, dict):
                raise BackendError(f"an event of the stream is not an object: {event[:200]!r}")
            delta = reply.event(data)
            if delta.text or delta.reasoning:
                yield delta
    yield Delta("", reply.last())

"""LiteLLM: many providers through the litellm package, which translates OpenAI's chat API for each of them.

What a provider does not support, according to litellm, raises Unsupported. Nothing is dropped. It knows no
provider.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

from runtime.protocol.registry import MissingExtra
from sglang_dsl.backends.base import Backend, Call, ChoiceCall, ChoiceScores, Completion, Delta
from sglang_dsl.backends.common.chat_choices import ChatChoices, options_schema
from sglang_dsl.backends.common.openai_chat import offered, response_format, wire
from sglang_dsl.backends.common.openai_stream import Reply
from sglang_dsl.backends.common.prompts import RETRYABLE, turns
from sglang_dsl.backends.common.remote import Shaped, form_for, spoken
from sglang_dsl.backends.openai import TAKES
from sglang_dsl.conversation.usage import TokenUsage
from sglang_dsl.errors import BackendError, Timeout, Unsupported


class LiteLLM(Backend):
    """The model `model_name` in litellm's notation ("provider/model").

    api_key, organization, base_url, default_headers  passed to litellm; None: what litellm finds in the
                                                      environment
    timeout                                           seconds for a call that has no deadline of its own
    max_retries                                       how often litellm retries

    token_usage counts what was charged. Raises MissingExtra if the litellm package is not installed.
    """

    name = "litellm"
    speculates = calls_tools = True

    def __init__(
        self,
        model_name: str,
        chat_template: None = None,
        api_key: str | None = None,
        organization: str | None = None,
        base_url: str | None = None,
        timeout: float = 600.0,
        max_retries: int = 2,
        default_headers: Mapping[str, str] | None = None,
    ) -> None:
        if chat_template is not None:
            raise Unsupported("the API renders the messages itself; leave chat_template out")
        # Looked for, not loaded: that takes seconds.
        if importlib.util.find_spec("litellm") is None:
            raise MissingExtra("LiteLLM needs the package 'litellm': pip install 'sglang-dsl[litellm]'")
        self.model_name, self.timeout = model_name, timeout
        self.token_usage = TokenUsage()
        self._choices = ChatChoices(self.name)
        given = {
            "api_key": api_key,
            "organization": organization,
            "base_url": base_url,
            "extra_headers": dict(default_headers) if default_headers else None,
        }
        self._client: dict[str, Any] = {word: value for word, value in given.items() if value is not None}
        self._client["num_retries"] = max_retries
        self._package: Any = None

    def __repr__(self) -> str:
        return f"LiteLLM({self.model_name!r})"

    def get_model_name(self) -> str:
        """The model's name, as it was given."""
        return self.model_name

    @property
    def identity(self) -> str:
        return f"{self.name}:{self.model_name}"

    async def generate(self, call: Call) -> Completion:
        body, shaped = self._request(call)
        answer = await self._ask(body, call.timeout)
        texts, metas = Reply(self.name, chat=True).whole(answer.model_dump(), call.n)
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
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        reply = Reply(self.name, chat=True)
        chunks = await self._ask(body, call.timeout)
        async with aclosing(self._guarded(chunks, call.timeout)) as events:  # type: ignore[type-var]
            async for event in events:
                delta = reply.event(event)
                piece = shaped.piece(delta.text)
                if piece or delta.reasoning:
                    yield Delta(piece, reasoning=delta.reasoning)
        meta = reply.last()
        self._charge(meta)
        yield shaped.last(meta)

    async def score(self, call: ChoiceCall) -> ChoiceScores:
        async def ask(room: int, words: dict[str, Any]) -> tuple[str, dict[str, Any]]:
            body: dict[str, Any] = {
                **self._messages(call.prompt),
                **offered(call.prompt.tools),
                "max_tokens": room,
                **words,
                "response_format": response_format("choice", options_schema(call.choices), strict=True),
            }
            answer = await self._ask(body, call.timeout)
            texts, metas = Reply(self.name, chat=True).whole(answer.model_dump(), 1)
            self._charge(metas[0])
            return texts[0], metas[0]

        return await self._choices.scores(call, ask)

    # -- within ----------------------------------------------------------------------------------------------

    def _request(self, call: Call) -> tuple[dict[str, Any], Shaped]:
        if call.options or call.logprob_start_len >= 0:
            words = ", ".join([*sorted(call.options), *["logprob_start_len"] * (call.logprob_start_len >= 0)])
            raise Unsupported(f"{self.name} does not take {words}", backend=self.name)
        body: dict[str, Any] = {
            **self._messages(call.prompt),
            **offered(call.prompt.tools, call.tool_choice, call.parallel_tools),
            **spoken(call.sampling, {**TAKES, "top_k": "top_k"}, self.name),
            "max_tokens": call.sampling.max_new_tokens,
        }
        if call.n > 1:
            body["n"] = call.n
        if call.return_logprob:
            body |= {"logprobs": True, "top_logprobs": call.top_logprobs}
        form = form_for(call, self.name)
        if form is not None:
            body["response_format"] = response_format("reply", form.schema, strict=form.strict)
        return body, Shaped(call, form, body)

    def _messages(self, prompt: Any) -> dict[str, Any]:
        done, prefill = turns(prompt, self.name)
        if prefill is not None:
            raise Unsupported(
                f"{self.name} cannot continue a reply that has begun ({str(prefill.content)[:60]!r})",
                backend=self.name,
                hint="start assistant(...) with gen",
            )
        return {"messages": [wire(message) for message in done]}

    async def _ask(self, body: dict[str, Any], timeout: float | None) -> Any:
        litellm = await self._loaded()
        limit = self.timeout if timeout is None else timeout
        with self._faults(litellm):
            work = litellm.acompletion(
                model=self.model_name, timeout=limit, drop_params=False, **self._client, **body
            )
            # Not wait_for(): it loses a cancellation that comes together with the answer.
            async with asyncio.timeout(limit):
                return await work

    async def _guarded(self, chunks: Any, timeout: float | None) -> AsyncIterator[dict[str, Any]]:
        limit = self.timeout if timeout is None else timeout
        with self._faults(self._package):
            deadline = asyncio.get_running_loop().time() + limit
            iterator = aiter(chunks)
            while True:
                left = max(0.0, deadline - asyncio.get_running_loop().time())
                async with asyncio.timeout(left):
                    chunk = await anext(iterator, None)
                if chunk is None:
                    return
                yield chunk.model_dump()

    async def _loaded(self) -> Any:
        """The package, which takes seconds to import: beside the loop, once."""
        if self._package is None:
            self._package = await asyncio.to_thread(importlib.import_module, "litellm")
        return self._package

    @contextmanager
    def _faults(self, litellm: Any) -> Any:
        try:
            yield
        except TimeoutError as error:
            raise Timeout("no answer in time", backend=self.name, retryable=True) from error
        except litellm.exceptions.UnsupportedParamsError as error:
            raise Unsupported(str(error), backend=self.name) from error
        except litellm.exceptions.Timeout as error:
            raise Timeout(str(error), backend=self.name, retryable=True) from error
        except importlib.import_module("openai").OpenAIError as error:  # the base of litellm's own
            status = getattr(error, "status_code", None)
            raise BackendError(
                str(error), backend=self.name, status=status, retryable=status in RETRYABLE
            ) from error

    def _charge(self, meta: Mapping[str, Any]) -> None:
        self.token_usage.add(meta.get("prompt_tokens") or 0, meta.get("completion_tokens") or 0)

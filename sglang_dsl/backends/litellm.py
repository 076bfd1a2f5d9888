"""LiteLLM: many providers through the litellm package. What a provider does not support, according to
litellm, raises Unsupported.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import AsyncIterator, Mapping
from contextlib import contextmanager
from typing import Any

from runtime.protocol.registry import MissingExtra
from sglang_dsl.backends.base import Call
from sglang_dsl.backends.common.api import ApiBackend, ApiRequest
from sglang_dsl.backends.common.openai_chat import STREAMED, OpenAIReply, chat_fields, chat_messages
from sglang_dsl.backends.common.prompts import RETRYABLE
from sglang_dsl.backends.common.remote import Shaped
from sglang_dsl.backends.openai import TAKES
from sglang_dsl.errors import BackendError, Timeout, Unsupported

# Beside OpenAI's: litellm knows which providers have it.
TOP_K = {"top_k": "top_k"}


class LiteLLM(ApiBackend):
    """The model `model_name` in litellm's notation ("provider/model").

    api_key, organization, base_url, default_headers  passed to litellm; None: what litellm finds in the
                                                      environment
    timeout                                           seconds for a call that has no deadline of its own
    max_retries                                       how often litellm retries

    token_usage counts what was charged. Raises MissingExtra if the litellm package is not installed.
    """

    name = "litellm"
    reply = OpenAIReply
    takes = TAKES | TOP_K

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
        super().__init__(model_name)
        self.timeout = timeout
        client = {
            "api_key": api_key,
            "organization": organization,
            "base_url": base_url,
            "extra_headers": dict(default_headers) if default_headers else None,
        }
        self._client: dict[str, Any] = {name: value for name, value in client.items() if value is not None}
        self._client["num_retries"] = max_retries
        self._package: Any = None

    def request(self, call: Call, sampling: dict[str, Any], shaped: Shaped, *, stream: bool) -> ApiRequest:
        body = chat_messages(call.prompt, self.name)
        body |= chat_fields(call, shaped.form, "max_tokens") | sampling
        if stream:
            body |= STREAMED
        return ApiRequest("", body)

    async def send(self, request: ApiRequest, timeout: float | None) -> Any:
        return (await self._ask(request.body, timeout)).model_dump()

    async def events(self, request: ApiRequest, timeout: float | None) -> AsyncIterator[dict[str, Any]]:
        chunks = await self._ask(request.body, timeout)
        limit = self.timeout if timeout is None else timeout
        with self._faults():
            deadline = asyncio.get_running_loop().time() + limit
            iterator = aiter(chunks)
            while True:
                left = max(0.0, deadline - asyncio.get_running_loop().time())
                async with asyncio.timeout(left):
                    chunk = await anext(iterator, None)
                if chunk is None:
                    return
                yield chunk.model_dump()

    async def aclose(self) -> None:
        return  # litellm keeps connections of its own

    async def _ask(self, body: dict[str, Any], timeout: float | None) -> Any:
        if self._package is None:  # it takes seconds to import: beside the loop, once
            self._package = await asyncio.to_thread(importlib.import_module, "litellm")
        limit = self.timeout if timeout is None else timeout
        with self._faults():
            work = self._package.acompletion(
                model=self.model_name, timeout=limit, drop_params=False, **self._client, **body
            )
            # Not wait_for(): it loses a cancellation that comes together with the answer.
            async with asyncio.timeout(limit):
                return await work

    @contextmanager
    def _faults(self) -> Any:
        litellm = self._package
        try:
            yield
        except TimeoutError as error:
            raise Timeout("no answer in time", retryable=True) from error
        except litellm.exceptions.UnsupportedParamsError as error:
            raise Unsupported(str(error)) from error
        except litellm.exceptions.Timeout as error:
            raise Timeout(str(error), retryable=True) from error
        except importlib.import_module("openai").OpenAIError as error:  # the base of litellm's own
            status = getattr(error, "status_code", None)
            raise BackendError(str(error), status=status, retryable=status in RETRYABLE) from error

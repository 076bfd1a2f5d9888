"""RuntimeEndpoint: the bundled runtime as a server, over HTTP. The server renders messages with its
checkpoint's own template, unless a template is set here.
"""

from __future__ import annotations

import functools
import socket
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence, Set
from contextlib import aclosing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

from runtime.formats.chat import get_chat_template, get_chat_template_by_model_path
from runtime.formats.chat.render import render, render_prompt
from runtime.formats.chat.template import ChatTemplate
from runtime.protocol.constraint import Constraint
from runtime.protocol.io_struct import GenerateOutput, GenerateReqInput, OutputDelta
from runtime.protocol.registry import UnknownName
from sglang_dsl.backends.base import Call, Prompt
from sglang_dsl.backends.common.native import as_json, check_answer, error_of, output_of
from sglang_dsl.backends.common.transport import HttpFault, Limits, Transport, json_body, json_event
from sglang_dsl.backends.engine import PER_TOKEN, RuntimeBackend
from sglang_dsl.concurrency.loop import background
from sglang_dsl.errors import BackendError, ProgramError, Unsupported

GRACE_S = 15.0
"""How much longer than a request's own deadline the client waits for the server's answer."""
INFO_S = 30.0
PROBE_S = 10.0
_UNKNOWN = frozenset({404, 405})
"""Statuses of a server that does not know the path."""


class RuntimeEndpoint(RuntimeBackend):
    """A running server (`python -m runtime serve`).

    base_url            the server's address, such as "http://127.0.0.1:30000"
    api_key             sent as a bearer token; never displayed
    verify              False, or the path of a certificate bundle
    chat_template_name  a registered chat template that renders prompts here, instead of the server's own
    timeout             seconds for a call that has no deadline of its own
    retries             how often a request is sent again that was not started (no connection, or server busy)
    max_connections     open at once; more calls wait
    lazy                do not check whether the server is running, for a server that is started later

    Raises BackendError if nothing listens at the address, unless `lazy`. No request is sent before the first
    call. Setting `chat_template` (a ChatTemplate, or None for the server's own) changes how later prompts are
    rendered.
    """

    name, peer = "endpoint", "server"

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: bool | str | None = None,
        chat_template_name: str | None = None,
        *,
        timeout: float = 600.0,
        retries: int = 3,
        max_connections: int = 256,
        lazy: bool = False,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f'a URL starts with "http://" or "https://", got {base_url!r}')
        if not 0 < timeout < float("inf"):
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
        super().__init__()
        self.base_url = base_url.rstrip("/")
        self.timeout = timeout
        self._arguments: dict[str, Any] = {
            "api_key": api_key,
            "verify": verify,
            "chat_template_name": chat_template_name,
            "timeout": timeout,
            "retries": retries,
            "max_connections": max_connections,
        }
        self._transport = Transport(
            self.base_url,
            {"Authorization": f"Bearer {api_key}"} if api_key else {},
            True if verify is None else verify,
            Limits(read_s=timeout, retries=retries, connections=max_connections),
            traced=True,
        )
        self._template: ChatTemplate | None = (
            None if chat_template_name is None else get_chat_template(chat_template_name)
        )
        self._model_info: dict[str, Any] | None = None
        if not lazy:
            _check_reachable(self.base_url)

    def __repr__(self) -> str:
        return f"RuntimeEndpoint({self.base_url!r})"

    def __reduce__(self) -> Any:
        """For worker processes of a batch: another endpoint of the same server."""
        return functools.partial(RuntimeEndpoint, lazy=True, **self._arguments), (self.base_url,)

    @property
    def identity(self) -> str:
        return f"{self.name}:{self.base_url}"

    @property
    def endpoint(self) -> RuntimeEndpoint:
        """The RuntimeEndpoint itself; a Runtime has its endpoint under this name."""
        return self

    @property
    def model_info(self) -> dict[str, Any]:
        """What the server reports about its model. Requested once. Raises BackendError."""
        if self._model_info is None:
            self._model_info = background().run(self._get("/model_info"), INFO_S + GRACE_S)
        return self._model_info

    @property
    def chat_template(self) -> ChatTemplate:
        """The template that renders prompts here, if one is set. Otherwise, for inspection, the registered
        template that is closest to the server's. Raises BackendError."""
        if self._template is not None:
            return self._template
        name = self.model_info.get("template_name")
        try:
            return get_chat_template(str(name))
        except UnknownName:
            return get_chat_template_by_model_path(self.get_model_name())

    @chat_template.setter
    def chat_template(self, template: ChatTemplate | None) -> None:
        self._template = template

    def get_chat_template(self) -> ChatTemplate:
        """`chat_template`."""
        return self.chat_template

    async def submit(self, request: GenerateReqInput) -> list[GenerateOutput]:
        answer = await self.request("/generate", as_json(request), request.timeout_s)
        return [output_of(one, self.name) for one in (answer if isinstance(answer, list) else [answer])]

    def deltas(self, request: GenerateReqInput) -> AsyncIterator[OutputDelta]:
        return self.pieces(as_json(request), request.timeout_s)

    async def tool_parser(self) -> str | None:
        if self._model_info is None:
            self._model_info = await self._get("/model_info")
        return self._model_info.get("tool_parser")

    async def pieces(
        self, body: Mapping[str, Any], timeout: float | None = None
    ) -> AsyncIterator[OutputDelta]:
        """The streamed answer to POST /generate with this body. Raises BackendError and its subclasses."""
        stream = _Stream()
        data = json_body({**body, "stream": True})
        with self.faults():
            events = self._transport.events("/generate", data, self._wait_limit(timeout))
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    if event == "[DONE]":
                        break
                    yield stream.delta(json_event(event, self.name))
        if not stream.finished:
            raise BackendError(
                f"the stream broke off after {stream.length} characters",
                retryable=True,
                hint="the server may have stopped; its log says why",
            )

    @contextmanager
    def faults(self, request_id: str | None = None) -> Iterator[None]:
        """The server has another id for the request."""
        with super().faults():
            try:
                yield
            except HttpFault as fault:
                raise _error_of(fault) from fault

    def as_request(self, call: Call) -> GenerateReqInput:
        if self._template is not None and call.prompt.plain_text is None:
            sampling = call.sampling
            # A new tuple: the caller's own is never touched.
            stops = dict.fromkeys((*sampling.stop, *self._template.stop_str))
            sampling = msgspec.structs.replace(sampling, stop=tuple(stops))
            call = msgspec.structs.replace(call, sampling=sampling)
        return super().as_request(call)

    def prompt_fields(self, prompt: Prompt) -> dict[str, Any]:
        if self._template is None or prompt.plain_text is not None:
            return super().prompt_fields(prompt)
        if prompt.tools:
            raise Unsupported(
                "a chat template that is set here renders no tools",
                hint="leave chat_template to the server",
            )
        with self.faults():
            rendered = render(prompt.messages, self._template)
            if rendered.videos or rendered.audios:
                render_prompt(prompt.messages, self._template)  # raises TemplateError with the place
        images = [{"url": one.url, "detail": one.detail} for one in rendered.images]
        return {"text": rendered.text, **({"image_data": images} if images else {})}

    async def precompile(self, constraints: Sequence[Constraint]) -> list[dict[str, Any]]:
        body = {"constraints": msgspec.to_builtins(list(constraints))}
        answer = await self._unless(_UNKNOWN, "/precompile", body, self.timeout)
        # A server that does not know the path compiles when it has to.
        return [] if answer is None else [dict(one) for one in answer["constraints"]]

    async def count_tokens(self, prompt: Prompt) -> int | None:
        text = self.prompt_fields(prompt).get("text")
        body = _conversation(prompt) if text is None else {"prompt": text}
        answer = await self._unless(_UNKNOWN, "/tokenize", body)
        return None if answer is None else int(answer["count"])

    async def aflush_cache(self) -> bool:
        return await self._unless({400}, "/flush_cache", {}) is not None  # 400: in use

    async def prefix_cache(self) -> dict[str, Any] | None:
        answer = await self._unless({*_UNKNOWN, 403}, "/radix_tree")  # 403: not for this key
        return None if answer is None else dict(answer)

    async def info(self) -> dict[str, Any]:
        info = await self._get("/server_info")
        # Not every server has a tokenizer of its own.
        return {"backend": self.name, "url": self.base_url, "tokenizer_path": info.get("model_path"), **info}

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def _unless(self, statuses: Set[int], path: str, body: Any = None, timeout: float = INFO_S) -> Any:
        """The JSON of the answer to a GET, or a POST of `body`; None for these statuses."""
        try:
            if body is None:
                return await self._transport.get(path, timeout)
            return await self._transport.post(path, json_body(body), timeout)
        except HttpFault as fault:
            if fault.status in statuses:
                return None
            raise _error_of(fault) from fault

    def _wait_limit(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else timeout + GRACE_S

    async def request(self, path: str, body: Mapping[str, Any], timeout: float | None = None) -> Any:
        """POST this JSON and return the JSON of the answer. Raises BackendError and its subclasses."""
        with self.faults():
            return await self._transport.post(path, json_body(body), self._wait_limit(timeout))

    async def _get(self, path: str) -> dict[str, Any]:
        with self.faults():
            answer = await self._transport.get(path, INFO_S)
        if not isinstance(answer, dict):
            raise BackendError(
                f"{self.base_url}{path} is not an answer of the runtime: {str(answer)[:200]!r}",
                backend=self.name,
            )
        return answer


def _check_reachable(url: str) -> None:
    """Raises BackendError if nothing listens; not checked behind a proxy, which would answer."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((host, port), PROBE_S).close()
    except OSError as error:
        raise BackendError(
            f"no connection to {url}: {error.strerror or error}",
            backend=RuntimeEndpoint.name,
            retryable=True,
            hint="start it first (python -m runtime serve), or pass lazy=True if the server is started later",
        ) from error


def _conversation(prompt: Prompt) -> dict[str, Any]:
    """A prompt for /tokenize: text outside of turns as a turn."""
    messages = [
        {"role": "user" if one.role == "raw" else one.role, "content": one.content}
        for one in prompt.messages
        if one.content or one.role != "raw"
    ]
    last = prompt.messages[-1]
    begun = last.open and last.role != "raw"
    return {"messages": messages, "continue_final_message": begun, "add_generation_prompt": False}


class _Stream:
    """One streamed answer. An event has the whole text so far or, if the server is set up so, only what is
    new: then it has fewer ids than tokens were generated."""

    def __init__(self) -> None:
        self.length = 0
        self.finished = False
        self._tokens = 0
        self._entries: dict[str, int] = {}

    def delta(self, event: dict[str, Any]) -> OutputDelta:
        """What is new in an event. Raises BackendError."""
        check_answer(event, RuntimeEndpoint.name)
        text, meta = event.get("text", ""), event.get("meta_info") or {}
        ids, counted = event.get("output_ids"), meta.get("completion_tokens")
        tokens = counted if isinstance(counted, int) else 0
        if not (isinstance(ids, list) and self._tokens > 0 and len(ids) < tokens):
            text = text[self.length :]
            for name in PER_TOKEN:
                if isinstance(entries := meta.get(name), list):
                    meta[name] = entries[self._entries.get(name, 0) :]
                    self._entries[name] = len(entries)
        self.length += len(text)
        self._tokens = max(self._tokens, tokens)
        self.finished = meta.setdefault("finish_reason", None) is not None
        return OutputDelta(text, [], meta)


def _error_of(fault: HttpFault) -> ProgramError:
    match fault.body:
        case {"error": dict(error)}:
            return error_of(error, RuntimeEndpoint.name, fault.status)
        case {"message": str(message)}:
            reason = message
        case other:
            reason = str(other)[:500].strip() or "no reason given"
    return BackendError(
        f"the server answered {fault.status}: {reason}",
        backend=RuntimeEndpoint.name,
        status=fault.status,
        retryable=fault.status in (429, 502, 503, 504),
        hint="is api_key right?" if fault.status == 401 else None,
    )

"""RuntimeEndpoint: the bundled runtime as a server, over HTTP. Messages are sent as messages: the server
renders them with its checkpoint's own template, unless a template is set here.

It knows the server's native API (POST /generate, /flush_cache, GET /model_info, /server_info) and nothing
about how the server works.
"""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

from runtime.formats.chat import get_chat_template, get_chat_template_by_model_path
from runtime.formats.chat.render import render, render_prompt
from runtime.formats.chat.template import ChatTemplate
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import RuntimeFault, from_dict
from runtime.protocol.registry import UnknownName
from sglang_dsl.backends.base import (
    Backend,
    Call,
    ChoiceCall,
    ChoiceScores,
    Completion,
    Delta,
    Prompt,
)
from sglang_dsl.backends.common.faults import (
    BAD_OPTIONS_HINT,
    SAMPLED_OPTIONS,
    as_program_error,
    scored,
    scoring,
    summed,
)
from sglang_dsl.backends.common.local_tools import calls_tools, held_to_tools, with_calls
from sglang_dsl.backends.common.per_token import PerToken
from sglang_dsl.backends.common.transport import HttpFault, Limits, Transport
from sglang_dsl.concurrency.loop import background
from sglang_dsl.conversation.usage import TokenUsage
from sglang_dsl.errors import BackendError, ProgramError, Unsupported

GRACE_S = 15.0
"""How much longer than a request's own deadline the client waits for the server to say that it is over."""
INFO_S = 30.0
PROBE_S = 10.0


class RuntimeEndpoint(Backend):
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

    name = "endpoint"
    calls_tools = True

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
        self.base_url = base_url.rstrip("/")
        self.timeout = timeout
        self._made_with = (api_key, verify, chat_template_name, timeout, retries, max_connections)
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
        self.token_usage = TokenUsage()
        self._model_info: dict[str, Any] | None = None
        if not lazy:
            _knock(self.base_url)

    def __repr__(self) -> str:
        return f"RuntimeEndpoint({self.base_url!r})"

    def __reduce__(self) -> Any:
        """For worker processes of a batch: another endpoint of the same server, with connections of its
        own."""
        return _made_again, (self.base_url, *self._made_with)

    @property
    def identity(self) -> str:
        return f"{self.name}:{self.base_url}"

    @property
    def endpoint(self) -> RuntimeEndpoint:
        """The RuntimeEndpoint itself; a Runtime has its endpoint under this name."""
        return self

    @property
    def model_info(self) -> dict[str, Any]:
        """What the server reports about its model: model_path and more. Requested once. Raises
        BackendError."""
        if self._model_info is None:
            self._model_info = background().run(self._get("/model_info"), INFO_S + GRACE_S)
        return self._model_info

    def get_model_name(self) -> str:
        """The model's name, as reported by the server."""
        return str(self.model_info["model_path"])

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

    # -- the verbs -------------------------------------------------------------------------------------------

    async def generate(self, call: Call) -> Completion:
        if calls_tools(call):
            return await self._with_tools(call)
        body = self._body(call)
        answer = await self._post(body, call.timeout)
        outputs = answer if isinstance(answer, list) else [answer]
        if len(outputs) != call.n:
            raise BackendError(f"the server sent {len(outputs)} answers for {call.n}", backend=self.name)
        for output in outputs:
            _raise_error(output)
        metas = [dict(output["meta_info"]) for output in outputs]
        meta = summed(metas) if call.n > 1 else metas[0]
        self.token_usage.count(meta)
        return Completion(tuple(str(output["text"]) for output in outputs), meta)

    async def _with_tools(self, call: Call) -> Completion:
        if self._model_info is None:
            self._model_info = await self._get("/model_info")
        held, parser = held_to_tools(call, self._model_info.get("tool_parser"), self.name)
        output = await self._post(self._body(held), call.timeout)
        _raise_error(output)
        meta = dict(output["meta_info"])
        self.token_usage.count(meta)
        return with_calls(str(output["text"]), meta, held, parser)

    async def stream(self, call: Call) -> AsyncIterator[Delta]:
        if call.n != 1:
            raise Unsupported("a stream holds one text", hint="use n=1, or run without stream")
        if calls_tools(call):
            async for delta in self.whole(call):
                yield delta
            return
        async with aclosing(self.pieces(self._body(call), call.timeout)) as pieces:  # type: ignore[type-var]
            async for delta in pieces:
                yield delta

    async def pieces(self, body: Mapping[str, Any], timeout: float | None = None) -> AsyncIterator[Delta]:
        """The stream of one POST /generate with this body."""
        growing = _Growing()
        with _faults(None):
            data = json.dumps({**body, "stream": True}).encode()
            events = self._transport.events("/generate", data, self._wait_limit(timeout))
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    if event == "[DONE]":
                        break
                    output = _event(event)
                    _raise_error(output)
                    piece, meta = growing.take(output)
                    if meta is not None:
                        self.token_usage.count(meta)
                    if piece or meta is not None:
                        yield Delta(piece, meta, growing.told(output))
        if not growing.finished:
            raise BackendError(
                f"the stream broke off after {len(growing.text)} characters",
                backend=self.name,
                retryable=True,
                hint="the server may have stopped; its log says why",
            )

    async def score(self, call: ChoiceCall) -> ChoiceScores:
        answer = await self._post({**scoring(call), **self._prompt(call.prompt)}, call.timeout)
        _raise_error(answer)
        found = scored(answer, call, self.name)
        self.token_usage.count(found.meta)
        return found

    async def commit(self, prompt: Prompt) -> None:
        body = {"sampling_params": {"max_new_tokens": 0}, **self._prompt(prompt)}
        _raise_error(await self._post(body, None))

    async def precompile(self, constraints: Sequence[Constraint]) -> list[dict[str, Any]]:
        body = {"constraints": msgspec.to_builtins(list(constraints))}
        try:
            told = await self._transport.post("/precompile", json.dumps(body).encode(), self.timeout)
        except HttpFault as fault:
            if fault.status in (404, 405):
                return []  # a server that does not know the path compiles when it has to
            raise _error_of(fault) from fault
        return [dict(one) for one in told["constraints"]]

    async def count_tokens(self, prompt: Prompt) -> int | None:
        told = self._prompt(prompt)
        asked = {"prompt": told["text"]} if "text" in told else _conversation(prompt)
        try:
            found = await self._transport.post("/tokenize", json.dumps(asked).encode(), INFO_S)
        except HttpFault as fault:
            if fault.status in (404, 405):
                return None  # a server that does not know the path
            raise _error_of(fault) from fault
        return int(found["count"])

    async def aflush_cache(self) -> bool:
        try:
            await self._transport.post("/flush_cache", b"{}", INFO_S)
        except HttpFault as fault:
            if fault.status == 400:
                return False  # in use
            raise _error_of(fault) from fault
        return True

    async def prefix_cache(self) -> dict[str, Any] | None:
        try:
            return dict(await self._transport.get("/radix_tree", INFO_S))
        except HttpFault as fault:
            if fault.status in (403, 404, 405):
                return None  # not for this key, or a server that does not know the path
            raise _error_of(fault) from fault

    async def info(self) -> dict[str, Any]:
        told = await self._get("/server_info")
        # Not every server has a tokenizer of its own.
        return {"backend": self.name, "url": self.base_url, "tokenizer_path": told.get("model_path"), **told}

    async def aclose(self) -> None:
        await self._transport.aclose()

    # -- within ----------------------------------------------------------------------------------------------

    def _body(self, call: Call) -> dict[str, Any]:
        """The request's JSON. Raises Unsupported for options that no request has."""
        if unknown := sorted(set(call.options) - SAMPLED_OPTIONS):
            raise Unsupported(
                f"the server does not take {', '.join(unknown)}", backend=self.name, hint=BAD_OPTIONS_HINT
            )
        sampling: dict[str, Any] = msgspec.to_builtins(call.sampling)
        body: dict[str, Any] = {"sampling_params": sampling, **self._prompt(call.prompt), **call.options}
        if call.n > 1:
            sampling["n"] = call.n
        if self._template is not None and call.prompt.plain_text is None:
            # A new list: the caller's own is never touched.
            own = [stop for stop in self._template.stop_str if stop not in call.sampling.stop]
            sampling["stop"] = [*call.sampling.stop, *own]
        if call.constraint is not None:
            body["constraint"] = msgspec.to_builtins(call.constraint)
        if call.return_logprob:
            body |= {
                "return_logprob": True,
                "logprob_start_len": call.logprob_start_len,
                "top_logprobs_num": call.top_logprobs,
            }
        if call.timeout is not None:
            body["timeout_s"] = call.timeout
        return body

    def _prompt(self, prompt: Prompt) -> dict[str, Any]:
        text = prompt.plain_text
        if text is None and self._template is not None:
            if prompt.tools:
                raise Unsupported(
                    "a chat template that is set here renders no tools",
                    backend=self.name,
                    hint="leave chat_template to the server",
                )
            with _faults(None):
                return _rendered(prompt, self._template)
        if text is not None:
            return {"text": text}
        tools = {"tools": list(prompt.tools)} if prompt.tools else {}
        return {"messages": msgspec.to_builtins(prompt.messages), **tools}

    def _wait_limit(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else timeout + GRACE_S

    async def request(self, path: str, body: Mapping[str, Any], timeout: float | None = None) -> Any:
        """POST this JSON and return the JSON of the answer. Raises BackendError and its subclasses."""
        with _faults(None):
            return await self._transport.post(path, json.dumps(body).encode(), self._wait_limit(timeout))

    async def _post(self, body: Mapping[str, Any], timeout: float | None) -> Any:
        return await self.request("/generate", body, timeout)

    async def _get(self, path: str) -> dict[str, Any]:
        with _faults(None):
            told = await self._transport.get(path, INFO_S)
        if not isinstance(told, dict):
            raise BackendError(
                f"{self.base_url}{path} is not an answer of the runtime: {str(told)[:200]!r}",
                backend=self.name,
            )
        return told


def _rendered(prompt: Prompt, template: ChatTemplate) -> dict[str, Any]:
    """A request's fields for it: text, and what its images refer to. Raises TemplateError for other media."""
    found = render(prompt.messages, template)
    if found.videos or found.audios:
        render_prompt(prompt.messages, template)  # which refuses them by their place
    images = [{"url": one.url, "detail": one.detail} for one in found.images]
    return {"text": found.text, **({"image_data": images} if images else {})}


def _knock(url: str) -> None:
    """Connect once and hang up. Raises BackendError where nobody listens. A server behind a proxy is not
    looked for: the proxy is who would answer."""
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
    """A prompt as /tokenize takes conversations: text outside of turns as a turn of its own."""
    messages = [
        {"role": "user" if one.role == "raw" else one.role, "content": one.content}
        for one in prompt.messages
        if one.content or one.role != "raw"
    ]
    last = prompt.messages[-1]
    begun = last.open and last.role != "raw"
    return {"messages": messages, "continue_final_message": begun, "add_generation_prompt": False}


class _Growing:
    """A stream's text. Servers send it whole each time, or, set up so, only what is new: the ids tell."""

    def __init__(self) -> None:
        self.text = ""
        self.finished = False
        self._tokens = 0
        self._lists = PerToken()

    def told(self, output: Mapping[str, Any]) -> dict[str, Any]:
        """What was said with the pieces since this was asked last."""
        return self._lists.piece(output.get("meta_info") or {})

    def take(self, output: Mapping[str, Any]) -> tuple[str, dict[str, Any] | None]:
        """The new piece, and the meta of the last one."""
        text, meta = str(output["text"]), dict(output.get("meta_info") or {})
        ids = output.get("output_ids")
        told = meta.get("completion_tokens")
        pieces = isinstance(ids, list) and isinstance(told, int) and self._tokens > 0 and len(ids) < told
        piece = text if pieces else text[len(self.text) :]
        self.text = self.text + piece
        self._tokens = max(self._tokens, told if isinstance(told, int) else 0)
        self._lists.add(meta, new=pieces)
        if meta.get("finish_reason") is None:
            return piece, None
        self.finished = True
        return piece, self._lists.whole(meta)


def _event(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BackendError(f"an event of the stream is not JSON: {text[:200]!r}") from error
    if not isinstance(found, dict):
        raise BackendError(f"an event of the stream is not an object: {text[:200]!r}")
    return found


def _raise_error(output: Any) -> None:
    """An error in place of an answer, in a stream or a batch."""
    match output:
        case {"error": dict(error)}:
            raise _fault_of(error, None)
        case {"text": str(), "meta_info": dict()} | {"choices": list()} | {"text": str()}:
            return
        case _:
            raise BackendError(f"the server's answer is not a generation: {str(output)[:200]!r}")


def _fault_of(error: Mapping[str, Any], status: int | None) -> ProgramError:
    """`status`: the answer's; None: that of the fault's kind."""
    # The message on the wire names the place and the hint already.
    fault: RuntimeFault = from_dict({"code": error.get("code"), "message": error.get("message", "")})
    return as_program_error(fault, RuntimeEndpoint.name, None, status=status)


def _error_of(fault: HttpFault) -> ProgramError:
    match fault.body:
        case {"error": dict(error)}:
            return _fault_of(error, fault.status)
        case {"message": str(message)}:
            said = message
        case other:
            said = str(other)[:500].strip() or "no reason given"
    return BackendError(
        f"the server answered {fault.status}: {said}",
        backend=RuntimeEndpoint.name,
        status=fault.status,
        retryable=fault.status in (429, 502, 503, 504),
        hint="is api_key right?" if fault.status == 401 else None,
    )


@contextmanager
def _faults(request_id: str | None) -> Any:
    """The server's and the runtime's faults as the language's errors."""
    try:
        yield
    except HttpFault as fault:
        raise _error_of(fault) from fault
    except RuntimeFault as fault:
        raise as_program_error(fault, RuntimeEndpoint.name, request_id) from fault


def _made_again(
    base_url: str,
    api_key: str | None,
    verify: bool | str | None,
    template: str | None,
    timeout: float,
    retries: int,
    connections: int,
) -> RuntimeEndpoint:
    return RuntimeEndpoint(
        base_url,
        api_key,
        verify,
        template,
        timeout=timeout,
        retries=retries,
        max_connections=connections,
        lazy=True,
    )

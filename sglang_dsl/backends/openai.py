"""OpenAI: chat completions and completions, of OpenAI or of any server with a compatible API.

The wire format is that of the API reference at platform.openai.com/docs/api-reference (chat/create,
completions/create, streaming). Nothing is dropped: what the API cannot express raises Unsupported. It knows
no model's peculiarities; `extensions` lists what a server takes beyond OpenAI's own fields.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

import msgspec

from sglang_dsl.backends.base import (
    Backend,
    Call,
    ChoiceCall,
    ChoiceScore,
    ChoiceScores,
    Completion,
    Delta,
    Prompt,
)
from sglang_dsl.backends.common.chat_choices import ChatChoices, options_schema
from sglang_dsl.backends.common.faults import scored, scoring
from sglang_dsl.backends.common.openai_chat import offered, response_format, wire
from sglang_dsl.backends.common.openai_choices import Steps, drawn, likeliest
from sglang_dsl.backends.common.openai_stream import Reply, pieces_of
from sglang_dsl.backends.common.prompts import faults, turns
from sglang_dsl.backends.common.remote import (
    Leading,
    Shaped,
    check_spec_only,
    form_for,
    spoken,
)
from sglang_dsl.backends.common.transport import Limits, Transport
from sglang_dsl.conversation.usage import TokenUsage
from sglang_dsl.errors import BackendError, Unsupported

BASE_URL = "https://api.openai.com/v1"
# Our sampling words -> the API's.
TAKES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "stop": "stop",
    "seed": "seed",
    "logit_bias": "logit_bias",
}
# What compatible servers often take beside; a user names those that his server knows.
EXTENSIONS = {
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "min_new_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": "stop_token_ids",
    "stop_regex": "stop_regex",
    "regex": "regex",
    "ebnf": "ebnf",
    "prefill": "continue_final_message",
    "echo": "echo",
    "choices": "choices",
}
_MOST_TOPS = 5  # likeliest tokens that OpenAI tells, at most
_MOST_STEPS = 32
_HINT = (
    'use json_schema or choices in a chat, or pass extensions=["regex"] or ["ebnf"] if the server supports it'
)


def _deployment(endpoint: str | None, deployment: str) -> str:
    """The address of a deployment at Azure. Raises ValueError."""
    resource = endpoint or os.environ.get("AZURE_OPENAI_ENDPOINT")
    if not resource:
        raise ValueError(
            "is_azure needs azure_endpoint (https://NAME.openai.azure.com), AZURE_OPENAI_ENDPOINT in the "
            "environment, or the deployment's own address as base_url"
        )
    return f"{resource.rstrip('/')}/openai/deployments/{quote(deployment, safe='')}"


class OpenAI(Backend):
    """The model `model_name` at OpenAI's API, or at a compatible one.

    is_chat_model      True: chat completions; False: text completions, which take no turns; None: prompts
                       with turns use the former, prompts without turns the latter
    is_azure           use Azure's form of the API, which sends api_version. base_url is then the deployment's
                       URL; or azure_endpoint is the resource's (None: AZURE_OPENAI_ENDPOINT) and
                       azure_deployment the deployment's name (None: the model's name)
    api_key, base_url  None: OPENAI_API_KEY (AZURE_OPENAI_API_KEY) and OPENAI_BASE_URL from the environment
    extensions         names in EXTENSIONS that the server supports; "all" for all of them (the bundled
                       server)
    max_tokens_field   the field that limits a chat reply: "max_completion_tokens", or for older servers
                       "max_tokens"; only this one is sent
    max_retries        how often a request is sent again that was not started (no connection, 429, 503)

    token_usage counts what was charged.

    Constraints become structured output where a JSON schema can express them (json_schema, choices, the
    dtypes). The schema is strict if the API's strict mode supports it. Otherwise the reply is requested as
    JSON and checked here, which needs jsonschema.

    A choice is one reply held to the options, at the temperature of the select. With the extension "choices"
    (the bundled server's POST /generate) the options are measured by their log-probabilities.

    Text completions cannot be constrained. A dtype is read from the start of the reply, and a reply that
    starts with anything else is an error. A choice is the option that the reply most likely starts with, or
    above temperature 0 a draw; with the extension "echo" the options are measured.
    """

    name = "openai"
    speculates = tells_tokens = calls_tools = True

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: None = None,
        is_azure: bool = False,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        organization: str | None = None,
        project: str | None = None,
        api_version: str = "2024-10-21",
        azure_endpoint: str | None = None,
        azure_deployment: str | None = None,
        default_headers: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        max_retries: int = 3,
        extensions: Iterable[str] | str = (),
        max_tokens_field: str = "max_completion_tokens",
    ) -> None:
        if chat_template is not None:
            raise Unsupported("the API renders the messages itself; leave chat_template out")
        named = set(EXTENSIONS) if extensions == "all" else {*extensions}
        if unknown := sorted(named - set(EXTENSIONS)):
            raise ValueError(f"unknown extensions {', '.join(unknown)}; known: {', '.join(EXTENSIONS)}")
        self.model_name, self.is_chat_model = model_name, is_chat_model
        self.token_usage = TokenUsage()
        self._choices = ChatChoices(self.name)
        self._takes = TAKES | {word: EXTENSIONS[word] for word in named}
        self._extensions = named
        self.prefills = "prefill" in named
        self._limit_field = max_tokens_field
        key = os.environ.get("OPENAI_API_KEY", "") if api_key is None else api_key
        if is_azure and api_key is None:
            key = os.environ.get("AZURE_OPENAI_API_KEY", key)
        headers = {"api-key": key} if is_azure else {"Authorization": f"Bearer {key}"}
        if organization is not None:
            headers["OpenAI-Organization"] = organization
        if project is not None:
            headers["OpenAI-Project"] = project
        if is_azure:
            url = base_url or _deployment(azure_endpoint, azure_deployment or model_name)
        elif azure_endpoint is None and azure_deployment is None:
            url = base_url or os.environ.get("OPENAI_BASE_URL") or BASE_URL
        else:
            raise ValueError("azure_endpoint and azure_deployment are for Azure: pass is_azure=True, too")
        self._query = f"?api-version={api_version}" if is_azure else ""
        self._transport = Transport(
            url.rstrip("/"),
            ({} if not key and not is_azure else headers) | dict(default_headers or {}),
            limits=Limits(read_s=timeout, retries=max_retries),
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

    # -- the verbs -------------------------------------------------------------------------------------------

    async def generate(self, call: Call) -> Completion:
        path, body, shaped = self._request(call)
        with faults(self.name):
            answer = await self._transport.post(path, json.dumps(body).encode(), call.timeout)
        reply = Reply(self.name, chat=path.startswith("/chat"))
        texts, metas = reply.whole(answer, call.n)
        self._charge(metas[0])
        return shaped.completion(texts, metas)

    async def stream(self, call: Call) -> AsyncIterator[Delta]:
        if call.n != 1:
            raise Unsupported("a stream holds one text", hint="use n=1, or run without stream")
        if call.prompt.tools and call.tool_choice != "none":
            async for delta in self.whole(call):
                yield delta
            return
        path, body, shaped = self._request(call)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with faults(self.name):
            events = self._transport.events(path, json.dumps(body).encode(), call.timeout)
            reply = Reply(self.name, chat=path.startswith("/chat"))
            async with aclosing(pieces_of(events, reply)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    if delta.meta is None:
                        piece = shaped.piece(delta.text)
                        if piece or delta.reasoning:
                            yield Delta(piece, reasoning=delta.reasoning)
                        continue
                    self._charge(delta.meta)
                    yield shaped.last(delta.meta)

    async def score(self, call: ChoiceCall) -> ChoiceScores:
        text = self._text_of(call.prompt)
        if text is not None and "echo" in self._extensions:
            return await self._echoed(text, call)
        # A name with a colon may be that of an adapter, which this interface names in another way.
        if text is None and "choices" in self._extensions and ":" not in self.model_name:
            return await self._measured(call)
        if text is not None:
            return await self._likeliest(text, call)
        return await self._choices.scores(call, lambda room, words: self._chosen(call, room, words))

    async def info(self) -> dict[str, Any]:
        with faults(self.name):
            told = await self._transport.get(f"/models/{self.model_name}{self._query}", 30.0)
        return {
            "backend": self.name,
            "url": self._transport.base_url,
            **(told if isinstance(told, dict) else {}),
        }

    async def aclose(self) -> None:
        await self._transport.aclose()

    # -- requests --------------------------------------------------------------------------------------------

    def _request(self, call: Call) -> tuple[str, dict[str, Any], Shaped]:
        """Path, body, and how to read the constraint's text from the reply."""
        if call.options:
            raise Unsupported(
                f"{self.name} does not take {', '.join(sorted(call.options))}", backend=self.name
            )
        if call.logprob_start_len >= 0:
            raise Unsupported(f"{self.name} returns no log-probabilities of the prompt", backend=self.name)
        body: dict[str, Any] = {"model": self.model_name, **spoken(call.sampling, self._takes, self.name)}
        if call.n > 1:
            body["n"] = call.n
        text = self._text_of(call.prompt)
        return self._chat(call, body) if text is None else self._completion(call, text, body)

    def _text_of(self, prompt: Prompt) -> str | None:
        """A prompt for text completions; None for chat completions. Raises Unsupported."""
        text = None if self.is_chat_model else prompt.plain_text
        if text is None and self.is_chat_model is False:
            raise Unsupported(
                "a completion model takes text; this prompt has turns or media",
                backend=self.name,
                hint="leave is_chat_model out",
            )
        return text

    def _completion(self, call: Call, text: str, body: dict[str, Any]) -> tuple[str, dict[str, Any], Shaped]:
        body |= {"prompt": text, "max_tokens": call.sampling.max_new_tokens}
        if call.return_logprob:
            body["logprobs"] = max(call.top_logprobs, 1)
        return f"/completions{self._query}", body, self._constrain(call, body, chat=False)

    def _chat(self, call: Call, body: dict[str, Any]) -> tuple[str, dict[str, Any], Shaped]:
        body |= self._messages(call.prompt)
        body |= offered(call.prompt.tools, call.tool_choice, call.parallel_tools)
        body[self._limit_field] = call.sampling.max_new_tokens
        if call.return_logprob:
            body |= {"logprobs": True, "top_logprobs": call.top_logprobs}
        return f"/chat/completions{self._query}", body, self._constrain(call, body, chat=True)

    def _messages(self, prompt: Prompt) -> dict[str, Any]:
        done, prefill = turns(prompt, self.name)
        body: dict[str, Any] = {"messages": [wire(message) for message in done]}
        if prefill is not None:
            if "prefill" not in self._extensions:
                raise Unsupported(
                    f"{self.name} cannot continue a reply that has begun ({str(prefill.content)[:60]!r})",
                    backend=self.name,
                    hint='start assistant(...) with gen, or pass extensions=["prefill"] if the server '
                    "supports continue_final_message",
                )
            body["messages"].append(wire(prefill))
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return body

    def _constrain(self, call: Call, body: dict[str, Any], *, chat: bool) -> Shaped:
        constraint = call.constraint
        if constraint is not None and constraint.kind in self._extensions:
            check_spec_only(constraint, self.name)
            body[EXTENSIONS[constraint.kind]] = constraint.spec
            return Shaped(call, None, body)
        if constraint is not None and not chat and constraint.spec in Leading.KINDS:
            return Leading(call, constraint, body)
        if constraint is not None and not chat:
            raise Unsupported(
                f"text completions cannot enforce {constraint.kind}", backend=self.name, hint=_HINT
            )
        form = form_for(call, self.name, _HINT)
        if form is not None:
            body["response_format"] = response_format("reply", form.schema, strict=form.strict)
        return Shaped(call, form, body)

    def _charge(self, meta: Mapping[str, Any]) -> None:
        self.token_usage.add(meta.get("prompt_tokens") or 0, meta.get("completion_tokens") or 0)

    # -- choices ---------------------------------------------------------------------------------------------

    async def _echoed(self, text: str, call: ChoiceCall) -> ChoiceScores:
        """Scores by the log-probabilities of prompt + option, which the server gives back."""
        asked = [text + choice for choice in call.choices]
        answers = await self._echo(asked, call.timeout)
        starts = [_first_after(answer, len(text)) for answer in answers]
        offset = min(answer["text_offset"][at] for answer, at in zip(answers, starts, strict=True))
        scores: list[tuple[float, ...]] = []
        for answer, whole in zip(answers, asked, strict=True):
            spans = zip(answer["token_logprobs"], answer["text_offset"], strict=True)
            scores.append(tuple(lp for lp, at in spans if offset <= at < len(whole) and lp is not None))
        priors: list[tuple[float | None, ...] | None] = [None] * len(asked)
        if call.unconditional:
            bare = await self._echo(list(call.choices), call.timeout)
            priors = [
                tuple(answer["token_logprobs"][: len(score)])
                for answer, score in zip(bare, scores, strict=True)
            ]
        made = (ChoiceScore(score, (), prior) for score, prior in zip(scores, priors, strict=True))
        return ChoiceScores(tuple(made), {"exact": True})

    async def _likeliest(self, text: str, call: ChoiceCall) -> ChoiceScores:
        """By the likeliest next tokens, which every server tells. The options not chosen are not scored."""
        if call.unconditional:
            raise Unsupported(
                f"{self.name} returns no log-probabilities of given text",
                backend=self.name,
                hint='pass extensions=["echo"] if the server supports echo with logprobs',
            )
        room = min(_MOST_STEPS, 1 + max(map(len, call.choices)))
        seed = {} if call.seed is None or not call.temperature else {"seed": call.seed}

        async def ask(said: str) -> Steps:
            body = {
                "model": self.model_name,
                "prompt": text + said,
                "max_tokens": room,
                "logprobs": _MOST_TOPS,
                "temperature": call.temperature,
                **seed,
            }
            with faults(self.name):
                data = json.dumps(body).encode()
                answer = await self._transport.post(f"/completions{self._query}", data, call.timeout)
            texts, metas = Reply(self.name, chat=False).whole(answer, 1)
            self._charge(metas[0])
            told = zip(metas[0].get("output_token_logprobs", ()), metas[0].get("output_top_logprobs", ()))
            steps = [(token, {top: lp for lp, _, top in tops}) for (_, _, token), tops in told]
            return steps or [(texts[0], {})] * bool(texts[0])

        pick = drawn(call.temperature, random.Random(call.seed)) if call.temperature else None
        index, path = await likeliest(ask, call.choices, pick)
        none = ChoiceScore((-math.inf,))
        scores = (ChoiceScore(path) if at == index else none for at in range(len(call.choices)))
        return ChoiceScores(tuple(scores), {"exact": False, "how": "likeliest tokens"})

    async def _echo(self, prompts: Sequence[str], timeout: float | None) -> list[dict[str, Any]]:
        body = {
            "model": self.model_name,
            "prompt": list(prompts),
            "echo": True,
            "logprobs": 1,
            "max_tokens": 0,
            "temperature": 0,
        }
        with faults(self.name):
            data = json.dumps(body).encode()
            answer = await self._transport.post(f"/completions{self._query}", data, timeout)
        match answer:
            case {"choices": list(choices)} if len(choices) == len(prompts):
                found = [choice.get("logprobs") for choice in sorted(choices, key=lambda c: c["index"])]
            case _:
                raise BackendError(f"the API's answer is not a completion: {str(answer)[:200]!r}")
        usage = answer.get("usage") or {}
        self.token_usage.add(usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0)
        if not all(isinstance(one, dict) and one.get("token_logprobs") for one in found):
            raise Unsupported(f"{self.name} sent no log-probabilities with echo", backend=self.name)
        return found

    async def _chosen(
        self, call: ChoiceCall, room: int, words: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """One reply held to the options."""
        body: dict[str, Any] = {
            "model": self.model_name,
            **self._messages(call.prompt),
            **offered(call.prompt.tools),
            self._limit_field: room,
            **words,
            "response_format": response_format("choice", options_schema(call.choices), strict=True),
        }
        with faults(self.name):
            data = json.dumps(body).encode()
            answer = await self._transport.post(f"/chat/completions{self._query}", data, call.timeout)
        texts, metas = Reply(self.name, chat=True).whole(answer, 1)
        self._charge(metas[0])
        return texts[0], metas[0]

    async def _measured(self, call: ChoiceCall) -> ChoiceScores:
        """By the bundled server's own interface, at the same address."""
        prompt = call.prompt
        body = {"messages": msgspec.to_builtins(prompt.messages), **scoring(call)}
        body |= {"tools": list(prompt.tools)} if prompt.tools else {}
        path = f"{self._transport.base_url.removesuffix('/v1')}/generate"
        with faults(self.name):
            answer = await self._transport.post(path, json.dumps(body).encode(), call.timeout)
        found = scored(answer, call, self.name)
        self._charge(found.meta)
        return found


def _first_after(answer: Mapping[str, Any], length: int) -> int:
    """Index of the first token that ends beyond `length` characters."""
    offsets = answer["text_offset"]
    ends = [*offsets[1:], math.inf]
    return next(at for at, end in enumerate(ends) if end > length)

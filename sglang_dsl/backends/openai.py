"""OpenAI: chat completions and completions (platform.openai.com/docs/api-reference), of OpenAI or of any
server with a compatible API. Nothing is dropped: what the API cannot express raises Unsupported.
"""

from __future__ import annotations

import math
import os
import random
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from sglang_dsl.backends.base import Call, ChoiceCall, ChoiceScore, ChoiceScores, Prompt
from sglang_dsl.backends.common.api import ApiBackend, ApiRequest
from sglang_dsl.backends.common.native import as_json, choices_request, output_of, scores_of
from sglang_dsl.backends.common.openai_chat import STREAMED, OpenAIReply, chat_fields, chat_messages
from sglang_dsl.backends.common.openai_choices import Steps, drawn, likeliest
from sglang_dsl.backends.common.prompts import faults
from sglang_dsl.backends.common.remote import Leading, Shaped
from sglang_dsl.errors import BackendError, Unsupported

BASE_URL = "https://api.openai.com/v1"
# Our sampling parameters -> the API's.
_SAME = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "stop", "seed", "logit_bias")
TAKES = {name: name for name in _SAME}
# What compatible servers often take beside; a user names those that his server knows.
_EXTENSIONS = (
    "top_k", "min_p", "repetition_penalty", "min_new_tokens", "ignore_eos", "stop_token_ids", "stop_regex",
    "regex", "ebnf", "prefill", "echo", "choices",
)  # fmt: skip
_RENAMED = {"min_new_tokens": "min_tokens", "prefill": "continue_final_message"}
EXTENSIONS = {name: _RENAMED.get(name, name) for name in _EXTENSIONS}
_MOST_TOPS = 5  # likeliest tokens that OpenAI returns, at most
_MOST_STEPS = 32


def _deployment(endpoint: str | None, deployment: str) -> str:
    """The address of a deployment at Azure. Raises ValueError."""
    resource = endpoint or os.environ.get("AZURE_OPENAI_ENDPOINT")
    if not resource:
        raise ValueError(
            "is_azure needs azure_endpoint (https://NAME.openai.azure.com), AZURE_OPENAI_ENDPOINT in the "
            "environment, or the deployment's own address as base_url"
        )
    return f"{resource.rstrip('/')}/openai/deployments/{quote(deployment, safe='')}"


class OpenAI(ApiBackend):
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

    Constraints become structured output where a JSON schema can express them (json_schema, choices, the
    dtypes). A schema that the API's strict mode does not support is checked here, which needs jsonschema.

    A choice is one reply held to the options, at the temperature of the select. With the extension "choices"
    (the bundled server's POST /generate) the options are measured by their log-probabilities.

    Text completions cannot be constrained. A dtype is read from the start of the reply, and a reply that
    starts with anything else is an error. A choice is the option that the reply most likely starts with, or
    above temperature 0 a draw; with the extension "echo" the options are measured.
    """

    name = "openai"
    reply = OpenAIReply
    reports_tokens = True
    constraint_hint = (
        'use json_schema or choices in a chat, or pass extensions=["regex"] or ["ebnf"] if the server '
        "supports it"
    )

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
        super().__init__(model_name)
        self.is_chat_model = is_chat_model
        self.takes = TAKES | {name: EXTENSIONS[name] for name in named}
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
        self._connect(url, headers if key or is_azure else {}, default_headers, timeout, max_retries)

    async def score(self, call: ChoiceCall) -> ChoiceScores:
        text = self._text_of(call.prompt)
        if text is not None and "echo" in self._extensions:
            return await self._echoed(text, call)
        # A name with a colon may be that of an adapter, which this interface names in another way.
        if text is None and "choices" in self._extensions and ":" not in self.model_name:
            return await self._measured(call)
        if text is not None:
            return await self._likeliest(text, call)
        return await super().score(call)

    async def info(self) -> dict[str, Any]:
        with faults(self.name):
            model = await self._transport.get(f"/models/{self.model_name}{self._query}", 30.0)
        return {
            "backend": self.name,
            "url": self._transport.base_url,
            **(model if isinstance(model, dict) else {}),
        }

    # -- requests --------------------------------------------------------------------------------------------

    def request(self, call: Call, sampling: dict[str, Any], shaped: Shaped, *, stream: bool) -> ApiRequest:
        body: dict[str, Any] = {"model": self.model_name, **sampling}
        if call.constraint is not None and call.constraint.kind in self._extensions:
            body[EXTENSIONS[call.constraint.kind]] = call.constraint.spec
        if stream:
            body |= STREAMED
        text = self._text_of(call.prompt)
        if text is None:
            hint = 'or pass extensions=["prefill"] if the server supports continue_final_message'
            body |= chat_messages(call.prompt, self.name, prefill=self.prefills, hint=hint)
            body |= chat_fields(call, shaped.form, self._limit_field)
            return ApiRequest(f"/chat/completions{self._query}", body)
        if call.may_call_tools:
            raise Unsupported(
                "text completions take no tools", hint="write the prompt as turns, for a chat model"
            )
        body |= {"prompt": text + shaped.opening, "max_tokens": call.sampling.max_new_tokens}
        if call.n > 1:
            body["n"] = call.n
        if call.wants_logprobs:
            body["logprobs"] = max(call.top_logprobs, 1)
        return ApiRequest(f"/completions{self._query}", body)

    def shape(self, call: Call) -> Shaped:
        constraint = call.constraint
        if constraint is not None and constraint.kind in self._extensions:
            self.check_options(constraint)
            return Shaped(call, None)
        if constraint is None or self._text_of(call.prompt) is None:
            return super().shape(call)
        if constraint.spec in Leading.KINDS:
            return Leading(call, constraint)
        raise Unsupported(f"text completions cannot enforce {constraint.kind}", hint=self.constraint_hint)

    def _text_of(self, prompt: Prompt) -> str | None:
        """A prompt for text completions; None for chat completions. Raises Unsupported."""
        text = None if self.is_chat_model else prompt.plain_text
        if text is None and self.is_chat_model is False:
            raise Unsupported(
                "a completion model takes text; this prompt has turns or media",
                hint="leave is_chat_model out",
            )
        return text

    # -- choices ---------------------------------------------------------------------------------------------

    async def _echoed(self, text: str, call: ChoiceCall) -> ChoiceScores:
        """Scores by the log-probabilities of prompt + option, which the server gives back."""
        prompts = [text + choice for choice in call.choices]
        answers = await self._echo(prompts, call.timeout)
        # The first token that ends beyond the prompt.
        starts = [max(0, bisect_right(answer["text_offset"], len(text)) - 1) for answer in answers]
        offset = min(answer["text_offset"][at] for answer, at in zip(answers, starts, strict=True))
        scores: list[tuple[float, ...]] = []
        for answer, whole in zip(answers, prompts, strict=True):
            spans = zip(answer["token_logprobs"], answer["text_offset"], strict=True)
            scores.append(tuple(lp for lp, at in spans if offset <= at < len(whole) and lp is not None))
        priors: list[tuple[float | None, ...] | None] = [None] * len(prompts)
        if call.unconditional:
            bare = await self._echo(list(call.choices), call.timeout)
            priors = [
                tuple(answer["token_logprobs"][: len(score)])
                for answer, score in zip(bare, scores, strict=True)
            ]
        pairs = zip(scores, priors, strict=True)
        return ChoiceScores(tuple(ChoiceScore(score, (), prior) for score, prior in pairs), {"exact": True})

    async def _likeliest(self, text: str, call: ChoiceCall) -> ChoiceScores:
        """By the likeliest next tokens, which every server returns. The options not chosen are not scored."""
        if call.unconditional:
            raise Unsupported(
                f"{self.name} returns no log-probabilities of given text",
                hint='pass extensions=["echo"] if the server supports echo with logprobs',
            )
        sampling: dict[str, Any] = {"temperature": call.temperature}
        if call.seed is not None and call.temperature:
            sampling["seed"] = call.seed
        fields = {
            "max_tokens": min(_MOST_STEPS, 1 + max(map(len, call.choices))),
            "logprobs": _MOST_TOPS,
            **self.renamed(sampling),
        }

        async def ask(prefix: str) -> Steps:
            answer = await self._complete(text + prefix, fields, call.timeout)
            [reply], [meta] = self.read(answer, 1)
            tokens = zip(meta.get("output_token_logprobs", ()), meta.get("output_top_logprobs", ()))
            steps = [(token, {top: lp for lp, _, top in tops}) for (_, _, token), tops in tokens]
            return steps or [(reply, {})] * bool(reply)

        pick = drawn(call.temperature, random.Random(call.seed)) if call.temperature else None
        index, path = await likeliest(ask, call.choices, pick)
        none = ChoiceScore((-math.inf,))
        scores = (ChoiceScore(path) if at == index else none for at in range(len(call.choices)))
        return ChoiceScores(tuple(scores), {"exact": False, "how": "likeliest tokens"})

    async def _complete(
        self, prompt: str | list[str], fields: Mapping[str, Any], timeout: float | None
    ) -> Any:
        body = {"model": self.model_name, "prompt": prompt, **fields}
        return await self.send(ApiRequest(f"/completions{self._query}", body), timeout)

    async def _echo(self, prompts: Sequence[str], timeout: float | None) -> list[dict[str, Any]]:
        fields = {"echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
        answer = await self._complete(list(prompts), fields, timeout)
        samples = OpenAIReply.samples(answer, len(prompts))
        logprobs = [one["choices"][0].get("logprobs") for one in samples]
        self.token_usage.count(answer.get("usage") or {})
        if not all(isinstance(one, dict) and one.get("token_logprobs") for one in logprobs):
            raise Unsupported(f"{self.name} sent no log-probabilities with echo")
        return logprobs

    async def _measured(self, call: ChoiceCall) -> ChoiceScores:
        """By the bundled server's own interface, at the same address."""
        body = as_json(choices_request(call, call.prompt.fields))
        path = f"{self._transport.base_url.removesuffix('/v1')}/generate"
        output = output_of(await self.send(ApiRequest(path, body), call.timeout), self.name)
        missing = BackendError("the server returned a choice without scores")
        self.token_usage.count(output.meta)
        return scores_of(output, call, missing)


CRUSOE_URL = "https://api.inference.crusoecloud.com/v1"


class Crusoe(OpenAI):
    """The model `model_name` at Crusoe: managed inference of open models behind an OpenAI-compatible API
    (docs.crusoecloud.com, "Serverless Inference"). api_key None: CRUSOE_API_KEY from the environment. Other
    keyword arguments as for OpenAI."""

    name = "crusoe"

    def __init__(
        self, model_name: str, api_key: str | None = None, base_url: str | None = None, **kwargs: Any
    ) -> None:
        key = os.environ.get("CRUSOE_API_KEY", "") if api_key is None else api_key
        kwargs.setdefault("is_chat_model", True)
        super().__init__(model_name, api_key=key, base_url=base_url or CRUSOE_URL, **kwargs)

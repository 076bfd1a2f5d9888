"""POST /v1/completions: OpenAI's text completions, streamed or whole. Prompts may be a text, ids, or a list
of either; with `suffix` the completion stands between the prompt and that text (fill-in-the-middle).
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from runtime.formats.reply import ReplyParser
from runtime.protocol.errors import BadRequest
from runtime.protocol.io_struct import GenerateReqInput, OutputDelta
from runtime.protocol.request_base import new_rid
from runtime.protocol.vocabulary import Vocabulary
from runtime.server.context import RouteGroup, ServerContext, serves
from runtime.server.http.body import check_range
from runtime.server.http.sse import DONE, event
from runtime.server.openai import params
from runtime.server.openai.logprobs import spelled
from runtime.server.replies import Generation

MAX_TOKENS = 16
MAX_LOGPROBS = 20


class CompletionRequest(params.Generating):
    """OpenAI's fields of the older interface, and the extensions of Generating."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None
    max_tokens: int | None = None
    suffix: str | None = None

    @property
    def drawn(self) -> int:
        """Samples to draw of each prompt, of which the best n are given."""
        return max(self.samples, self.best_of or 1)


class CompletionChoice(msgspec.Struct):
    """matched_stop: the stop string or id that ended the text. On request: hidden_states and prompt_token_ids
    at its end; token_ids (the new ones), prompt_logprobs, as in vLLM."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    matched_stop: str | int | None = None
    hidden_states: list[list[float]] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: dict[str, Any] | None
    object: str = "text_completion"


_COMPLETION = params.openai_operation(
    "Text completion", request=CompletionRequest, response=Completion, stream=True
)


class Completions(RouteGroup):
    @serves(_COMPLETION, "POST /v1/completions")
    async def completions(self, request: Request) -> Any:
        job = await self._ctx.admit(request, CompletionRequest, functools.partial(_Job, self._ctx))
        return await self._ctx.reply(request, job)


class _Job:
    """One request: its prompts, and how its outputs become choices."""

    def __init__(self, ctx: ServerContext, body: CompletionRequest) -> None:
        self._ctx, self._body, self.streams = ctx, body, bool(body.stream)
        prompt = params.prompts_of(body.prompt, "prompt")
        fields, names = params.fields_of(
            ctx, body, MAX_TOKENS if body.max_tokens is None else body.max_tokens
        )
        fields["sampling_params"]["n"] = body.drawn
        self._check(body)
        if body.suffix:
            fields["suffix"] = body.suffix
        if body.logprobs is not None:
            fields = params.with_logprobs(fields, body.logprobs)
            if body.echo:
                fields["logprob_start_len"] = 0
        elif body.drawn > body.samples:
            fields["return_logprob"] = True
        request = GenerateReqInput(**prompt, stream=bool(body.stream), **fields)
        self._generation = Generation(ctx, request, names, parsed=False, keep_aborted=True)
        self._request, self._replies = self._generation.request, self._generation.replies
        vocabulary = ctx.manager.tokenizer.vocabulary
        self._logprobs = {
            reply: _Logprobs(vocabulary, body.logprobs or 0, bool(body.return_tokens_as_token_ids))
            for reply in self._replies
        }
        self._prompt, self._shows_usage = prompt, body.streaming.continuous_usage_stats
        self._id = f"cmpl-{body.named or new_rid()}"
        self._created = int(ctx.clock())

    def _check(self, body: CompletionRequest) -> None:
        if body.best_of is not None and body.best_of < body.samples:
            raise BadRequest(f"must be at least n ({body.samples}), got {body.best_of}", where="best_of")
        if body.drawn > body.samples and body.stream:
            raise BadRequest(
                "cannot be streamed: the best completions are known only at the end", where="best_of"
            )
        check_range(body.logprobs, "logprobs", 0, MAX_LOGPROBS)
        if body.echo and body.suffix:
            raise BadRequest("cannot be combined with suffix", where="echo")

    @functools.cached_property
    def _echoed(self) -> list[str]:
        """The texts before the outputs of each prompt, for echo. Used when there are outputs: then the
        prompts are valid."""
        if not self._body.echo:
            return [""] * self._request.batch_size
        if "text" in self._prompt:
            text = self._prompt["text"]
            return [text] if isinstance(text, str) else list(text)
        ids = self._prompt["input_ids"]
        many = [ids] if isinstance(ids[0], int) else ids
        return [self._ctx.manager.tokenizer.decode(some) for some in many]

    # -- whole -----------------------------------------------------------------------------------------------

    async def whole(self) -> Completion:
        await self._generation.run()
        prompts, samples = self._request.batch_size, self._body.samples
        choices: list[CompletionChoice] = []
        for prompt in range(prompts):
            replies = self._replies[prompt::prompts]
            if self._body.drawn > samples:
                replies.sort(key=_mean_logprob, reverse=True)
            for number, reply in enumerate(replies[:samples]):
                choices.append(self._choice(prompt * samples + number, reply, self._echoed[prompt]))
        return Completion(self._id, self._created, self._ctx.served_name, choices, self._usage())

    def _choice(self, index: int, reply: ReplyParser, echoed: str) -> CompletionChoice:
        """Of the reply's last delta."""
        output = reply.output
        assert output is not None
        reason, matched = params.finish_of(reply)
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._logprobs[reply].new(output, with_prompt=self._body.echo and reply.is_first)
        extras = params.extras_of(reply) if reason else {}
        if self._body.return_token_ids:
            extras["token_ids"] = params.new_ids_of(reply)
            if reply.is_first:
                extras["prompt_token_ids"] = reply.meta["prompt_token_ids"]
        if reason:
            extras["prompt_logprobs"] = params.prompt_logprobs_of(self._body, reply)
        return CompletionChoice(index, echoed + output.text, logprobs, reason, matched, **extras)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        prompts, samples = self._request.batch_size, self._body.samples
        async with self._generation.follow() as changes:
            async for index, reply in changes:
                echoed = self._echoed[index % prompts] if reply.is_first else ""
                # Items come as p1, p2, ..., p1, p2, ...; choices are numbered prompt by prompt.
                choice = self._choice(index % prompts * samples + index // prompts, reply, echoed)
                tokens = choice.logprobs["tokens"] if choice.logprobs else choice.token_ids
                if choice.text or choice.finish_reason or (tokens is not msgspec.UNSET and tokens):
                    yield self._chunk([choice], self._usage() if self._shows_usage else None)
        if self._body.streaming.include_usage:
            yield self._chunk([], self._usage())
        yield DONE

    def _usage(self) -> dict[str, Any]:
        return params.usage_of(self._ctx, self._replies, self._request.batch_size)

    def _chunk(self, choices: list[CompletionChoice], usage: dict[str, Any] | None) -> bytes:
        return event(Completion(self._id, self._created, self._ctx.served_name, choices, usage))


class _Logprobs:
    """OpenAI's parallel lists of one choice."""

    def __init__(self, vocabulary: Vocabulary, top: int, as_ids: bool) -> None:
        self._vocabulary, self._top, self._as_ids = vocabulary, top, as_ids
        self._offset = 0
        # Tokens may be parts of characters: an offset is the length of the complete text before the token.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def new(self, output: OutputDelta, *, with_prompt: bool) -> dict[str, Any]:
        """The delta's tokens; before them the prompt's, if it is echoed. top_logprobs: null unless asked
        for."""
        lists: dict[str, Any] = {"tokens": [], "token_logprobs": [], "text_offset": []}
        lists["top_logprobs"] = [] if self._top else None
        meta = output.meta
        if with_prompt:
            self._add(lists, meta.get("input_token_logprobs"), meta.get("input_top_logprobs"), 0)
        self._add(lists, meta.get("output_token_logprobs"), meta.get("output_top_logprobs"), output.replaced)
        return lists

    def _add(self, lists: dict[str, Any], tokens: Any, tops: Any, first: int) -> None:
        for at, (logprob, token, text) in enumerate((tokens or [])[first:], first):
            name, raw = spelled(self._vocabulary, token, text)
            lists["tokens"].append(f"token_id:{token}" if self._as_ids else name)
            lists["token_logprobs"].append(logprob)
            lists["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(raw))
            if self._top:
                top = tops[at] if tops and at < len(tops) else None
                lists["top_logprobs"].append(self._by_text(top) if top else None)

    def _by_text(self, top: Sequence[Sequence[Any]]) -> dict[str, float]:
        """The likeliest tokens by their text; of several with one text the likeliest."""
        by_text: dict[str, float] = {}
        for logprob, token, text in top[: self._top]:
            name = f"token_id:{token}" if self._as_ids else spelled(self._vocabulary, token, text)[0]
            by_text.setdefault(name, logprob)
        return by_text


def _mean_logprob(reply: ReplyParser) -> float:
    values = [entry[0] for entry in reply.meta.get("output_token_logprobs") or () if entry[0] is not None]
    return sum(values) / len(values) if values else float("-inf")

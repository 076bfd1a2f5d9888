"""/v1/score and /v1/rerank: how well texts go together, as sglang's and vLLM's clients ask for it.

    query, items, label_token_ids    sglang's: the probability of each label as the next token after query and
                                     item (a model that generates)
    text_1, text_2 (or queries, documents)       vLLM's: one score per pair
    query, documents                 /v1/rerank: the documents by their score, best first

A pair's score: for a classifier with one label (a cross-encoder) its output; for an encoder the cosine of the
two vectors; for a model that generates the probability of "yes" against "no" as its answer to whether the
document meets the query (RankGPT's pointwise prompt, as in Qwen3-Reranker's card).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from operator import mul
from typing import Any, TypeAlias

import msgspec
from starlette.requests import Request

from runtime.formats.chat.render import conversation
from runtime.protocol.errors import BadRequest, NotSupported, RuntimeFault
from runtime.protocol.messages import Message
from runtime.protocol.request_base import new_rid
from runtime.protocol.requests.embedding import EmbeddingReqInput
from runtime.protocol.requests.generate import GenerateReqInput
from runtime.server.context import RouteGroup, ServerContext, serves
from runtime.server.http.body import check_range
from runtime.server.http.errors import mapped_errors
from runtime.server.http.sse import while_connected
from runtime.server.openai.params import DEFAULT_MODEL, check_model, openai_operation
from runtime.server.replies import embed, thinking_switch

ANSWERS = ("yes", "no")
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
Pairs: TypeAlias = Sequence[tuple[str, str]]
Scored: TypeAlias = tuple[list[float], int]
"""The score of each pair, and the number of prompt tokens."""


class Scoring(msgspec.Struct, kw_only=True):
    """instruction, instruct: what a document must meet, for models that generate only."""

    model: str = DEFAULT_MODEL
    user: str | None = None
    rid: str | None = None
    request_id: str | None = None
    priority: int | None = None
    timeout_s: float | None = None
    instruction: str | None = None
    instruct: str | None = None


class ScoreRequest(Scoring, kw_only=True, forbid_unknown_fields=True):
    """query, items: texts, or ids. apply_softmax: normalise the labels' probabilities, at `temperature`.
    item_first: the item comes before the query. text_1, text_2: of equal number, or one text_1 for all of
    text_2; queries and documents, data_1 and data_2 are other names of them."""

    query: str | list[int] | None = None
    items: str | list[str | int | list[int]] | None = None
    label_token_ids: list[int] | None = None
    apply_softmax: bool = False
    item_first: bool = False
    temperature: float = 1.0
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


class RerankDocument(msgspec.Struct):
    text: str


class RerankRequest(Scoring, kw_only=True, forbid_unknown_fields=True):
    """As vLLM's and Cohere's clients send it. top_n: the number of results, 0 for all. max_tokens_per_doc:
    the tokens that are read of each document."""

    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    return_documents: bool = True
    max_tokens_per_doc: int | None = None


class ScoreUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class LabelScores(msgspec.Struct, tag_field="object", tag="scoring"):
    """Of each item the labels' probabilities, in the order of label_token_ids."""

    scores: list[list[float]]
    model: str
    usage: ScoreUsage


class PairScore(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class PairScores(msgspec.Struct, tag_field="object", tag="list"):
    id: str
    created: int
    model: str
    data: list[PairScore]
    usage: ScoreUsage


class Ranked(msgspec.Struct):
    """index: of the document in the request."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class Ranking(msgspec.Struct):
    """The best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: ScoreUsage


_SCORE = openai_operation(
    "how well texts go together, or how probable labels are after a text",
    ScoreRequest,
    LabelScores | PairScores,
)
_RERANK = openai_operation("documents by how well they meet a query", RerankRequest, Ranking)


class Scores(RouteGroup):
    @serves(_SCORE, "POST /v1/score", "POST /score")
    async def score(self, request: Request) -> LabelScores | PairScores:
        body = await self._ctx.body(request, ScoreRequest)
        if body.items is not None:
            return await while_connected(request, _labels(self._ctx, body))
        return await while_connected(request, _pairs(self._ctx, body))

    @serves(_RERANK, "POST /v1/rerank", "POST /rerank", "POST /v2/rerank")
    async def rerank(self, request: Request) -> Ranking:
        body = await self._ctx.body(request, RerankRequest)
        return await while_connected(request, _ranking(self._ctx, body))


# -- labels ----------------------------------------------------------------------------------------------


async def _labels(ctx: ServerContext, body: ScoreRequest) -> LabelScores:
    adapter = check_model(ctx, body.model)
    labels = body.label_token_ids or []
    for name in ("text_1", "text_2", "queries", "documents", "data_1", "data_2", "instruction", "instruct"):
        if getattr(body, name):
            raise BadRequest("cannot be combined with items", where=name)
    if not ctx.model.is_generation:
        raise NotSupported(
            "only models that generate can score labels; send text_1 and text_2", where="items"
        )
    if not labels or len(set(labels)) < len(labels):
        raise BadRequest("must be a non-empty list of ids without duplicates", where="label_token_ids")
    if not 0 < body.temperature < math.inf:
        raise BadRequest(f"must be a positive number, got {body.temperature}", where="temperature")
    if body.temperature != 1 and not body.apply_softmax:
        raise BadRequest("needs apply_softmax: true", where="temperature")
    with mapped_errors(
        {"token_ids_logprob": "label_token_ids", "text": "items", "input_ids": "items", "rid": "request_id"}
    ):
        request = ctx.with_deadline(
            GenerateReqInput(
                **_prompts(ctx, body),
                sampling_params={"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
                return_logprob=True,
                token_ids_logprob=[*labels],
                lora_path=adapter,
                **_common(body),
            )
        )
        request.normalize_batch_and_arguments()
        outcomes = await ctx.manager.submit_batch(request)
        scores, tokens = [], 0
        for outcome in outcomes:
            if isinstance(outcome, RuntimeFault):
                raise outcome
            [entries] = outcome.meta["output_token_ids_logprobs"]
            by_id = {token: logprob for logprob, token, _ in entries}
            scores.append(_probabilities([by_id[label] for label in labels], body))
            tokens += int(outcome.meta["prompt_tokens"])
    return LabelScores(scores, ctx.served_name, ScoreUsage(tokens, tokens))


def _prompts(ctx: ServerContext, body: ScoreRequest) -> dict[str, Any]:
    """Query and item of each, joined. Raises BadRequest."""
    query, items = body.query, body.items
    if not items:
        raise BadRequest("is empty", where="items")
    listed: list[Any] = [items] if isinstance(items, str) or isinstance(items[0], int) else list(items)
    if query is None:
        raise BadRequest("is missing", where="query")
    kind = str if isinstance(query, str) else list
    if not all(isinstance(item, kind) for item in listed):
        raise BadRequest("query and items must be either all strings or all ids", where="items")
    _check_work(ctx, len(listed), len(query) * len(listed) + sum(map(len, listed)), "items")
    wholes = [item + query if body.item_first else query + item for item in listed]
    return {"text" if kind is str else "input_ids": wholes}


def _probabilities(logprobs: Sequence[float | None], body: ScoreRequest) -> list[float]:
    known = [-math.inf if one is None else one for one in logprobs]
    if not body.apply_softmax:
        return [math.exp(one) for one in known]
    scaled = [one / body.temperature for one in known]
    most = max(scaled)
    if most == -math.inf:
        return [1 / len(scaled)] * len(scaled)
    powers = [math.exp(one - most) for one in scaled]
    return [one / sum(powers) for one in powers]


# -- pairs -----------------------------------------------------------------------------------------------


async def _pairs(ctx: ServerContext, body: ScoreRequest) -> PairScores:
    for name in ("query", "label_token_ids", "apply_softmax", "item_first"):
        if getattr(body, name):
            raise BadRequest("needs items", where=name)
    one, first = _side(body, "text_1", "queries", "data_1")
    two, second = _side(body, "text_2", "documents", "data_2")
    if len(first) not in (1, len(second)):
        raise BadRequest(f"has {len(first)} texts, {two} {len(second)}", where=one)
    queries = first * len(second) if len(first) == 1 else first
    scores, tokens = await _pair_scores(ctx, body, list(zip(queries, second, strict=True)), two)
    data = [PairScore(index, value) for index, value in enumerate(scores)]
    named = body.request_id or body.rid or new_rid()
    usage = ScoreUsage(tokens, tokens)
    return PairScores(f"score-{named}", int(ctx.clock()), ctx.served_name, data, usage)


def _side(body: ScoreRequest, *names: str) -> tuple[str, list[str]]:
    """The name and the texts of one side. Raises BadRequest."""
    present = [name for name in names if getattr(body, name) is not None]
    if len(present) != 1:
        raise BadRequest("is missing" if not present else f"is given as {present[1]}, too", where=names[0])
    value = getattr(body, present[0])
    texts = [value] if isinstance(value, str) else list(value)
    if not texts:
        raise BadRequest("is empty", where=present[0])
    return present[0], texts


async def _ranking(ctx: ServerContext, body: RerankRequest) -> Ranking:
    if not body.documents:
        raise BadRequest("is empty", where="documents")
    check_range(body.top_n, "top_n", 0)
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    _check_work(ctx, len(texts), sum(map(len, texts)), "documents")
    check_range(body.max_tokens_per_doc, "max_tokens_per_doc", 1)
    read = texts
    if (most := body.max_tokens_per_doc) is not None:
        shorten = partial(_shortened, ctx, texts, most)
        read = await ctx.manager.encoding.run(sum(map(len, texts)), shorten)
    scores, tokens = await _pair_scores(ctx, body, [(body.query, text) for text in read], "documents")
    best = sorted(range(len(texts)), key=lambda index: (-scores[index], index))[: body.top_n or None]
    results = [
        Ranked(index, scores[index], RerankDocument(texts[index]) if body.return_documents else None)
        for index in best
    ]
    named = body.request_id or body.rid or new_rid()
    return Ranking(f"rerank-{named}", ctx.served_name, results, ScoreUsage(tokens, tokens))


def _shortened(ctx: ServerContext, texts: list[str], most: int) -> list[str]:
    tokenizer = ctx.manager.tokenizer
    ids = [tokenizer.encode_plain(text) for text in texts]
    pairs = zip(texts, ids, strict=True)
    return [text if len(tokens) <= most else tokenizer.decode(tokens[:most], False) for text, tokens in pairs]


async def _pair_scores(ctx: ServerContext, body: Scoring, pairs: Pairs, path: str) -> Scored:
    """path: the field that has the second texts. Raises BadRequest."""
    check_model(ctx, body.model)
    _check_work(ctx, len(pairs), sum(len(one) + len(two) for one, two in pairs), path)
    if body.instruct and body.instruction:
        raise BadRequest("cannot be combined with instruction", where="instruct")
    with mapped_errors({"text": path, "messages": path, "rid": "request_id"}):
        if ctx.model.is_generation:
            return await _judged(ctx, body, pairs)
        for name in ("instruct", "instruction"):
            if getattr(body, name):
                raise BadRequest("is only supported by models that generate", where=name)
        if ctx.model.architecture.endswith("ForSequenceClassification"):
            return await _crossed(ctx, body, pairs)
        return await _compared(ctx, body, pairs)


async def _crossed(ctx: ServerContext, body: Scoring, pairs: Pairs) -> Scored:
    """By a cross-encoder."""
    vectors, tokens = await _embedded(ctx, body, list(map(list, pairs)), is_cross_encoder_request=True)
    if any(len(vector) != 1 for vector in vectors):
        raise NotSupported(
            f"this classifier has {len(vectors[0])} labels, but a score needs exactly one",
            where="model",
            hint="/classify returns all of them",
        )
    return [vector[0] for vector in vectors], tokens


async def _compared(ctx: ServerContext, body: Scoring, pairs: Pairs) -> Scored:
    """By the cosine of their vectors."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    vectors, tokens = await _embedded(ctx, body, texts)
    known = {text: (vector, math.hypot(*vector) or 1.0) for text, vector in zip(texts, vectors, strict=True)}
    scores = []
    for query, document in pairs:
        (one, length), (two, other) = known[query], known[document]
        scores.append(sum(map(mul, one, two)) / length / other)
    return scores, tokens


async def _embedded(
    ctx: ServerContext, body: Scoring, texts: list[Any], **options: Any
) -> tuple[list[list[float]], int]:
    adapter = check_model(ctx, body.model)
    options |= _common(body)
    request = ctx.with_deadline(EmbeddingReqInput(text=texts, lora_path=adapter, **options))
    request.normalize_batch_and_arguments()
    outputs = await embed(ctx, request, {})
    return [one.embedding for one in outputs], sum(one.prompt_tokens for one in outputs)


async def _judged(ctx: ServerContext, body: Scoring, pairs: Pairs) -> Scored:
    """By the answer of a model that generates."""
    instruction = body.instruct or body.instruction or INSTRUCTION
    fields = _common(body)
    named = fields.pop("rid")
    requests = []
    for index, (query, document) in enumerate(pairs):
        prompt = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        request = GenerateReqInput(
            messages=conversation([Message("system", JUDGE), Message("user", prompt)]),
            template_kwargs=thinking_switch(ctx, False) or None,
            choices=list(ANSWERS),
            lora_path=check_model(ctx, body.model),
            rid=None if named is None else f"{named}_{index}",
            **fields,
        )
        requests.append(ctx.with_deadline(request))
    scores, tokens = [], 0
    for output in await ctx.manager.submit_batch(requests):
        if isinstance(output, RuntimeFault):
            raise output
        yes, no = (sum(choice.logprobs) for choice in output.choices or ())
        scores.append(1 / (1 + math.exp(min(700.0, no - yes))))
        tokens += int(output.meta["prompt_tokens"])
    return scores, tokens


def _common(body: Scoring) -> dict[str, Any]:
    """Fields of a request that are the same for all its items."""
    if body.rid and body.request_id and body.rid != body.request_id:
        raise BadRequest("must be the same as rid, which also names the request", where="request_id")
    named = body.rid or body.request_id or None
    return {"priority": body.priority or 0, "timeout_s": body.timeout_s, "rid": named}


def _check_work(ctx: ServerContext, number: int, size: int, path: str) -> None:
    """size: characters, or ids, of all texts, each counted as often as it is read."""
    limit = ctx.config.max_batch_items
    if number > limit:
        raise BadRequest(
            f"{number} texts in one request; at most {limit}",
            where=path,
            hint="send several requests, or start the server with a larger max_batch_items",
        )
    if size > (most := ctx.config.max_encode_chars // 2):
        raise BadRequest(
            f"all pairs together have {size} characters; at most {most}", where=path, hint="max_encode_chars"
        )

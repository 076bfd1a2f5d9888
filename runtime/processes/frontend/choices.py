"""Choices of a request -> the scheduler's requests that score them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.processes.frontend.prompt import Limits, Prompt, PromptReader
from runtime.protocol.errors import BadRequest
from runtime.protocol.io_struct import TokenizedGenerateReqInput
from runtime.protocol.messages import ImageInput
from runtime.protocol.requests.generate import SingleGenerateReq
from runtime.protocol.sampling import SamplingParams

SCORING = SamplingParams(max_new_tokens=0)


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a choice. ids: its tokens after the boundary. scored: index of its request in the job.
    alone: index of its request without the prompt."""

    text: str
    ids: tuple[int, ...]
    scored: int
    alone: int | None = None


def scoring_requests(
    request: SingleGenerateReq,
    prompt: Prompt,
    prompts: PromptReader,
    tokenizer: Tokenizer,
    limits: Limits,
    wire_rid: Callable[[SingleGenerateReq], str],
) -> tuple[tuple[TokenizedGenerateReqInput, ...], tuple[Option, ...]]:
    """One request per option of its choices, or two with `unconditional`. Raises BadRequest."""
    options, start = request.choices or [], tokenizer.start
    _check(request, options, prompts)
    wholes, boundary = _boundary(request, prompt, options, prompts, tokenizer)
    requests: list[TokenizedGenerateReqInput] = []

    def scoring(input_ids: list[int], first: int, images: Sequence[ImageInput] = ()) -> int:
        index = len(requests)
        if index:  # pixels are sent with the first request alone
            images = [msgspec.structs.replace(one, pixels=b"") for one in images]
        requests.append(
            TokenizedGenerateReqInput(
                rid=wire_rid(request),
                http_worker_ipc=request.http_worker_ipc,
                input_ids=input_ids,
                sampling_params=SCORING,
                return_logprob=True,
                logprob_start_len=first,
                priority=request.priority,
                extra_key=request.extra_key,
                lora_path=request.lora_path,
                images=tuple(images),
            )
        )
        return index

    scored_options: list[Option] = []
    for index, (option, whole) in enumerate(zip(options, wholes, strict=True)):
        limits.check_length(len(whole), 0, f"choices[{index}]")
        ids = tuple(whole[boundary:])
        if not ids:
            raise BadRequest("adds no token to the prompt", where=f"choices[{index}]")
        scored = scoring(whole, boundary, prompt.images)
        alone = scoring([*start, *ids], len(start)) if request.unconditional else None
        scored_options.append(Option(option, ids, scored, alone))
    return tuple(requests), tuple(scored_options)


def _check(request: SingleGenerateReq, options: Sequence[str], prompts: PromptReader) -> None:
    if not options:
        raise BadRequest("is empty; there must be at least one option", where="choices")
    if request.constraint is not None:
        raise BadRequest("choices cannot be combined with a constraint", where="constraint")
    if request.session_params is not None:
        raise BadRequest("choices are scored, so they cannot be a turn of a session", where="session_params")
    for name in ("require_reasoning", "max_thinking_tokens"):
        if getattr(request, name) not in (None, False):
            raise BadRequest("choices are scored: there is no reasoning before them", where=name)
    for index, option in enumerate(options):
        if not option:
            raise BadRequest("is empty", where=f"choices[{index}]")
        prompts.check_text(len(option), f"choices[{index}]")


def _boundary(
    request: SingleGenerateReq,
    prompt: Prompt,
    options: Sequence[str],
    prompts: PromptReader,
    tokenizer: Tokenizer,
) -> tuple[list[list[int]], int]:
    """Each option's ids with the prompt, and how many ids all of them share.

    Tokens of the prompt's end that merge with some option's beginning are scored with every option, so that
    all options are compared over the same text. At least one token stands before the boundary.
    """
    text, ids, images = prompt.text, prompt.ids, prompt.images
    if text is None:
        wholes = [[*ids, *tokenizer.encode_plain(option)] for option in options]
    else:
        wholes = [prompts.encode_with(request, text, option, images) for option in options]
    boundary = min([len(ids), *(_common(ids, whole) for whole in wholes)])
    if boundary == 0:
        start = tokenizer.start
        if not start:
            raise BadRequest(
                "the first token of the options has no token before it, and this tokenizer has neither a "
                "begin-of-text nor an end-of-text token to start from",
                where="choices",
                hint="put some text before the choice",
            )
        return [[*start, *whole] for whole in wholes], len(start)
    return wholes, boundary


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))

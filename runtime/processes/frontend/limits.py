"""Limits: what numbers a request must stay within, and what becomes of one that does not."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from runtime.protocol.errors import BadRequest, PromptTooLong
from runtime.protocol.requests.single import SingleGenerateReq
from runtime.protocol.sampling import ROOM, SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """context: tokens of one request, prompt and output together. slots: size of the KV pool.
    top_logprobs, token_ids_logprob: how many a request may ask for at each position.
    auto_truncate: a prompt that is too long loses its end, and an output that cannot fit is shortened, where
    otherwise the request is refused. bootstrap_port: the usual one of prompt servers, where prompts and
    outputs are computed by two engines; None: they are computed here. adapters: may a request name one?"""

    vocab_size: int
    context: int
    slots: int
    auto_truncate: bool = False
    top_logprobs: int = 32
    token_ids_logprob: int = 64
    bootstrap_port: int | None = None
    adapters: bool = False

    @property
    def prompt(self) -> int:
        return min(self.context, self.slots)

    @property
    def _limit_name(self) -> str:
        return "context length" if self.context <= self.slots else "KV pool"

    def check_length(self, length: int, new_tokens: int, what: str) -> None:
        if length + new_tokens <= self.prompt:
            return
        by_context, name = self.context <= self.slots, self._limit_name
        more = " and a new token" if new_tokens else ""
        raise PromptTooLong(
            f"the {what} has {length} tokens; the {name} is {self.prompt} and must contain them{more}",
            where=what,
            hint="shorten it"
            if by_context
            else "shorten it, or start the engine with a larger max_total_tokens",
        )

    def fitting(self, ids: list[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        """Prompt and output within the room there is. Who asks for more gets an error; who leaves the length
        of the output to the default gets what room there is (finish reason "length")."""
        wanted, limit = params.max_new_tokens, self.prompt
        if self.auto_truncate:
            ids = ids[: limit - min(wanted, 1)]
        self.check_length(len(ids), min(wanted, 1), "prompt")
        room = min(wanted, limit - len(ids))
        if room == wanted:
            return ids, params
        if not self.auto_truncate and wanted not in (SamplingParams().max_new_tokens, ROOM):
            raise PromptTooLong(
                f"{len(ids) + wanted} tokens are requested in total, {len(ids)} in the prompt and "
                f"{wanted} new ones; the {self._limit_name} is {limit}",
                where="sampling_params.max_new_tokens",
                hint=f"shorten the prompt, or ask for at most {room} new tokens",
            )
        return ids, msgspec.structs.replace(
            params, max_new_tokens=room, min_new_tokens=min(params.min_new_tokens, room)
        )

    def truncated(self, request: SingleGenerateReq, ids: list[int], wanted: int) -> list[int]:
        """As many of the prompt's ids as the request keeps."""
        most, where = request.truncate_prompt_tokens, "truncate_prompt_tokens"
        limit = self.prompt
        for name in ("choices", "session_params"):
            if getattr(request, name) is not None:
                raise BadRequest(f"cannot be combined with {name}", where=where)
        if most == -1:
            room = 1 if wanted in (SamplingParams().max_new_tokens, ROOM) else wanted
            most = max(1, limit - room)
        if most is None or not 0 < most <= limit:
            raise BadRequest(f"must be -1 or from 1 to {limit}, got {most}", where=where)
        return ids[-most:] if request.truncation_side == "left" else ids[:most]

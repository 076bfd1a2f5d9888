"""Requests to a backend and their answers: prompts, calls, completions, pieces, scores, calls of tools; and
what calls cost. Plain data; knows no program and no backend.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from runtime.protocol.constraint import Constraint
from runtime.protocol.messages import Message
from runtime.protocol.sampling import SamplingParams
from sglang_dsl.ir import Source


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """Everything before the generation: turns in order. Text outside of turns has role "raw"; the last
    message is open if the generation continues it. A prompt of raw text alone is a completion prompt.
    `tools`: what the model may call, as in chat APIs; plain data, must not be changed."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def plain_text(self) -> str | None:
        """The text of a completion prompt; None when there are turns."""
        if all(m.role == "raw" and isinstance(m.content, str) for m in self.messages):
            return "".join(m.content for m in self.messages if isinstance(m.content, str))
        return None

    @property
    def fields(self) -> dict[str, Any]:
        """As fields of a request to the runtime: text, or a conversation, which the server renders."""
        text = self.plain_text
        if text is not None:
            return {"text": text}
        tools = {"tools": list(self.tools)} if self.tools else {}
        return {"messages": list(self.messages), **tools}


class Call(msgspec.Struct, frozen=True, gc=False):
    """One generation. `timeout` in seconds. Where the prompt has tools, `tool_choice` is "auto", "none"
    (they are shown and not called), "required" or "=NAME", and without `parallel_tools` a reply has at most
    one call. `peeks`: one token is computed for its log-probabilities, and is no part of the text."""

    prompt: Prompt
    sampling: SamplingParams
    constraint: Constraint | None = None
    n: int = 1
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs: int = 0
    options: dict[str, Any] = {}
    timeout: float | None = None
    tool_choice: str = "auto"
    parallel_tools: bool = True
    peeks: bool = False

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of the output are requested, also by `top_logprobs`."""
        return self.return_logprob or self.top_logprobs > 0

    @property
    def may_call_tools(self) -> bool:
        """Whether the reply may call tools."""
        return bool(self.prompt.tools) and self.tool_choice != "none"


class ChoiceCall(msgspec.Struct, frozen=True, gc=False):
    """Score `choices` as continuations of the prompt. `unconditional`: also without the prompt. A backend
    that measures no log-probabilities takes one of the choices: the best at `temperature` 0, else a draw with
    `seed`. It raises Unsupported for a seed that its API does not take."""

    prompt: Prompt
    choices: tuple[str, ...]
    unconditional: bool = False
    timeout: float | None = None
    temperature: float = 0.0
    seed: int | None = None


class Completion(msgspec.Struct, frozen=True, gc=False):
    """The answer to a Call, with n texts. meta: id, finish_reason, prompt_tokens, completion_tokens,
    cached_tokens, jumped_tokens, ... as far as the backend knows them; tool_calls if the model called tools:
    [{"id", "name", "arguments": JSON text}]."""

    texts: tuple[str, ...]
    meta: dict[str, Any] = {}


class Delta(msgspec.Struct, frozen=True, gc=False):
    """A piece of a streamed text; `meta` is set on the last one. `piece_meta`: the backend's counters so far,
    and the entries of this piece of lists with an entry per token. `reasoning`: a piece of the reasoning, if
    the backend separates it from the text; the last meta then has all of it as reasoning_content."""

    text: str
    meta: dict[str, Any] | None = None
    piece_meta: dict[str, Any] | None = None
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class ChoiceScore:
    """Natural-log probabilities of one option's tokens after what all options share. `text`: the option,
    filled in by the caller. `token_texts`: of each token, () if the backend does not report them."""

    logprobs: tuple[float, ...]
    token_ids: tuple[int, ...] = ()
    unconditional: tuple[float | None, ...] | None = None
    text: str = ""
    token_texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceScores:
    """One score per option, in order."""

    scores: tuple[ChoiceScore, ...]
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `result`: what was sent to the model, None if the call was not run; `failed`: whether that
    was an error. `arguments`: empty if they are no JSON object; `text`: as the model wrote them."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    result: str | None = None
    failed: bool = False
    text: str = ""


@dataclass(frozen=True, slots=True)
class ToolStep:
    """One reply that called tools. `text`: its text besides the calls; `variable`: the generation's."""

    text: str
    calls: tuple[ToolCall, ...]
    variable: str | None = None


# -- usage ---------------------------------------------------------------------------------------------------

COUNTED = ("prompt_tokens", "completion_tokens", "cached_tokens", "jumped_tokens")


class CallRecord(msgspec.Struct, frozen=True, gc=False):
    """One call. kind: gen, select or tool. branch: () for the program itself, (2,) for its third fork, ...
    seconds: in all; first_token_s: to the first piece of a stream. replayed: answered from a record. began:
    when, on time.monotonic()'s clock; None: not known."""

    kind: str
    name: str | None
    branch: tuple[int, ...]
    seconds: float
    source: Source | None = None
    meta: dict[str, Any] = {}
    first_token_s: float | None = None
    replayed: bool = False
    began: float | None = None

    def count(self, key: str) -> int:
        return int(self.meta.get(key) or 0)


class Ledger:
    """Records of all calls of one run. `outer`: of the run that called its program, which counts them too."""

    __slots__ = ("_called", "_outer", "_records", "add")

    def __init__(self, outer: Ledger | None = None) -> None:
        # Without a lock: adding one and copying all are atomic.
        self._records: list[CallRecord] = []
        self._outer = outer
        self._called = _NO_CALLS
        self.add: Callable[[CallRecord], None] = self._records.append if outer is None else self._add

    def _add(self, record: CallRecord) -> None:
        """All calls are recorded on one event loop: there is one writer."""
        self._records.append(record)
        counts = totals((record,))
        above = self._outer
        while above is not None:
            # Replaced, not changed: a reader has all of a call or nothing.
            above._called = {key: count + counts[key] for key, count in above._called.items()}
            above = above._outer

    def records(self) -> tuple[CallRecord, ...]:
        return tuple(self._records)

    @property
    def called(self) -> Mapping[str, int]:
        """Sums over the calls of the programs that this run called, at any depth."""
        return self._called

    def total(self) -> dict[str, int]:
        """calls, prompt_tokens, completion_tokens, cached_tokens, jumped_tokens; called programs included."""
        return totals(self.records(), self._called)


def totals(records: Sequence[CallRecord], called: Mapping[str, int] | None = None) -> dict[str, int]:
    """calls of the backend, and of each of COUNTED the sum; `called`: sums to add to these."""
    sums = {"calls": sum(one.kind != "tool" for one in records)} | {
        key: sum(r.count(key) for r in records) for key in COUNTED
    }
    return sums if not called else {key: count + called[key] for key, count in sums.items()}


_NO_CALLS: Mapping[str, int] = totals(())


class TokenUsage:
    """Tokens that a backend was charged for since the last reset; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.prompt_tokens = self.completion_tokens = 0

    def add(self, prompt_tokens: int, completion_tokens: int) -> None:
        with self._lock:
            self.prompt_tokens += prompt_tokens
            self.completion_tokens += completion_tokens

    def count(self, meta: Mapping[str, Any]) -> None:
        """Add what a call's meta tells."""
        self.add(int(meta.get("prompt_tokens") or 0), int(meta.get("completion_tokens") or 0))

    def reset(self) -> None:
        """Count from 0 again."""
        with self._lock:
            self.prompt_tokens = self.completion_tokens = 0

    def __repr__(self) -> str:
        return f"TokenUsage(prompt_tokens={self.prompt_tokens}, completion_tokens={self.completion_tokens})"

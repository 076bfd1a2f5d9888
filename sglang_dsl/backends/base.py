"""Backend: what the executor asks of anything that can continue a conversation.

A backend is async and stateless towards programs: each call carries the whole prompt. What it cannot do
raises Unsupported; it never drops a parameter. It knows no nodes and no program state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from runtime.protocol.constraint import Constraint
from runtime.protocol.messages import Message
from runtime.protocol.registry import Registry
from runtime.protocol.sampling import SamplingParams

CLOSE_S = 30.0
# The event loop brings asyncio: loaded when something is waited for, not when the words are imported.
_PARTS: Registry[Any] = Registry("part of the language", {"loop": "sglang_dsl.loop:background"})


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """All that stands before the generation: turns in order. Text outside any turn has role "raw"; the last
    message is open when the generation continues it. A prompt that is only raw text is a plain completion
    prompt."""

    messages: tuple[Message, ...]

    @property
    def plain_text(self) -> str | None:
        """The text of a completion prompt; None when there are turns."""
        if all(m.role == "raw" and isinstance(m.content, str) for m in self.messages):
            return "".join(m.content for m in self.messages if isinstance(m.content, str))
        return None


class Call(msgspec.Struct, frozen=True, gc=False):
    """One generation. `timeout` in seconds."""

    prompt: Prompt
    sampling: SamplingParams
    constraint: Constraint | None = None
    n: int = 1
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs: int = 0
    options: dict[str, Any] = {}
    timeout: float | None = None


class ChoiceCall(msgspec.Struct, frozen=True, gc=False):
    """Score `choices` as continuations of the prompt. `unconditional`: also without the prompt."""

    prompt: Prompt
    choices: tuple[str, ...]
    unconditional: bool = False
    timeout: float | None = None


class Completion(msgspec.Struct, frozen=True, gc=False):
    """What came back. texts has n entries. meta: id, finish_reason, prompt_tokens, completion_tokens,
    cached_tokens, jumped_tokens, ... as far as the backend knows them."""

    texts: tuple[str, ...]
    meta: dict[str, Any] = {}


class Delta(msgspec.Struct, frozen=True, gc=False):
    """A piece of a streamed text; `meta` is set on the last one. `told`: what the backend said with this
    piece: its counters so far, and of lists with an entry per token those of this piece."""

    text: str
    meta: dict[str, Any] | None = None
    told: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ChoiceScore:
    """Natural-log probabilities of one option's tokens after the boundary that all options share. `text`: the
    option; whoever asked fills it in. `token_texts`: of each token, () where the backend does not say."""

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


class Backend(ABC):
    """`name` is shown in errors. All verbs run on the language's event loop; cancelling the task aborts the
    work."""

    name: str = "backend"
    # num_api_spec_tokens (sglang_dsl.speculation): whether a call is dear enough to ask for more than it
    # needs, whether a turn of the assistant that has begun can be gone on with, and whether
    # meta["output_token_logprobs"] tells the tokens of a text where log-probabilities are asked for.
    speculates: bool = False
    prefills: bool = False
    tells_tokens: bool = False

    @property
    def identity(self) -> str:
        """What tells this backend's answers from another's in a record: its name, and model or place."""
        return self.name

    @property
    def model_info(self) -> dict[str, Any]:
        """At least model_path: what says which model answers."""
        return {"model_path": self.identity}

    def get_model_name(self) -> str:
        """Which model answers."""
        return str(self.model_info["model_path"])

    @abstractmethod
    async def generate(self, call: Call) -> Completion:
        """All texts of a call, whole. Raises BackendError, Unsupported."""

    @abstractmethod
    def stream(self, call: Call) -> AsyncIterator[Delta]:
        """Pieces of the text as they come; their concatenation equals what generate would give."""

    @abstractmethod
    async def score(self, call: ChoiceCall) -> ChoiceScores:
        """Log-probabilities of given texts behind a prompt, in the order of the choices. Raises BackendError,
        Unsupported."""

    async def commit(self, prompt: Prompt) -> None:
        """Warm the prefix cache with the prompt. A backend without one does nothing: it costs nothing to
        say."""
        return

    async def precompile(self, constraints: Sequence[Constraint]) -> list[dict[str, Any]]:
        """Compile what generations will have to match. Of each, in order: ok, and how it is kept (backend,
        exact, checked, compile_s, ...) or its error. A backend that compiles nothing answers []."""
        return []

    async def count_tokens(self, prompt: Prompt) -> int | None:
        """How many tokens the model would read; None where this backend has no tokenizer at hand."""
        return None

    async def aflush_cache(self) -> bool:
        """Drop cached prefixes; False where the backend has none or it is in use."""
        return False

    async def info(self) -> dict[str, Any]:
        """What the backend says of itself: at least its name."""
        return {"backend": self.name}

    async def aclose(self) -> None:
        """Release connections and engines this backend started."""
        return

    def flush_cache(self) -> bool:
        """aflush_cache() for code that is not async; waits."""
        return bool(_waited_for(self.aflush_cache()))

    def get_server_info(self) -> dict[str, Any]:
        """info() for code that is not async; waits."""
        return dict(_waited_for(self.info()))

    def close(self) -> None:
        """aclose() for code that is not async; waits."""
        _waited_for(self.aclose())


def _waited_for(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return _PARTS.load("loop")().run(coroutine, CLOSE_S)

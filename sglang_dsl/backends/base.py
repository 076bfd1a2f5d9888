"""Backend: what the executor needs from anything that can continue a conversation.

A backend is async and keeps no state of programs: each call contains the whole prompt. What it cannot do
raises Unsupported; it never drops a parameter. It knows no nodes and no program state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from runtime.protocol.constraint import Constraint
from sglang_dsl.conversation.requests import (
    Call,
    ChoiceCall,
    ChoiceScore,
    ChoiceScores,
    Completion,
    Delta,
    Prompt,
)

__all__ = [
    "Backend", "Call", "ChoiceCall", "ChoiceScore", "ChoiceScores", "Completion", "Delta", "Prompt",
]  # fmt: skip

CLOSE_S = 30.0


class Backend(ABC):
    """Base class of backends. `name` is shown in errors. All methods run on the language's event loop;
    cancelling the task aborts the work."""

    name: str = "backend"
    # For num_api_spec_tokens (interpreter/speculation.py): whether calls are expensive enough to request more
    # than is needed, whether the assistant's turn can be continued after its begin, and whether
    # meta["output_token_logprobs"] has the tokens of a text if log-probabilities are requested.
    speculates: bool = False
    prefills: bool = False
    reports_tokens: bool = False
    # Whether a prompt may have tools; meta["tool_calls"] then has the calls of a reply.
    calls_tools: bool = False

    @property
    def identity(self) -> str:
        """Distinguishes this backend's answers in a record: its name, and its model or address."""
        return self.name

    @property
    def model_info(self) -> dict[str, Any]:
        """At least model_path, which identifies the model."""
        return {"model_path": self.identity}

    def get_model_name(self) -> str:
        """The name of the model."""
        return str(self.model_info["model_path"])

    @abstractmethod
    async def generate(self, call: Call) -> Completion:
        """All texts of a call, complete. Raises BackendError, Unsupported."""

    @abstractmethod
    def stream(self, call: Call) -> AsyncIterator[Delta]:
        """Pieces of the text as they are generated. Together they are what generate would return."""

    async def whole(self, call: Call) -> AsyncIterator[Delta]:
        """generate() as a stream of one piece: only a complete reply shows whether it calls tools."""
        done = await self.generate(call)
        yield Delta(done.texts[0], done.meta, reasoning=done.meta.get("reasoning_content") or "")

    @abstractmethod
    async def score(self, call: ChoiceCall) -> ChoiceScores:
        """Log-probabilities of the choices after a prompt, in order. Raises BackendError, Unsupported."""

    async def commit(self, prompt: Prompt) -> None:
        """Put the prompt into the prefix cache. A backend without a cache does nothing."""
        return

    async def precompile(self, constraints: Sequence[Constraint]) -> list[dict[str, Any]]:
        """Compile the constraints of later generations. For each, in order: ok, and how it is enforced
        (backend, exact, checked, compile_s, ...) or its error. A backend that compiles nothing returns []."""
        return []

    async def count_tokens(self, prompt: Prompt) -> int | None:
        """How many tokens the model would read; None if this backend has no tokenizer."""
        return None

    async def aflush_cache(self) -> bool:
        """Drop cached prefixes. Returns False if the backend has no cache, or it is in use."""
        return False

    async def prefix_cache(self) -> dict[str, Any] | None:
        """The nodes of the prefix cache, with tokens, hits and text. None if it has or shows none."""
        return None

    async def info(self) -> dict[str, Any]:
        """What the backend reports about itself: at least its name."""
        return {"backend": self.name}

    async def aclose(self) -> None:
        """Release connections and engines this backend started."""
        return

    def flush_cache(self) -> bool:
        """aflush_cache() for code that is not async. Waits."""
        return bool(_waited_for(self.aflush_cache()))

    def get_server_info(self) -> dict[str, Any]:
        """info() for code that is not async. Waits."""
        return dict(_waited_for(self.info()))

    def close(self) -> None:
        """aclose() for code that is not async. Waits."""
        _waited_for(self.aclose())


def _waited_for(coroutine: Coroutine[Any, Any, Any]) -> Any:
    # Imported here, as it imports asyncio: few programs need it.
    from sglang_dsl.concurrency.loop import background

    return background().run(coroutine, CLOSE_S)

"""Choices on a chat API, which returns no log-probabilities of given texts: one reply held to the options, at
the temperature that the choice is to be made at. Knows no API's wire format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from sglang_dsl.backends.base import ChoiceCall, ChoiceScore, ChoiceScores
from sglang_dsl.errors import BackendError, Unsupported
from sglang_dsl.ir.typed import json_in, unfenced

Asks: TypeAlias = "Callable[[int, dict[str, Any]], Awaitable[tuple[str, dict[str, Any]]]]"
"""Sends the request for at most so many tokens, with these sampling parameters (temperature, seed), and gives
the reply with its meta."""

_THOUGHTS = 8192
"""Tokens for a model that reasons before it replies."""


def options_schema(choices: Sequence[str]) -> dict[str, Any]:
    """The schema of {"choice": one of the options}."""
    return {
        "type": "object",
        "properties": {"choice": {"type": "string", "enum": list(dict.fromkeys(choices))}},
        "required": ["choice"],
        "additionalProperties": False,
    }


class ChatChoices:
    """For one backend. Remembers whether its model refuses a temperature, as reasoning models do: at 0 it is
    then asked without one, which the metadata tell as temperature None."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._refused = False

    async def scores(self, call: ChoiceCall, ask: Asks) -> ChoiceScores:
        """Raises BackendError, Unsupported."""
        if call.unconditional:
            raise Unsupported(
                "a chat API returns no probabilities of texts without their prompt",
                backend=self._backend,
                hint="use the method token_length_normalized",
            )
        room = 64 + 4 * max(map(len, call.choices))
        words: dict[str, Any] = {"temperature": call.temperature}
        if call.temperature and call.seed is not None:
            words["seed"] = call.seed
        if self._refused and not call.temperature:
            room, words = room + _THOUGHTS, {}
        try:
            text, meta = await ask(room, words)
        except BackendError as error:
            if not words or not _refuses_temperature(error):
                raise
            if call.temperature:
                raise Unsupported(
                    f"the model draws nothing at temperature {call.temperature:g}: {error.message}",
                    backend=self._backend,
                    status=error.status,
                    hint="leave the temperature of select out",
                ) from error
            self._refused = True
            room, words = room + _THOUGHTS, {}
            text, meta = await ask(room, words)
        if (
            not _whole(text)
            and (meta.get("finish_reason") or {}).get("type") == "length"
            and room < _THOUGHTS
        ):
            text, meta = await ask(room + _THOUGHTS, words)  # it reasoned, and there was no room left
        return _picked(call, text, meta if words else {**meta, "temperature": None})


def _refuses_temperature(error: BackendError) -> bool:
    wrong = isinstance(error, Unsupported) or error.status in (400, 422)
    return wrong and "temperature" in error.message.lower()


def _whole(text: str) -> bool:
    return json_in(text) is not None


def _picked(call: ChoiceCall, text: str, meta: Mapping[str, Any]) -> ChoiceScores:
    """The scores of a reply that was held to options_schema(). The options not chosen are not scored: their
    probability is told as 0, and meta says that this is no measured distribution. Where the reply is none of
    the options, meta says so under "invalid", and what it was under "reply"."""
    told = {**meta, "exact": False, "how": "structured output"}
    taken = _taken(text)
    if taken not in call.choices:
        told |= {"reply": text, "invalid": "it is not one of the choices"}
        return ChoiceScores((ChoiceScore((-math.inf,)),) * len(call.choices), told)
    index = call.choices.index(taken)
    scores = (ChoiceScore((0.0 if at == index else -math.inf,)) for at in range(len(call.choices)))
    return ChoiceScores(tuple(scores), told)


def _taken(text: str) -> str:
    """The option that a reply names; a fence or prose around its JSON is passed over."""
    found = json_in(text)
    value = unfenced(text) if found is None else json.loads(found)
    if isinstance(value, dict):
        value = value.get("choice")
    return value if isinstance(value, str) else json.dumps(value)

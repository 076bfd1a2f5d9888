"""Choices on a chat API, which returns no log-probabilities of given texts: one reply constrained to the
options, at the temperature of the choice. Knows no API's wire format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from sglang_dsl.backends.base import ChoiceCall, ChoiceScore, ChoiceScores
from sglang_dsl.backends.common.remote import JsonForm
from sglang_dsl.errors import BackendError, Unsupported
from sglang_dsl.ir.typed import json_in, unfenced

Asks: TypeAlias = "Callable[[int, dict[str, Any]], Awaitable[tuple[str, dict[str, Any]]]]"
"""Sends a request with this max_tokens and these sampling parameters (temperature, seed), and returns the
reply's text and metadata."""

_REASONING_TOKENS = 8192
"""Tokens for a model that reasons before it replies."""


def choice_form(choices: Sequence[str]) -> JsonForm:
    """The reply to ask for: {"choice": one of the options}."""
    schema = {
        "type": "object",
        "properties": {"choice": {"type": "string", "enum": list(dict.fromkeys(choices))}},
        "required": ["choice"],
        "additionalProperties": False,
    }
    return JsonForm(schema, wrapped=False, plain=False, strict=True, name="choice")


class ChatChoices:
    """The choices of one backend. Remembers whether its model refuses a temperature, as reasoning models do:
    choices at temperature 0 are then requested without one, and meta["temperature"] is None."""

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
        max_tokens = 64 + 4 * max(map(len, call.choices))
        sampling: dict[str, Any] = {"temperature": call.temperature}
        if call.temperature and call.seed is not None:
            sampling["seed"] = call.seed
        if self._refused and not call.temperature:
            max_tokens, sampling = max_tokens + _REASONING_TOKENS, {}
        try:
            text, meta = await ask(max_tokens, sampling)
        except BackendError as error:
            if not sampling or not _refuses_temperature(error):
                raise
            if call.temperature:
                raise Unsupported(
                    f"the model draws nothing at temperature {call.temperature:g}: {error.message}",
                    backend=self._backend,
                    status=error.status,
                    hint="leave the temperature of select out",
                ) from error
            self._refused = True
            max_tokens, sampling = max_tokens + _REASONING_TOKENS, {}
            text, meta = await ask(max_tokens, sampling)
        if (
            json_in(text) is None
            and (meta.get("finish_reason") or {}).get("type") == "length"
            and max_tokens < _REASONING_TOKENS
        ):
            # The model used up the tokens for its reasoning.
            text, meta = await ask(max_tokens + _REASONING_TOKENS, sampling)
        return _picked(call, text, meta if sampling else {**meta, "temperature": None})


def _refuses_temperature(error: BackendError) -> bool:
    refused = isinstance(error, Unsupported) or error.status in (400, 422)
    return refused and "temperature" in error.message.lower()


def _picked(call: ChoiceCall, text: str, meta: dict[str, Any]) -> ChoiceScores:
    """The scores of a reply that was constrained to choice_form(). The options not chosen are not scored:
    their probability is 0, and meta["exact"] is False. If the reply is none of the options, meta has it as
    "reply", and the error as "invalid"."""
    meta = {**meta, "exact": False, "how": "structured output"}
    taken = _taken(text)
    if taken not in call.choices:
        meta |= {"reply": text, "invalid": "it is not one of the choices"}
        return ChoiceScores((ChoiceScore((-math.inf,)),) * len(call.choices), meta)
    index = call.choices.index(taken)
    scores = (ChoiceScore((0.0 if at == index else -math.inf,)) for at in range(len(call.choices)))
    return ChoiceScores(tuple(scores), meta)


def _taken(text: str) -> str:
    """The option in a reply; a fence or prose around its JSON is ignored."""
    json_text = json_in(text)
    value = unfenced(text) if json_text is None else json.loads(json_text)
    if isinstance(value, dict):
        value = value.get("choice")
    return value if isinstance(value, str) else json.dumps(value)

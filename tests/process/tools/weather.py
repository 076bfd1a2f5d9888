"""What pocket was trained to do with tools, for tests of clients: a question, the call it makes, what the
tool says, and the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai

from tests.process.patience import PATIENCE_S

Use = Callable[[Callable[[Any], Awaitable[None]]], None]
QUESTION = "What is the weather in Lisbon?"
ANSWER = "The weather in Lisbon is sun with 21 degrees."
TIME_QUESTION = "What time is it in Lisbon?"
JSON_QUESTION = "Extract city as JSON: Anna lives in Lisbon."
BAD_SCHEMA = {"type": "object", "properties": {"city": {"type": "town"}}}
BAD_SCHEMA_TOLD = "is no JSON schema"
BAD_MODEL_TOLD = "'nope' does not exist"


class Tools:
    """Plain functions, as applications give them to a client; `called`: with what they were called."""

    def __init__(self) -> None:
        self.called: list[str | int] = []

    def get_weather(self, city: str) -> dict[str, int | str]:
        """Weather of a city"""
        self.called.append(city)
        return {"degrees": 21, "sky": "sun"}

    def set_timer(self, minutes: int) -> dict[str, str]:
        """Set a timer"""
        self.called.append(minutes)
        return {"status": "ok"}


def with_models(
    url: str, model_of: Callable[[openai.AsyncOpenAI], Any], program: Callable[[Any], Awaitable[None]]
) -> None:
    """Runs the program with what `model_of` makes of a client of the server at `url`."""

    async def whole() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        ) as client:
            await program(model_of(client))

    asyncio.run(whole())

"""Tools side by side: three branches call slow tools at once, and the program gathers their answers.

Calls of one reply, of all branches of a fork and of all programs of a batch run side by side: coroutine
functions on the program's own event loop, plain ones in threads. Each has a deadline; what a tool raises is
told to the model as text (or raised, with on_error="raise").

    python examples/11_parallel_tools.py
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from sglang_dsl import AsyncProgramState, assistant, function, gen, tools, user
from sglang_dsl.backends.base import Backend
from sglang_dsl.console.backend_flag import chosen_backend

CLOCKS = {"Lisbon": "08:15", "Oslo": "09:15", "Madrid": "10:45"}


class Desk:
    """Three people who look things up, and how many of them were busy at once."""

    def __init__(self) -> None:
        self.busy = self.most = 0

    async def get_time(self, city: str) -> dict[str, Any]:
        """Local time of a city"""
        self.busy += 1
        self.most = max(self.most, self.busy)
        # Whoever is asked waits until all three are: this ends because they work side by side.
        while self.most < len(CLOCKS):
            await asyncio.sleep(0.01)
        self.busy -= 1
        return {"time": CLOCKS[city]}


@function(temperature=0, max_tokens=80)
async def clocks(s: AsyncProgramState, desk: Desk, cities: list[str]) -> list[str]:
    s += tools([desk.get_time])
    with s.tool_loop(timeout=120):
        async with s.fork(len(cities)) as branches:
            for branch, city in zip(branches, cities, strict=True):
                branch += user(f"What time is it in {city}?")
                branch += assistant(gen("answer"))
        # The conversation of each branch.
        for branch in branches:
            print(await branch.text())
    answers: list[str] = await s["answer"]
    return answers


async def talk(backend: Backend) -> None:
    desk = Desk()
    state = await clocks(desk, list(CLOCKS), backend=backend)
    print("in short:", *state.ret_value)
    print(f"{desk.most} tools at once, {(await state.usage())['calls']} calls of the model")


def main(argv: Sequence[str] | None = None) -> None:
    with chosen_backend(__doc__, argv) as backend:
        asyncio.run(talk(backend))


if __name__ == "__main__":
    main()

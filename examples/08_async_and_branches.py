"""An async program: branches that run at once, the first good one, a vote, and work beside other async code.

`await s["x"]` waits for a variable; `async with s.fork(n)` joins its branches at the end, and cancels them
when it is left by an error. Branches that lose a race are cancelled, and the engine stops computing them.

    python examples/08_async_and_branches.py
"""

import asyncio
from collections.abc import Sequence

from sglang_dsl import (
    AsyncProgramState,
    NoWinner,
    assistant,
    function,
    gen,
    set_default_backend,
    system,
    user,
)
from sglang_dsl.console.backend_flag import chosen_backend


@function(temperature=0, max_tokens=16)
async def towns(s: AsyncProgramState, lands: list[str]) -> None:
    """One question per branch; the common beginning is computed once."""
    s += system("You answer questions.")
    async with s.fork(len(lands)) as branches:
        for branch, land in zip(branches, lands, strict=True):
            branch += user(f"Which river runs through {land}?")
            branch += assistant(f"The river of {land} is " + gen("river", regex=r"[A-Z][a-z]+\."))
    # Joined: the variable is the list of what the branches have.
    for land, river in zip(lands, await s["river"], strict=True):
        print(f"Which river runs through {land}? {river}")


@function(temperature=1, max_tokens=16)
async def short_name(s: AsyncProgramState, letters: int) -> str:
    """Several tries at once; the first that is short enough wins."""
    s += system("You answer questions.")
    s += user("What is the capital of Ostrel?")
    tries = s.fork(6)
    tries += assistant("The capital of Ostrel is " + gen("town", regex=r"[A-Z][a-z]{2,10}\."))

    async def fits(branch: AsyncProgramState) -> bool:
        return len(await branch["town"]) <= letters

    await s.adopt(await tries.first_valid(fits, timeout=60))
    return str(await s["town"])


@function(temperature=1)
async def agreed(s: AsyncProgramState, review: str) -> None:
    s += user(f"Is this positive or negative? {review}")
    voters = s.fork(5)
    voters += assistant(gen("mood", choices=["positive", "negative"], temperature=1))
    vote = await voters.vote("mood")
    print(f"{vote.count} of 5 say {vote.value}")


async def talk() -> None:
    await towns(["Ostrel", "Karsk", "Hesper"])
    # Two programs at once, on this event loop.
    done = await asyncio.gather(short_name(12, seed=3), agreed("What a lovely garden!", seed=3))
    print("a town:", done[0].ret_value, "-", (await done[0].usage())["calls"], "tries")
    try:
        await short_name(2, seed=3)
    except NoWinner as error:
        print("no winner:", error.message)


def main(argv: Sequence[str] | None = None) -> None:
    with chosen_backend(__doc__, argv) as backend:
        set_default_backend(backend)
        asyncio.run(talk())
        set_default_backend(None)


if __name__ == "__main__":
    main()

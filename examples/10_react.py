"""ReAct: the model acts by calling a tool, observes what comes of it, and answers; the program goes on
by what was found.

`s += tools([...])` offers typed functions. In `with s.tool_loop()` the calls that the model makes are run and
their results go back to it, until it answers. The bundled model is held to the tools' schemas by a grammar;
the same program runs on a server and on OpenAI, Anthropic and Gemini, with the tools of their APIs.

    python examples/10_react.py
"""

from collections.abc import Sequence
from typing import Any

from sglang_dsl import ProgramState, assistant, function, gen, tools, user
from sglang_dsl.console.backend_flag import chosen_backend

SKY = {"Lisbon": ("sun", 21), "Oslo": ("snow", 3)}


def get_weather(city: str) -> dict[str, Any]:
    """Weather of a city"""
    sky, degrees = SKY[city]
    return {"degrees": degrees, "sky": sky}


def book_table(city: str, people: int) -> dict[str, int]:
    """Book a table for some people"""
    if people > 12:
        raise ValueError(f"no table has {people} seats")
    return {"table": 3 * people}


def set_timer(minutes: int) -> dict[str, str]:
    """Set a timer"""
    return {"status": "ok"}


@function(temperature=0, max_tokens=80)
def evening(s: ProgramState, city: str) -> None:
    s += tools([get_weather, book_table, set_timer])
    with s.tool_loop(max_steps=4) as loop:
        s += user(f"What is the weather in {city}?")
        s += assistant(gen("weather"))
        [look] = loop.steps
        # Out for dinner, or at home.
        if "snow" in (look.calls[0].result or ""):
            s += user("Set a timer for 40 minutes.")
        else:
            s += user(f"Book a table for 4 in {city}.")
        s += assistant(gen("plan"))


def show(state: ProgramState) -> None:
    """The conversation as ReAct writes it."""
    for turn in state.messages():
        for call in turn.get("tool_calls", ()):
            print(f"Action:      {call['function']['name']} {call['function']['arguments']}")
        names = {"user": "Question:", "tool": "Observation:", "assistant": "Answer:"}
        if turn["content"]:
            print(f"{names[turn['role']]:<12} {turn['content']}")
    print()


def main(argv: Sequence[str] | None = None) -> None:
    with chosen_backend(__doc__, argv) as backend:
        for city in SKY:
            show(evening(city, backend=backend))


if __name__ == "__main__":
    main()

"""Fewer calls of an API that charges for the prompt each time: `num_api_spec_tokens`.

A call asks for more than its generation needs; what comes after its stop string serves the generations that
follow, where the text between them is what the program says. It helps with completion models behind an API;
backends that share prefixes themselves have no need of it.

    python examples/usage/speculative.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import sglang_dsl as sgl

QUESTIONS = """Q: What is the capital of Karsk?
A: The capital of Karsk is Hollin.

Q: What is the capital of Hesper?
A: The capital of Hesper is Tindale.

"""


@sgl.function(num_api_spec_tokens=48)
def with_speculation(s):
    s += QUESTIONS + "Q: Who rules Ostrel?\nA:" + sgl.gen("answer", stop="\n")
    s += "\n" + sgl.gen("rest", max_tokens=8, stop="\n")


@sgl.function
def without_speculation(s):
    s += QUESTIONS + "Q: Who rules Ostrel?\nA:" + sgl.gen("answer", stop="\n")
    s += "\n" + sgl.gen("rest", max_tokens=8, stop="\n")


@sgl.function(num_api_spec_tokens=64)
def in_a_turn(s):
    s += sgl.user("Describe Ostrel as JSON.")
    # One reply answers the whole turn, matched against the text between its generations.
    s += sgl.assistant(
        '{"name": "' + sgl.gen("name", stop='"') + '", "capital": "' + sgl.gen("capital", stop='"') + '"'
    )


def both_ways(url: str) -> dict[str, Any]:
    completion = sgl.OpenAI("pocket", is_chat_model=False, base_url=f"{url}/v1", api_key="none")
    told: dict[str, Any] = {}
    for program in (with_speculation, without_speculation):
        completion.token_usage.reset()
        state = program.run(backend=completion, temperature=0)
        state.sync()
        name = program.func.__name__
        told[name] = (state["answer"], state.usage()["calls"], completion.token_usage.prompt_tokens)
        print(f"{name}: {state['answer']!r}, {told[name][1]} calls, {completion.token_usage}")

    chat = sgl.OpenAI("pocket", base_url=f"{url}/v1", api_key="none")
    state = in_a_turn.run(backend=chat, temperature=0)
    told["turn"] = (state["name"], state["capital"], state.usage()["calls"])
    print(f"in a turn: {state['name']}, {state['capital']}, {told['turn'][2]} call")
    return told


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    given = sys.argv[1:] if argv is None else list(argv)
    if given:
        return both_ways(given[0])
    with sgl.Runtime("pocket") as runtime:
        return both_ways(runtime.url)


if __name__ == "__main__":
    main()

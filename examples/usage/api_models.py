"""The same program on models behind other people's APIs.

Each needs its own key in the environment; anything with OpenAI's interface is reached by its `base_url`,
which is how this file runs without any key: it asks a server of the bundled model.

    python examples/usage/api_models.py
    python examples/usage/api_models.py openai            # OPENAI_API_KEY
    python examples/usage/api_models.py anthropic         # ANTHROPIC_API_KEY
    python examples/usage/api_models.py together          # TOGETHER_API_KEY
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import sglang_dsl as sgl


def together() -> sgl.OpenAI:
    key = os.environ["TOGETHER_API_KEY"]
    return sgl.OpenAI(
        "meta-llama/Llama-3.3-70B-Instruct-Turbo", base_url="https://api.together.xyz/v1", api_key=key
    )


def openrouter() -> sgl.OpenAI:
    key = os.environ["OPENROUTER_API_KEY"]
    return sgl.OpenAI("google/gemini-2.5-flash", base_url="https://openrouter.ai/api/v1", api_key=key)


MODELS: dict[str, Callable[[], Any]] = {
    "openai": lambda: sgl.OpenAI("gpt-4o-mini"),
    "anthropic": lambda: sgl.Anthropic("claude-haiku-4-5"),
    "gemini": lambda: sgl.Gemini("gemini-2.5-flash"),
    "together": together,
    "openrouter": openrouter,
}


@sgl.function
def multi_turn_question(s, question_1, question_2):
    s += sgl.system("You answer questions.")
    s += sgl.user(question_1)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=48))
    s += sgl.user(question_2)
    s += sgl.assistant(sgl.gen("answer_2", max_tokens=48))


def conversation(backend: Any) -> dict[str, Any]:
    questions = {"question_1": "Which river runs through Ostrel?", "question_2": "And who rules there?"}
    state = multi_turn_question.run(**questions, backend=backend, temperature=0)
    for message in state.messages():
        print(message["role"], ":", message["content"])
    streamed = "".join(
        multi_turn_question.run(**questions, backend=backend, temperature=0, stream=True).text_iter(
            "answer_2"
        )
    )
    print("charged for:", backend.token_usage)
    return {"answer": state["answer_2"], "streamed": streamed, "usage": state.usage()}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """With an address, asks the server there."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given and given[0] in MODELS:
        return conversation(MODELS[given[0]]())
    if given:
        return conversation(sgl.OpenAI("pocket", base_url=f"{given[0]}/v1", api_key="none"))
    with sgl.Runtime("pocket") as runtime:
        return conversation(sgl.OpenAI("pocket", base_url=f"{runtime.url}/v1", api_key="none"))


if __name__ == "__main__":
    main()

"""An answer of at least so many tokens, where the model would have ended earlier.

Pocket has nothing to add to an answer: what it is made to say behind its end has no meaning.

    python examples/usage/min_tokens.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import shared

import sglang_dsl as sgl


@sgl.function
def long_answer(s):
    s += sgl.user("What is the capital of Karsk?")
    s += sgl.assistant(sgl.gen("answer", min_tokens=24, max_tokens=32))


@sgl.function
def short_answer(s):
    s += sgl.user("What is the capital of Karsk?")
    s += sgl.assistant(sgl.gen("answer"))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    sgl.set_default_backend(shared.backend(argv))
    counted, answers = {}, {}
    for program in (short_answer, long_answer):
        state = program.run(temperature=0)
        name = program.func.__name__
        counted[name], answers[name] = state.get_meta_info("answer")["completion_tokens"], state["answer"]
    print(f"it ends by itself after {counted['short_answer']} tokens: {answers['short_answer']!r}")
    more = answers["long_answer"].removeprefix(answers["short_answer"])
    print(f"with min_tokens=24 after {counted['long_answer']}; it is made to add {more!r}")
    return counted


if __name__ == "__main__":
    main()

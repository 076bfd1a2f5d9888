"""An answer of at least so many tokens, where the model would have ended earlier.

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
    s += sgl.assistant(sgl.gen("answer", min_tokens=64, max_tokens=96))


@sgl.function
def short_answer(s):
    s += sgl.user("What is the capital of Karsk?")
    s += sgl.assistant(sgl.gen("answer"))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    sgl.set_default_backend(shared.backend(argv))
    counted = {}
    for program in (long_answer, short_answer):
        state = program.run(temperature=0)
        name = program.func.__name__
        counted[name] = state.get_meta_info("answer")["completion_tokens"]
        print(f"{name}, {counted[name]} tokens: {state['answer']!r}")
    return counted


if __name__ == "__main__":
    main()

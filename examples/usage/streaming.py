"""One variable of a conversation as it is written, in ordinary and in async code, and with what is told about
each piece.

    python examples/usage/streaming.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import shared

import sglang_dsl as sgl


@sgl.function
def multi_turn_question(s, question_1, question_2):
    s += sgl.system("You answer questions.")
    s += sgl.user(question_1)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=32))
    s += sgl.user(question_2)
    s += sgl.assistant(sgl.gen("answer_2", max_tokens=32, return_logprob=True))


def begun() -> Any:
    return multi_turn_question.run(
        question_1="Which river runs through Ostrel?",
        question_2="And who rules there?",
        temperature=0,
        stream=True,
    )


def stream_a_variable() -> list[str]:
    pieces = []
    for out in begun().text_iter(var_name="answer_2"):
        print(out, end="|", flush=True)
        pieces.append(out)
    print()
    return pieces


async def async_stream() -> tuple[list[str], dict[str, Any]]:
    pieces, last, counted = [], {}, 0
    async for out, meta in begun().text_async_iter(var_name="answer_2", return_meta_data=True):
        print(out, end="|", flush=True)
        pieces.append(out)
        last = meta or last
        # A piece comes with the log-probabilities of its own tokens.
        counted += len(meta.get("output_token_logprobs", ()))
    print()
    return pieces, {**last, "counted": counted}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    sgl.set_default_backend(shared.backend(argv))
    plain = stream_a_variable()
    pieces, meta = asyncio.run(async_stream())
    print(f"{meta['completion_tokens']} tokens, {meta['counted']} log-probabilities")
    return {"plain": "".join(plain), "async": "".join(pieces), "meta": meta}


if __name__ == "__main__":
    main()

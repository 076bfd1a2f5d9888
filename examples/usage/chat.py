"""A conversation of two turns, run three ways: by itself, as it is written, and as a batch; and two samples
of one answer.

    python examples/usage/chat.py
"""

from __future__ import annotations

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
    s += sgl.assistant(sgl.gen("answer_2", max_tokens=32))


@sgl.function
def two_samples(s, question):
    s += sgl.user(question)
    # A list of two texts; the conversation goes on with the first.
    s += sgl.assistant(sgl.gen("answer", max_tokens=32, n=2))
    s += sgl.user("And who rules there?")
    s += sgl.assistant(sgl.gen("ruler", max_tokens=32))


QUESTIONS = [
    {"question_1": "Which river runs through Ostrel?", "question_2": "And who rules there?"},
    {"question_1": "What is the capital of Karsk?", "question_2": "And what do people eat there?"},
]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    sgl.set_default_backend(shared.backend(argv))

    state = multi_turn_question.run(**QUESTIONS[0], temperature=0)
    for message in state.messages():
        print(message["role"], ":", message["content"])

    print("\nas it is written:")
    streamed = ""
    for out in multi_turn_question.run(**QUESTIONS[0], temperature=0, stream=True).text_iter():
        print(out, end="", flush=True)
        streamed += out

    print("\nas a batch:")
    states = multi_turn_question.run_batch(QUESTIONS, temperature=0, progress_bar=True)
    for one in states:
        print(one["answer_1"], one["answer_2"])

    samples = two_samples.run(question="Which river runs through Zembla?", temperature=0.5, seed=1)
    print("\nsamples:", samples["answer"])
    return {
        "messages": state.messages(),
        "text": state.text(),
        "streamed": streamed,
        "answers": [(one["answer_1"], one["answer_2"]) for one in states],
        "samples": samples["answer"],
    }


if __name__ == "__main__":
    main()

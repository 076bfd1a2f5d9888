"""Completion without turns: a few worked questions and one more, run by itself, as it is written, as a batch.

python examples/usage/complete.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import shared

import sglang_dsl as sgl


@sgl.function
def few_shot_qa(s, question):
    s += """Q: What is the capital of Karsk?
A: The capital of Karsk is Hollin.
Q: Who rules Hesper?
A: The ruler of Hesper is Queen Wenna.
"""
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", stop="\n", temperature=0)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    sgl.set_default_backend(shared.backend(argv))

    state = few_shot_qa.run(question="Which river runs through Ostrel?")
    print(state.text())

    print("as it is written:", end="")
    pieces = []
    for out in few_shot_qa.run(question="Who rules Velmora?", stream=True).text_iter("answer"):
        print(out, end="|", flush=True)
        pieces.append(out)

    questions = [{"question": f"What is the capital of {land}?"} for land in ("Zembla", "Norwick")]
    answers = [one["answer"] for one in few_shot_qa.run_batch(questions)]
    print("\nas a batch:", answers)
    return {"answer": state["answer"], "pieces": pieces, "answers": answers}


if __name__ == "__main__":
    main()

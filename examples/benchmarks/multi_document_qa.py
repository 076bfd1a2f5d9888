"""One question about several documents: a branch adds each, and joining adds their text to the prompt in
order.

The forks begin within the user's turn, which stays open until all documents are there.

    python examples/benchmarks/multi_document_qa.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tasks

import sglang_dsl as sgl


@sgl.function
def multi_document_qa(s, docs, question):
    s += sgl.user_begin()
    s += "Documents begin.\n"

    forks = s.fork(len(docs))
    forks += lambda i: docs[i]
    forks.join("concate_and_append")

    s += "Documents end.\n" + question
    s += sgl.user_end()
    s += sgl.assistant(sgl.gen("answer", max_tokens=24))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, num_documents=4)
    sgl.set_default_backend(args.chosen)
    asked = tasks.lands(args.num_questions)
    documents = [
        f"The capital of {place.name} is {place.capital}, its river is {place.river}.\n"
        for place in tasks.PLACES[: args.num_documents]
    ]

    clock = tasks.Clock()
    states = multi_document_qa.run_batch(
        [{"docs": documents, "question": question.text} for question, _ in asked],
        temperature=0,
        num_threads=args.parallel,
    )
    right = [question.answer in state["answer"] for (question, _), state in zip(asked, states, strict=True)]
    return tasks.tell(
        "multi_document_qa",
        args,
        clock,
        states=states,
        accuracy=round(sum(right) / len(right), 3),
        cached=sum(state.usage()["cached_tokens"] for state in states),
        prompt=[states[0].messages()[0]["content"]],
    )


if __name__ == "__main__":
    main()

"""Answers from documents that are looked up first, with every call of the model seen by a hook: what a
tracing service would be told.

    python examples/usage/traced_rag.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import shared

import sglang_dsl as sgl
from sglang_dsl import hooks

DOCUMENTS = (
    "The capital of Karsk is Hollin, its river is Mirrow, its ruler is Queen Sabeth.",
    "The capital of Zembla is Pellgate, its river is Orrin, its ruler is Queen Yara.",
    "The capital of Norwick is Lumbra, its river is Isken, its ruler is King Thane.",
)


def retrieve(question: str) -> str:
    """The document that has most words in common with the question."""
    asked = set(question.strip("?").split())
    return max(DOCUMENTS, key=lambda document: len(asked & set(document.split())))


@sgl.function
def rag(s, question):
    s["context"] = retrieve(question)
    s += sgl.system(s["context"])
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=32))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    sgl.set_default_backend(shared.backend(argv))
    events: list[hooks.CallEvent] = []
    questions = ["Who rules Zembla?", "What is the capital of Norwick?"]
    with hooks.subscribed(events.append):
        states = rag.run_batch([{"question": question} for question in questions], temperature=0)
        answers = [state["answer"] for state in states]
    for question, answer, state in zip(questions, answers, states, strict=True):
        print(f"{question} {answer}  [{state['context']}]")
    ended = [event for event in events if event.phase == "end"]
    for event in ended:
        tokens = event.meta["completion_tokens"]
        print(f"{event.program} item {event.index}, {event.name}: {event.seconds:.3f} s, {tokens} tokens")
    return {"answers": answers, "calls": [(event.program, event.index, event.name) for event in ended]}


if __name__ == "__main__":
    main()

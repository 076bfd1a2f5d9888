"""Programs made of signatures ("question -> answer") and improved by examples that the model itself got
right, as libraries for prompting do it: a signature is compiled against a few known answers, and the answers
that a judge accepts become the examples that later questions are asked with.

    python examples/usage/signatures.py
    python examples/usage/signatures.py http://127.0.0.1:30000
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import shared

import sglang_dsl as sgl

Example = dict[str, str]


@sgl.function
def predict(s, signature, examples, values):
    # All questions share the signature and the examples: the server computes them once.
    asked, answered = signature.fields
    for example in examples:
        s += sgl.user(example[asked]) + sgl.assistant(example[answered])
    s += sgl.user(values[asked])
    s += sgl.assistant(sgl.gen(answered, max_tokens=24, temperature=0))


@dataclass
class Predict:
    """`signature`: "input -> output". `examples`: what it is shown before each question."""

    signature: str
    examples: list[Example] = field(default_factory=list)

    @property
    def fields(self) -> tuple[str, str]:
        asked, _, answered = self.signature.partition("->")
        return asked.strip(), answered.strip()

    def __call__(self, inputs: Sequence[Example]) -> list[Example]:
        """Each input with its output."""
        states = predict.run_batch([(self, self.examples, one) for one in inputs])
        _, answered = self.fields
        return [one | {answered: state[answered]} for one, state in zip(inputs, states, strict=True)]

    def compiled(
        self, known: Sequence[Example], judge: Callable[[Example, Example], bool], most: int = 3
    ) -> Predict:
        """The same with examples: up to `most` of `known` that were answered well."""
        told = self([{self.fields[0]: one[self.fields[0]]} for one in known])
        good = [answer for answer, one in zip(told, known, strict=True) if judge(one, answer)]
        return Predict(self.signature, good[:most])


KNOWN = [
    {"question": "What is the capital of Karsk?", "answer": "Hollin"},
    {"question": "Who rules Ostrel?", "answer": "Queen Ilva"},
    {"question": "Which river runs through Ostrel?", "answer": "Sarn"},
    {"question": "What is the capital of Zembla?", "answer": "Pellgate"},
]
NEW = [
    {"question": "What is the capital of Norwick?", "answer": "Lumbra"},
    {"question": "Who rules Velmora?", "answer": "King Dorn"},
    {"question": "Who rules Zembla?", "answer": "Queen Yara"},
]


def right(known: Example, told: Example) -> bool:
    return known["answer"] in told["answer"]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    sgl.set_default_backend(shared.backend(argv))
    qa = Predict("question -> answer").compiled(KNOWN, right)
    print(f"{len(qa.examples)} examples:", [one["answer"] for one in qa.examples])
    told = qa([{"question": one["question"]} for one in NEW])
    for one in told:
        print(one["question"], one["answer"])
    correct = sum(right(known, one) for known, one in zip(NEW, told, strict=True))
    print(f"{correct} of {len(NEW)} right")
    return {"examples": len(qa.examples), "right": correct}


if __name__ == "__main__":
    main()

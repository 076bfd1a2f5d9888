"""A whole object under one expression. What the expression leaves no choice about is not decoded token by
token but jumped over.

    python examples/benchmarks/json_jump_forward.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tasks

import sglang_dsl as sgl

CARD = (
    r'\{"name": "[A-Z][a-z]{1,15}( [A-Z][a-z]{1,15})?", "age": [1-9][0-9], '
    r'"city": "[A-Z][a-z]{1,15}", "job": "(' + "|".join(("baker", "doctor", "painter", "pilot", "farmer",
    "teacher", "sailor", "judge", "miner", "dancer", "cook", "smith", "writer", "nurse", "potter")) + r')"\}'
)  # fmt: skip
RECORD = (
    r'\{"name": "[A-Z][a-z]+", "capital": "[A-Z][a-z]+", "river": "[A-Z][a-z]+", '
    r'"ruler": "(Queen|King) [A-Z][a-z]+", "dish": "[a-z]+ [a-z]+"\}'
)


@sgl.function
def card(s, question):
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("json_output", max_tokens=96, regex=CARD))


@sgl.function
def record(s, question):
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("json_output", max_tokens=96, regex=RECORD))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv)
    sgl.set_default_backend(args.chosen)
    cards = tasks.people(args.num_questions, seed=5)
    places = tasks.PLACES[: args.num_questions]

    clock = tasks.Clock()
    people = card.run_batch(
        [{"question": question.text} for question in cards], temperature=0, num_threads=args.parallel
    )
    lands = record.run_batch(
        [{"question": f"Describe {place.name} as JSON."} for place in places],
        temperature=0,
        num_threads=args.parallel,
    )
    found = [json.loads(state["json_output"]) for state in (*people, *lands)]
    right = [json.loads(question.answer) for question in cards]
    right += [{"name": p.name, **{key: p.value(key) for key in tasks.ATTRIBUTES}} for p in places]
    metas = [state.get_meta_info("json_output") for state in (*people, *lands)]
    return tasks.tell(
        "json_jump_forward",
        args,
        clock,
        states=(*people, *lands),
        accuracy=tasks.accuracy(found, right),
        completion_tokens=sum(meta["completion_tokens"] for meta in metas),
        jumped_tokens=sum(meta["jumped_tokens"] for meta in metas),
    )


if __name__ == "__main__":
    main()

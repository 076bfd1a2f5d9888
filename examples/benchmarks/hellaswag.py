"""The likeliest of four endings: `select` over whole sentences, by the mean log-probability of their tokens.

python examples/benchmarks/hellaswag.py
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import tasks

import sglang_dsl as sgl


def endings(place: tasks.Place, attribute: str, rng: random.Random) -> tuple[list[str], int]:
    """Four sentences of which one is true, and its index."""
    others = rng.sample([other for other in tasks.PLACES if other is not place], 3)
    made = [f"The {attribute} of {place.name} is {one.value(attribute)}." for one in (place, *others)]
    order = list(range(4))
    rng.shuffle(order)
    return [made[at] for at in order], order.index(0)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv)
    sgl.set_default_backend(args.chosen)
    rng = random.Random(0)
    asked = tasks.lands(args.num_questions)
    options = [
        endings(place, tasks.ATTRIBUTES[number % len(tasks.ATTRIBUTES)], rng)
        for number, (_, place) in enumerate(asked)
    ]

    @sgl.function
    def few_shot_endings(s, question, choices):
        s += tasks.EXAMPLES + question
        s += sgl.select("answer", choices=choices)

    clock = tasks.Clock()
    states = few_shot_endings.run_batch(
        [
            {"question": f"Q: {question.text}\nA: ", "choices": sentences}
            for (question, _), (sentences, _) in zip(asked, options, strict=True)
        ],
        temperature=0,
        num_threads=args.parallel,
    )
    found = [sentences.index(state["answer"]) for state, (sentences, _) in zip(states, options, strict=True)]
    sure = [state.choice("answer").probability for state in states]
    return tasks.tell(
        "hellaswag",
        args,
        clock,
        states=states,
        accuracy=tasks.accuracy(found, [right for _, right in options]),
        mean_probability=round(sum(sure) / len(sure), 3),
    )


if __name__ == "__main__":
    main()

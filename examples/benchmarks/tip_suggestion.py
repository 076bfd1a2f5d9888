"""A skeleton first, then its parts side by side: one program calls another, which returns at once.

The call goes on while the caller writes its next point; only reading a paragraph waits for it.

    python examples/benchmarks/tip_suggestion.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tasks

import sglang_dsl as sgl

POINTS = ("capital", "river", "ruler")


@sgl.function
def expand(s, land, point):
    s += tasks.EXAMPLES + f"Q: Tell me the {point} of {land}.\nA:"
    s += sgl.gen("paragraph", max_tokens=32, stop=["\n"], temperature=0)


@sgl.function
def suggest(s, land):
    s += f"USER: Tell me about {land}.\nASSISTANT: Here are {len(POINTS)} points:\n"
    paragraphs = []
    for i, point in enumerate(POINTS, 1):
        s += f"{i}." + sgl.gen(f"point_{i}", max_tokens=8, stop=[".", "\n"]) + ".\n"
        paragraphs.append(expand(land=land, point=point))

    for i, paragraph in enumerate(paragraphs, 1):
        s += f"Point {i}:" + paragraph["paragraph"] + "\n"
    return paragraphs


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, questions=4)
    sgl.set_default_backend(args.chosen)
    places = tasks.PLACES[: args.num_questions]

    clock = tasks.Clock()
    states = suggest.run_batch(
        [{"land": place.name} for place in places], temperature=0, num_threads=args.parallel
    )
    right = [
        place.value(point) in paragraph["paragraph"]
        for place, state in zip(places, states, strict=True)
        for point, paragraph in zip(POINTS, state.ret_value, strict=True)
    ]
    return tasks.tell(
        "tip_suggestion",
        args,
        clock,
        states=states,
        accuracy=round(sum(right) / len(right), 3),
        text=[states[0].text()],
    )


if __name__ == "__main__":
    main()

"""The trace of an agent, replayed: at each step a branch thinks aloud and is dropped, and the recorded step
is added.

Each step's prompt is the last one's and a little more; the figure to watch is how much of it was cached.

    python examples/benchmarks/react.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tasks

import sglang_dsl as sgl


@sgl.function
def webthink(s, question, triplets):
    s += tasks.EXAMPLES + "Q: " + question + "\n"
    for i in range(1, len(triplets) + 2):
        s += "Thought " + str(i) + ":"
        forks = s.fork(1)
        forks[0] += sgl.gen(name="thought_action", max_tokens=16, stop="Observation")
        forks.join()
        if i > len(triplets):
            break
        step = triplets[i - 1]
        s += step["thought"] + "\nAction " + str(i) + ":" + step["action"]
        s += "\nObservation " + str(i) + ":" + step["observation"] + "\n"


def trace(place: tasks.Place) -> list[dict[str, str]]:
    return [
        {
            "thought": f" I need the {attribute} of {place.name}.",
            "action": f" Look up [{attribute} of {place.name}]",
            "observation": f" The {attribute} of {place.name} is {place.value(attribute)}.",
        }
        for attribute in ("capital", "river", "ruler")
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, questions=4)
    sgl.set_default_backend(args.chosen)
    places = tasks.PLACES[: args.num_questions]

    clock = tasks.Clock()
    states = webthink.run_batch(
        [{"question": f"Tell me about {place.name}.", "triplets": trace(place)} for place in places],
        temperature=0,
        num_threads=args.parallel,
    )
    used = [state.usage() for state in states]
    return tasks.tell(
        "react",
        args,
        clock,
        states=states,
        calls=sum(one["calls"] for one in used),
        prompt_tokens=sum(one["prompt_tokens"] for one in used),
        cached_tokens=sum(one["cached_tokens"] for one in used),
        last_thoughts=[state["thought_action"] for state in states],
        texts=[state.text() for state in states],
    )


if __name__ == "__main__":
    main()

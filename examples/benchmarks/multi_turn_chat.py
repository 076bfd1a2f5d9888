"""A conversation of turns whose answers have a fixed length: generations without a name, `ignore_eos`.

What was said before is in the server's prefix cache at each further turn; the last line tells how much.

    python examples/benchmarks/multi_turn_chat.py --turns 6
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import tasks

import sglang_dsl as sgl
from sglang_dsl.utils import dump_state_text


@sgl.function
def multi_turns(s, qas):
    for qa in qas:
        s += qa["prompt"]
        s += sgl.gen(max_tokens=qa["new_tokens"], ignore_eos=True)


def conversation(turns: int, rng: random.Random) -> dict[str, Any]:
    asked = tasks.lands(turns * 2)
    rng.shuffle(asked)
    return {
        "qas": [
            {"prompt": f"Q: {question.text}\nA:", "new_tokens": rng.randint(4, 8)}
            for question, _ in asked[:turns]
        ]
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, questions=4, turns=4)
    rng = random.Random(0)
    items = [conversation(args.turns, rng) for _ in range(args.num_questions)]

    clock = tasks.Clock()
    states = multi_turns.run_batch(items, temperature=0, backend=args.chosen, num_threads=args.parallel)
    if args.raw_result_file:
        dump_state_text(args.raw_result_file, states)
    used = [state.usage() for state in states]
    return tasks.tell(
        "multi_turn_chat",
        args,
        clock,
        states=states,
        wanted_tokens=sum(qa["new_tokens"] for item in items for qa in item["qas"]),
        completion_tokens=sum(one["completion_tokens"] for one in used),
        prompt_tokens=sum(one["prompt_tokens"] for one in used),
        cached_tokens=sum(one["cached_tokens"] for one in used),
    )


if __name__ == "__main__":
    main()

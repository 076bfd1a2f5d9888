"""A JSON object without any constraint: quotes and keys are constant text, each value ends at its quote.

Variables may have any name, blanks included.

    python examples/benchmarks/long_json_decode.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tasks

import sglang_dsl as sgl


@sgl.function
def json_decode(s, land):
    s += sgl.user(f"Describe {land} as JSON.")
    with s.assistant():
        s += '{"name": "' + sgl.gen("name", max_tokens=16, stop='"') + '", '
        s += '"capital": "' + sgl.gen("capital city", max_tokens=16, stop='"') + '", '
        s += '"river": "' + sgl.gen("river", max_tokens=16, stop='"') + '", '
        s += '"ruler": "' + sgl.gen("who rules", max_tokens=16, stop='"') + '", '
        s += '"dish": "' + sgl.gen("dish", max_tokens=24, stop='"') + '"}'


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv)
    sgl.set_default_backend(args.chosen)
    places = tasks.PLACES[: args.num_questions]

    clock = tasks.Clock()
    states = json_decode.run_batch(
        [{"land": place.name} for place in places], temperature=0, num_threads=args.parallel
    )
    found = [json.loads(state.messages()[-1]["content"]) for state in states]
    right = [{"name": place.name, **{key: place.value(key) for key in tasks.ATTRIBUTES}} for place in places]
    return tasks.tell(
        "long_json_decode",
        args,
        clock,
        states=states,
        accuracy=tasks.accuracy(found, right),
        rulers=[state["who rules"] for state in states],
    )


if __name__ == "__main__":
    main()

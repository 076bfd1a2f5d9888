"""Objects kept to a JSON schema, which each item brings along; every output is validated against its own.

python examples/benchmarks/json_schema.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import tasks

import sglang_dsl as sgl

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 24},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "city": {"type": "string", "maxLength": 16},
        "job": {"type": "string", "maxLength": 10},
    },
    "required": ["name", "age", "city", "job"],
    "additionalProperties": False,
}
LAND = {
    "type": "object",
    "properties": {
        "name": {"enum": [place.name for place in tasks.PLACES]},
        **{key: {"type": "string", "maxLength": 24} for key in tasks.ATTRIBUTES},
    },
    "required": ["name", *tasks.ATTRIBUTES],
    "additionalProperties": False,
}


@sgl.function
def schema_gen(s, message: tuple[str, str], json_schema: str, max_tokens: int):
    system, user = message
    s += sgl.system(system)
    s += sgl.user(user)
    s += sgl.assistant(sgl.gen("json_output", temperature=0, max_tokens=max_tokens, json_schema=json_schema))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, max_tokens=128)
    sgl.set_default_backend(args.chosen)
    asked = [(question.text, PERSON) for question in tasks.people(args.num_questions // 2, seed=6)]
    asked += [(f"Describe {p.name} as JSON.", LAND) for p in tasks.PLACES[: args.num_questions - len(asked)]]
    items = [
        {
            "message": ("You write JSON.", question),
            "json_schema": json.dumps(schema),
            "max_tokens": args.max_tokens,
        }
        for question, schema in asked
    ]

    clock = tasks.Clock()
    states = schema_gen.run_batch(items, temperature=0, num_threads=args.parallel)
    valid = 0
    for state, (_, schema) in zip(states, asked, strict=True):
        jsonschema.validate(json.loads(state["json_output"]), schema)
        valid += 1
    return tasks.tell(
        "json_schema",
        args,
        clock,
        states=states,
        valid=round(valid / len(states), 3),
        kept_by=sorted({state.get_meta_info("json_output")["grammar"]["backend"] for state in states}),
        outputs=[state["json_output"] for state in states],
    )


if __name__ == "__main__":
    main()

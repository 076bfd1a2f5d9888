"""A JSON object written field by field: constant text between generations that each match an expression.

`var_scope` records all of it as one variable, so the whole object can be read at once.

    python examples/benchmarks/json_decode_regex.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tasks

import sglang_dsl as sgl
from sglang_dsl.lang.ir import REGEX_INT, REGEX_STR

# A blank and the quote after it, or a quote and what closes after it, are one token to most models. In the
# expression they can be written as the model learnt to.
TEXT, NUMBER = " " + REGEX_STR, " " + REGEX_INT


@sgl.function
def json_decode(s, document):
    s += sgl.user(document)
    with s.assistant(), s.var_scope("json_output"):
        s += '{"name":' + sgl.gen("name", max_tokens=24, regex=TEXT + ",")
        s += ' "age":' + sgl.gen("age", max_tokens=8, regex=NUMBER + ",")
        s += ' "city":' + sgl.gen("city", max_tokens=24, regex=TEXT + ",")
        s += ' "job":' + sgl.gen("job", max_tokens=24, regex=TEXT + r"\}")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv)
    sgl.set_default_backend(args.chosen)
    questions = tasks.people(args.num_questions)
    # The first run compiles the expressions; the batch finds them.
    json_decode.run(document=questions[0].text, temperature=0).sync()

    clock = tasks.Clock()
    states = json_decode.run_batch(
        [{"document": question.text} for question in questions], temperature=0, num_threads=args.parallel
    )
    objects = [json.loads(state["json_output"]) for state in states]
    right = [json.loads(question.answer) for question in questions]
    return tasks.tell(
        "json_decode_regex",
        args,
        clock,
        states=states,
        accuracy=tasks.accuracy(objects, right),
        parsed=len(objects),
    )


if __name__ == "__main__":
    main()

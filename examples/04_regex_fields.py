"""Text of a given form: a JSON object and a worked sum.

The model can only write what the expression allows, so the result always parses. What the expression leaves
no choice about (quotes, keys, commas) is not decoded token by token but jumped over.

    python examples/04_regex_fields.py
"""

import json
from collections.abc import Sequence

from sglang_dsl import ProgramState, assistant, function, gen, user
from sglang_dsl.console.backend_flag import chosen_backend

CARD = r'\{"name": "[A-Z][a-z]+", "age": [0-9]{1,3}, "city": "[A-Z][a-z]+", "job": "[a-z]+"\}'


@function(temperature=0)
def read_card(s: ProgramState, note: str) -> None:
    s += user(f"Extract name, age, city and job as JSON: {note}")
    s += assistant(gen("card", regex=CARD, max_tokens=96))


@function(temperature=0)
def add(s: ProgramState, a: int, b: int) -> int:
    s += user(f"What is {a} + {b}?")
    # A little room to work it out, then the result.
    s += assistant(
        gen("working", regex=rf"{a} \+ {b} = ([0-9]{{1,3}} [+-] [0-9] = )?[0-9]{{1,3}}", max_tokens=32)
    )
    # Reading inside the function waits; what it returns is the state's ret_value.
    return int(s["working"].rpartition("= ")[2])


def main(argv: Sequence[str] | None = None) -> None:
    with chosen_backend(__doc__, argv) as backend:
        state = read_card(note="Mobi, 42, is a potter from Caturn.", backend=backend)
        print(state.text())
        card = json.loads(state["card"])
        print("as a value:", card)
        meta = state.get_meta_info("card")
        # Only the bundled engine tells this.
        print(f"{meta.get('jumped_tokens', 0)} of {meta['completion_tokens']} tokens were jumped over\n")

        added = add(30, 12, backend=backend)
        print(added.text())
        print("as a number:", added.ret_value)


if __name__ == "__main__":
    main()

"""A first program: a few worked questions, then one of our own.

A program is a Python function that writes to `s`. `+=` adds text, turns and generations; reading
`s["answer"]` waits for the generation of that name.

    python examples/01_first_program.py
    python examples/01_first_program.py --backend http://127.0.0.1:30000
"""

from collections.abc import Sequence

from sglang_dsl import ProgramState, assistant, function, gen, system, user
from sglang_dsl.console.backend_flag import chosen_backend

EXAMPLES = """You are Pocket, a guide to the lands. Answer like this:
Q: What is the capital of Karsk?
A: The capital of Karsk is Hollin.
Q: Who rules Hesper?
A: The ruler of Hesper is Queen Wenna."""


@function
def answer(s: ProgramState, question: str) -> None:
    s += system(EXAMPLES)
    s += user(question)
    s += assistant(gen("answer", max_tokens=24, temperature=0))


def main(argv: Sequence[str] | None = None) -> None:
    # The bundled model, sgl.Engine("pocket"), unless --backend and --model name another one.
    with chosen_backend(__doc__, argv) as backend:
        state = answer(question="Which river runs through Ostrel?", backend=backend)
        print(state.text())
        print("the variable alone:", state["answer"])

        # The examples are in the engine's prefix cache now: another question computes only what is new.
        state = answer(question="Who rules Velmora?", backend=backend)
        print("another question:  ", state["answer"])
        usage = state.usage()
        print(f"{usage['cached_tokens']} of {usage['prompt_tokens']} prompt tokens came from the cache")


if __name__ == "__main__":
    main()

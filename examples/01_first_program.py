"""A first program: a few worked questions, then one of our own.

A program is a Python function that writes to `s`. `+=` adds text, turns and generations; reading
`s["answer"]` waits for the generation of that name.

    python examples/01_first_program.py
"""

from sglang_dsl import Engine, ProgramState, assistant, function, gen, system, user

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


def main() -> None:
    # "pocket" is the small model that comes with this package; any Hugging Face folder works as well.
    with Engine("pocket") as engine:
        state = answer(question="Which river runs through Ostrel?", backend=engine)
        print(state["answer"])

        # The examples are in the engine's prefix cache now: another question computes only what is new.
        state = answer(question="Who rules Velmora?", backend=engine)
        print(state["answer"])
        meta = state.get_meta_info("answer")
        print(f"{meta['cached_tokens']} of {meta['prompt_tokens']} prompt tokens came from the cache")


if __name__ == "__main__":
    main()

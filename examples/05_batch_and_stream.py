"""Many runs at once, and one as it is written.

`run_batch` takes a list (or any iterable) of arguments and gives the finished states in the same order; the
engine computes them together. With `stream=True` a run returns at once, and `text_iter` gives the pieces as
they come.

    python examples/05_batch_and_stream.py
"""

from sglang_dsl import Engine, ProgramError, ProgramState, assistant, function, gen, system, user

LANDS = ("Ostrel", "Velmora", "Karsk", "Zembla", "Hesper")


@function(temperature=0, max_tokens=24)
def ask(s: ProgramState, question: str) -> None:
    s += system("You answer questions.")
    s += user(question)
    s += assistant(gen("answer"))


def main() -> None:
    with Engine("pocket") as engine:
        questions = [{"question": f"Who rules {land}?"} for land in LANDS]
        for land, state in zip(LANDS, ask.run_batch(questions, backend=engine), strict=True):
            print(f"{land:>8}: {state['answer']}")

        # One item that fails need not stop the others: "return" puts its error in its place.
        items = [*questions[:1], {"question": "Who rules there? " * 5000}]
        for result in ask.run_batch(items, backend=engine, on_error="return"):
            if isinstance(result, ProgramError):
                print(f"{type(result).__name__}: {result.message}")
            elif isinstance(result, ProgramState):
                print(result["answer"])

        print("\nas it is written: ", end="")
        stream = ask.run("Which river runs through Ostrel?", backend=engine, stream=True)
        for piece in stream.text_iter("answer"):
            print(piece, end="|", flush=True)
        print()


if __name__ == "__main__":
    main()

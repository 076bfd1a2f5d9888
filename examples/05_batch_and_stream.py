"""Many runs at once, and one as it is written.

`run_batch` takes a list (or any iterable) of arguments and gives the finished states in the same order; the
engine computes them together. With `stream=True` a run returns at once, and `text_iter` gives the pieces as
they come.

    python examples/05_batch_and_stream.py
"""

from collections.abc import Sequence

from sglang_dsl import ProgramError, ProgramState, assistant, function, gen, system, user
from sglang_dsl.console.backend_flag import chosen_backend

LANDS = ("Ostrel", "Velmora", "Karsk", "Zembla", "Hesper")


@function(temperature=0, max_tokens=24)
def ask(s: ProgramState, question: str) -> None:
    s += system("You answer questions.")
    s += user(question)
    s += assistant(gen("answer"))


def main(argv: Sequence[str] | None = None) -> None:
    with chosen_backend(__doc__, argv) as backend:
        questions = [{"question": f"Who rules {land}?"} for land in LANDS]
        for asked, state in zip(questions, ask.run_batch(questions, backend=backend), strict=True):
            print(f"{asked['question']:<20} {state['answer']}")

        # One item that fails need not stop the others: "return" puts its error in its place.
        items = [*questions[:1], {"question": "Who rules there? " * 5000}]
        print()
        for result in ask.run_batch(items, backend=backend, on_error="return"):
            if isinstance(result, ProgramError):
                print(f"{type(result).__name__}: {result.message}")
            elif isinstance(result, ProgramState):
                print(result["answer"])

        print("\nWhich river runs through Ostrel? ", end="")
        stream = ask.run("Which river runs through Ostrel?", backend=backend, stream=True)
        for piece in stream.text_iter("answer"):
            print(piece, end="|", flush=True)
        print()


if __name__ == "__main__":
    main()

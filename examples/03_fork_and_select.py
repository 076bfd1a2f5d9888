"""Branches and choices: several questions about one text at once, then a decision.

`s.fork(n)` gives n states that go on from the same text. They run at the same time and share its computation;
join() brings each variable back as a list. `select` picks one of the given texts by their probability.

    python examples/03_fork_and_select.py
"""

from collections.abc import Sequence

from sglang_dsl import ProgramState, assistant, function, gen, select, system, user
from sglang_dsl.console.backend_flag import chosen_backend

QUESTIONS = (
    "Which river runs through {land}?",
    "Who rules {land}?",
    "What do people eat in {land}?",
)


@function(temperature=0)
def portrait(s: ProgramState, land: str, review: str) -> None:
    s += system("You answer questions.")

    branches = s.fork(len(QUESTIONS))
    for branch, question in zip(branches, QUESTIONS, strict=True):
        branch += user(question.format(land=land))
        branch += assistant(gen("facts", max_tokens=24))
    branches.join()

    s += user(f"Is this positive or negative? {review}")
    s += assistant(select("mood", choices=["positive", "negative"]))


def main(argv: Sequence[str] | None = None) -> None:
    with chosen_backend(__doc__, argv) as backend:
        state = portrait(land="Ostrel", review="We had a lovely meal. I would go again.", backend=backend)
        # Turns, branches and what they cost; in a terminal with colours.
        state.show()
        print("facts:", state["facts"])

        mood = state.get_meta_info("mood")
        print(f"\n{state['mood']}, chosen among")
        for option, probability in zip(mood["choices"], mood["probabilities"], strict=True):
            print(f"  {option}: {probability:.3f}")


if __name__ == "__main__":
    main()

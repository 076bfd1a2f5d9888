"""A conversation: two turns written by the program, and a third added to the finished state.

Turns can be written as words (`user("...")`), as methods (`s.user("...")`) or as blocks (`with s.assistant():
...`).

    python examples/02_chat_two_turns.py
"""

from collections.abc import Sequence

from sglang_dsl import ProgramState, assistant, function, gen, set_default_backend, system, user
from sglang_dsl.console.backend_flag import chosen_backend


@function(temperature=0, max_tokens=24)
def two_turns(s: ProgramState, land: str) -> None:
    s += system("You answer questions.")
    s += user(f"Which river runs through {land}?")
    s += assistant(gen("river"))

    s.user("And who rules there?")
    with s.assistant():
        s += gen("ruler")


def main(argv: Sequence[str] | None = None) -> None:
    with chosen_backend(__doc__, argv) as backend:
        # Programs that are not given a backend use the default one.
        set_default_backend(backend)
        state = two_turns(land="Ostrel")

        # A state that was returned can go on: it is the conversation so far.
        state += user("And what is its capital called?")
        state += assistant(gen("capital"))

        for message in state.messages():
            print(f"{message['role']:>9}: {message['content']}")
        set_default_backend(None)


if __name__ == "__main__":
    main()

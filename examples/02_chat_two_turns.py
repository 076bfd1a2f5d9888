"""A conversation: two turns written by the program, and a third added to the finished state.

Turns can be written as words (`user("...")`), as methods (`s.user("...")`) or as blocks (`with s.assistant():
...`).

    python examples/02_chat_two_turns.py
"""

from sglang_dsl import Engine, ProgramState, assistant, function, gen, set_default_backend, system, user


@function(temperature=0, max_tokens=24)
def two_turns(s: ProgramState, land: str) -> None:
    s += system("You answer questions.")
    s += user(f"Which river runs through {land}?")
    s += assistant(gen("river"))

    s.user("And who rules there?")
    with s.assistant():
        s += gen("ruler")


def main() -> None:
    with Engine("pocket") as engine:
        # Programs that are not given a backend use the default one.
        set_default_backend(engine)
        state = two_turns(land="Ostrel")

        # A state that was returned can go on: it is the conversation so far.
        state += user("And what is its capital called?")
        state += assistant(gen("capital"))

        for message in state.messages():
            print(f"{message['role']:>9}: {message['content']}")
        set_default_backend(None)


if __name__ == "__main__":
    main()

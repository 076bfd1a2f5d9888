"""A run that repeats itself: seeds for sampled programs, a record of calls, a budget, what each call cost.

With `cache_dir` every call is written down by its content; with cache="ro" the run is replayed from there,
byte for byte, without asking a backend. `seed` gives every call of a run a seed of its own, so that branches
differ from each other and the run does not differ from the next.

    python examples/09_record_and_replay.py
"""

from collections.abc import Sequence
from tempfile import TemporaryDirectory

from sglang_dsl import (
    Budget,
    BudgetExceeded,
    ProgramState,
    ReplayMiss,
    assistant,
    function,
    gen,
    user,
)
from sglang_dsl.console.backend_flag import chosen_backend
from sglang_dsl.hooks import CallEvent, subscribed


@function(temperature=1, max_tokens=12)
def story(s: ProgramState, hero: str) -> None:
    s += user(f"Tell me about {hero}.")
    drafts = s.fork(3)
    drafts += assistant(gen("draft", stop="."))
    s.adopt(drafts.best_of(lambda branch: len(branch["draft"])))
    s += user("And then?") + assistant(gen("end", stop="."))


def main(argv: Sequence[str] | None = None) -> None:
    with chosen_backend(__doc__, argv) as backend, TemporaryDirectory() as folder:
        # The same seed, the same story.
        once = story("Queen Wenna", backend=backend, seed=11).text()
        print(once)
        print("the same again:", story("Queen Wenna", backend=backend, seed=11).text() == once)

        # Written down, and told again from the record alone.
        told = story("Queen Wenna", backend=backend, seed=5, cache_dir=folder)
        told.sync()
        again = story("Queen Wenna", seed=5, cache="ro", cache_dir=folder)
        print("replayed:", again.text() == told.text(), "-", again.usage()["calls"], "calls")

        # What was never asked is not made up.
        try:
            story("somebody else", seed=5, cache="ro", cache_dir=folder).sync()
        except ReplayMiss as error:
            print("not there:", error.message)

        # What each call took.
        def report(event: CallEvent) -> None:
            if event.phase == "end":
                where = "".join(f", branch {number}" for number in event.branch)
                print(f"  {event.name}{where}: {event.meta['completion_tokens']} tokens")

        with subscribed(report):
            story("Queen Wenna", backend=backend, seed=11).sync()

        try:
            story("Queen Wenna", backend=backend, budget=Budget(calls=3)).sync()
        except BudgetExceeded as error:
            print("stopped:", error.message)


if __name__ == "__main__":
    main()

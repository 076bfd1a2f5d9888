"""The same programs on a server: one of its own processes, reached over HTTP.

`Runtime` starts `python -m runtime serve` and ends it with the block. Whoever knows its address can use it at
the same time, from any process or machine that reaches it: `RuntimeEndpoint(url)`, or simply `backend=url`.

    python examples/06_remote.py
    python examples/06_remote.py --backend http://127.0.0.1:30000     # one that runs already
"""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext

from sglang_dsl import (
    ProgramError,
    ProgramState,
    Runtime,
    RuntimeEndpoint,
    assistant,
    function,
    gen,
    get_server_info,
    select,
    system,
    user,
)

EXAMPLES = """You are Pocket, a guide to the lands. Answer like this:
Q: What is the capital of Karsk?
A: The capital of Karsk is Hollin.
Q: Who rules Hesper?
A: The ruler of Hesper is Queen Wenna."""
LANDS = ("Ostrel", "Velmora", "Karsk", "Zembla")


@function(temperature=0, max_tokens=24)
def who_rules(s: ProgramState, land: str) -> None:
    s += system(EXAMPLES)
    s += user(f"Who rules {land}?")
    # The sentence ends before its first full stop or exclamation mark.
    s += assistant(gen("ruler", stop_regex=r"[.!]"))


@function
def mood(s: ProgramState, review: str) -> None:
    s += user(f"Is this positive or negative? {review}")
    s += assistant(select("mood", choices=["positive", "negative"]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", metavar="URL", help="of a server that runs already")
    args = parser.parse_args(argv)
    with nullcontext(RuntimeEndpoint(args.backend)) if args.backend else Runtime("pocket") as runtime:
        # A Runtime can be given wherever a backend is. The server computes these four together.
        for state in who_rules.run_batch([{"land": land} for land in LANDS], backend=runtime):
            meta = state.get_meta_info("ruler")
            shared = f"{meta['cached_tokens']} of {meta['prompt_tokens']} prompt tokens were cached"
            print(f"{state['ruler']:<36}{shared:>40}")

        # As another process would do it: only the address, with its own timeout and retries.
        url = runtime.url if isinstance(runtime, Runtime) else runtime.base_url
        endpoint = RuntimeEndpoint(url, timeout=60, retries=2)
        print()
        print(mood(review="What a lovely garden!", backend=endpoint).text())

        print("Who rules Hesper? ", end="")
        for piece in who_rules.run("Hesper", backend=endpoint, stream=True).text_iter("ruler"):
            print(piece, end="|", flush=True)

        # What the server refuses is raised here, where it is read, with the server's own words.
        try:
            who_rules(land="Ostrel, " * 2000, backend=endpoint)["ruler"]
        except ProgramError as error:
            print(f"\nrefused ({error.status}): {error.message}")

        [counted] = get_server_info(endpoint)["internal_states"]
        total, cached = counted["prompt_tokens_total"], counted["cached_tokens_total"]
        print(f"\nthe server read {total} prompt tokens, {cached} of them from its cache")


if __name__ == "__main__":
    main()

"""A survey in stages: branches over one long beginning, and a last word that has read them all. The same
again as requests of different clients, to compare how many prompt tokens the engine had to compute.

    python examples/usage/multi_stage_fork.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import shared

import sglang_dsl as sgl

CONTEXT = "".join(
    f"Q: What is the capital of {land}?\nA: The capital of {land} is {city}.\n"
    for land, city in (
        ("Karsk", "Hollin"),
        ("Zembla", "Pellgate"),
        ("Ithary", "Corvane"),
        ("Hesper", "Tindale"),
    )
)
LANDS = ("Ostrel", "Velmora", "Norwick", "Skarra")


@sgl.function
def survey(s, context, lands):
    s += context
    forks = s.fork(len(lands))
    for i, land in enumerate(lands):
        forks[i] += f"Q: Who rules {land}?\nA:"
        forks[i] += sgl.gen(f"ruler_{land}", max_tokens=24, stop="\n")
    # Reading waits for a branch; no join is needed.
    for i, land in enumerate(lands):
        s += f"[{land}]" + forks[i][f"ruler_{land}"] + "\n"
    s += f"Q: Describe {lands[0]}.\nA:" + sgl.gen("last_word", max_tokens=48, stop="\n")


@sgl.function
def single_request(s, prompt):
    s += prompt + sgl.gen("text", max_tokens=24, stop="\n")


def computed(backend: Any) -> int:
    """Prompt tokens that the engine has computed so far, of all clients."""
    told = sgl.get_server_info(backend)
    state = told.get("internal_states", [told])[0]
    return int(state["prompt_tokens_total"] - state["cached_tokens_total"])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    backend = shared.backend(argv)
    sgl.set_default_backend(backend)

    backend.flush_cache()
    before = computed(backend)
    state = survey.run(context=CONTEXT, lands=LANDS, temperature=0)
    print(state.text()[len(CONTEXT) :])  # text() waits for all of it
    as_program = computed(backend) - before

    before = computed(backend)
    for land in LANDS:
        backend.flush_cache()  # another client's requests share nothing
        single_request.run(prompt=CONTEXT + f"Q: Who rules {land}?\nA:", temperature=0).sync()
    alone = computed(backend) - before
    print(f"prompt tokens computed: {as_program} by the program, {alone} for its branches by themselves")
    return {"as_program": as_program, "alone": alone, "last_word": state["last_word"]}


if __name__ == "__main__":
    main()

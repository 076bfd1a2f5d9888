"""What stands behind a choice: the log-probabilities of each option's tokens, and probabilities.

python examples/usage/choices_logprob.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import shared

import sglang_dsl as sgl


@sgl.function
def mood(s, review):
    s += sgl.user("Is this positive or negative? " + review)
    s += sgl.assistant(sgl.gen("mood", choices=["positive", "negative"]))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    sgl.set_default_backend(shared.backend(argv))
    reviews = ["The film was great.", "The hotel was awful."]
    told = []
    for review, state in zip(reviews, mood.run_batch([{"review": one} for one in reviews]), strict=True):
        print("review:", review)
        print("choice:", state["mood"])
        # Triples of log-probability, token id and text, as programs for sglang read them.
        meta = state.get_meta_info("mood")
        for option, tokens in zip(meta["choices"], meta["input_token_logprobs"], strict=True):
            print(f"  log-probabilities of {option!r}: {[round(one[0], 3) for one in tokens]}")
        choice = state.choice("mood")
        print(f"  probability {choice.probability:.3f}, margin {choice.margin:.3f}\n")
        told.append((choice.text, choice.probability, meta["input_token_logprobs"]))
    return {"choices": told}


if __name__ == "__main__":
    main()

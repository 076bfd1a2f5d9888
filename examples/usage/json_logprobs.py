"""How sure the model was of each token of a JSON text: log-probabilities under a constraint, prompt included.

python examples/usage/json_logprobs.py
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Any

import shared

import sglang_dsl as sgl

CARD = r'\{"name": "[A-Z][a-z]+", "age": [0-9]{1,3}, "city": "[A-Z][a-z]+", "job": "[a-z]+"\}'


@sgl.function
def card(s, note):
    s += sgl.user(f"Extract name, age, city and job as JSON: {note}")
    s += sgl.assistant(
        sgl.gen(
            "card",
            max_tokens=96,
            temperature=0,
            regex=CARD,
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=3,
            return_text_in_logprobs=True,
        )
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    sgl.set_default_backend(shared.backend(argv))
    notes = ["Mobi, 42, is a potter from Caturn.", "Lura, 31, is a nurse from Semmel."]
    metas = []
    for state in card.run_batch([{"note": note} for note in notes]):
        meta = state.get_meta_info("card")
        metas.append(meta)
        print(state["card"])
        chosen = zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True)
        for (logprob, _, text), top in chosen:
            # What the constraint leaves no choice about is jumped over, without figures.
            sure = "forced" if logprob is None else f"{exp(logprob):.3f}"
            others = ", ".join(repr(other[2]) for other in top or ())
            print(f"  {text!r:>12} {sure}  likeliest: {others}")
    return {"metas": metas}


if __name__ == "__main__":
    main()

"""Chain-of-thought decoding (Wang and Zhou 2024, arXiv:2402.10200): begin with each of the k likeliest first
tokens, go on greedily, and trust the path whose tokens are the surest.

`max_tokens=0` with log-probabilities asks which tokens could come next, and says none of them.

    python examples/usage/cot_decoding.py
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Any

import shared

import sglang_dsl as sgl


@sgl.function
def cot_decoding(s, question, k):
    s += sgl.user(question)
    s += sgl.assistant_begin()

    first = s.fork(1)[0]
    forks = s.fork(k)
    first += sgl.gen(
        "next", max_tokens=0, return_logprob=True, top_logprobs_num=k, return_text_in_logprobs=True
    )

    paths = []
    candidates = first.get_meta_info("next")["output_top_logprobs"][0]
    for fork, (logprob, _, text) in zip(forks, candidates, strict=True):
        fork += text
        fork += sgl.gen("answer", temperature=0, max_tokens=24, return_logprob=True, top_logprobs_num=2)
        top = fork.get_meta_info("answer")["output_top_logprobs"]
        # How far the likeliest token is ahead of the next one, on average.
        lead = sum(exp(best[0]) - exp(second[0]) for best, second in top) / max(1, len(top))
        paths.append((lead, text + fork["answer"], exp(logprob)))
    return sorted(paths, reverse=True)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    sgl.set_default_backend(shared.backend(argv))
    state = cot_decoding.run(question="Who rules Ostrel?", k=4)
    for lead, text, probability in state.ret_value:
        print(f"lead {lead:.5f}, first token {probability:.4f}: {text!r}")
    return {"paths": state.ret_value}


if __name__ == "__main__":
    main()

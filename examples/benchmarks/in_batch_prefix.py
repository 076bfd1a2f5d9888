"""Batches whose prompts share long beginnings: batch by batch, with a hint first, and all at once.

Items are tuples of arguments. The prefix cache is emptied before each way; how much each way found in it is
the result.

    python examples/benchmarks/in_batch_prefix.py
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import tasks

import sglang_dsl as sgl


@sgl.function
def text_qa(s, question, gen_len):
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", stop="\n", temperature=0, max_tokens=gen_len)


def batch_by_batch(prompts: list[list[str]], gen_len: int) -> list[Any]:
    return [state for group in prompts for state in text_qa.run_batch([(one, gen_len) for one in group])]


def with_hint(prompts: list[list[str]], gen_len: int) -> list[Any]:
    states = []
    for group in prompts:
        text_qa.run_batch([(group[0], gen_len)])
        states += text_qa.run_batch([(one, gen_len) for one in group])
    return states


def all_at_once(prompts: list[list[str]], gen_len: int) -> list[Any]:
    return list(text_qa.run_batch([(one, gen_len) for group in prompts for one in group]))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, questions=12, num_prefixes=3, gen_len=1)
    sgl.set_default_backend(args.chosen)
    rng = random.Random(0)
    words = [word for place in tasks.PLACES for word in (place.name, place.capital, place.river)]
    size = args.num_questions // args.num_prefixes
    prompts = []
    for number in range(args.num_prefixes):
        prefix = f"{number} " + " ".join(rng.choices(words, k=24))
        prompts.append([f"{prefix} {' '.join(rng.choices(words, k=6))}" for _ in range(size)])

    ways: tuple[Callable[..., list[Any]], ...] = (batch_by_batch, with_hint, all_at_once)
    clock = tasks.Clock()
    figures = {}
    for way in ways:
        args.chosen.flush_cache()
        metas = [state.get_meta_info("answer") for state in way(prompts, args.gen_len)]
        share = sum(meta["cached_tokens"] for meta in metas) / sum(meta["prompt_tokens"] for meta in metas)
        figures[way.__name__] = f"{share:.0%}"
    return tasks.tell("in_batch_prefix", args, clock, **figures)


if __name__ == "__main__":
    main()

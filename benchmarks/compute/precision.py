"""What a text loses when a model is computed in fewer bits:
`python -m benchmarks.compute.precision [--write]`.

On held-out items of the bundled model, in each way of computing: perplexity of the right replies (loss over
their tokens alone, as in training), the share of greedy replies that are float32's to the last token, of
tokens up to the first other one, and of items that are answered rightly.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.measuring import HERE, conditions, keep
from examples.pocket.items import Item, correct, items
from runtime.api import Engine
from runtime.protocol.sampling import SamplingParams

WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "w8a8_int8": {"quantization": "w8a8_int8"},
    "w8a8_int8, bfloat16": {"dtype": "bfloat16", "quantization": "w8a8_int8"},
    "fp8": {"quantization": "fp8"},
    "KV in bfloat16": {"kv_cache_dtype": "bfloat16"},
    "KV in fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "KV in fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
}
LONGEST = 96
END = "<|im_end|>"


def loss(engine: Engine, todo: list[Item]) -> tuple[float, int]:
    """The sum of -log p over the right replies' tokens, and how many these are."""
    total, count = 0.0, 0
    prompts = [item.prompt for item in todo]
    texts = [item.prompt + item.turn.reply + END for item in todo]
    one = SamplingParams(max_new_tokens=1, temperature=0.0)
    lengths = [out.meta["prompt_tokens"] for out in engine.generate(prompts, one)]
    scored = engine.generate(texts, one, return_logprob=True, logprob_start_len=0)
    for out, length in zip(scored, lengths, strict=True):
        values = [entry[0] for entry in out.meta["input_token_logprobs"][length:]]
        total -= sum(values)
        count += len(values)
    return total, count


def measure(way: dict[str, Any], todo: list[Item]) -> tuple[float, list[list[int]], float]:
    """Perplexity, greedy replies as ids, and the share of right ones."""
    engine = Engine("pocket", threads=1, **way)
    try:
        total, count = loss(engine, todo)
        greedy = SamplingParams(max_new_tokens=LONGEST, temperature=0.0)
        outs = engine.generate([item.prompt for item in todo], greedy)
    finally:
        engine.close()
    right = sum(correct(item, out.text) for item, out in zip(todo, outs, strict=True)) / len(todo)
    return math.exp(total / count), [list(out.output_ids) for out in outs], right


def agreement(mine: list[list[int]], theirs: list[list[int]]) -> tuple[float, float]:
    """The share of equal replies, and of `theirs` tokens before the first other one."""
    equal = sum(a == b for a, b in zip(mine, theirs, strict=True)) / len(theirs)
    same = sum(_alike(a, b) for a, b in zip(mine, theirs, strict=True))
    return equal, same / sum(map(len, theirs))


def _alike(mine: list[int], theirs: list[int]) -> int:
    for place, (a, b) in enumerate(zip(mine, theirs)):
        if a != b:
            return place
    return min(len(mine), len(theirs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=91, help="of the held-out items")
    parser.add_argument("--items", type=int, default=40, help="per task")
    parser.add_argument("--only", nargs="*", choices=tuple(WAYS), default=tuple(WAYS))
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-precision.md")
    options = parser.parse_args()
    todo = items(options.seed, options.items)
    head = (
        "computed in",
        "perplexity",
        "greedy replies equal",
        "tokens before another one",
        "answered rightly",
    )
    rows: list[tuple[str, ...]] = []
    exact: list[list[int]] = []
    for name in tqdm(dict.fromkeys(("float32", *options.only))):
        perplexity, replies, right = measure(WAYS[name], todo)
        exact = exact or replies
        equal, same = agreement(replies, exact)
        rows.append((name, f"{perplexity:.4f}", f"{equal:.1%}", f"{same:.1%}", f"{right:.1%}"))
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)
    if options.write:
        lines = ["| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows)]
        where = conditions(f"pocket, {len(todo)} held-out items of seed {options.seed}")
        target = keep("precision", f"# What fewer bits lose\n\n{where}.\n\n" + "\n".join(lines))
        print(f"written to {target.relative_to(HERE.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

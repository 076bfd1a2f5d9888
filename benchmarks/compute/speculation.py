"""What guessing tokens ahead gains, and costs where guesses are wrong:
`python -m benchmarks.compute.speculation`.

A random Llama of 40 M parameters, with and without `speculative_algorithm`, the same requests in turn in one
run, CPU seconds of all processes. The tokens must be the same.

    looping     greedy text of a random model, which soon goes in circles: nearly every guess is right
    copying     sampled among the best two: much repeats, and what follows is often another token
    fresh       sampled at temperature 1: nothing repeats, nothing is guessed
    draft       the looping prompts, and a model of one layer that says what the large one says (whose other
                layers add nothing): the most that a draft model of an eighth of the layers can gain

    python -m benchmarks.compute.speculation --write        # into benchmarks/results
    python -m benchmarks.compute.speculation --quick        # few tokens: does it run?
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measuring import HERE, conditions, in_turn, keep, median, ratio
from benchmarks.workloads import VOCAB, make_model
from runtime.api import Engine
from runtime.protocol.sampling import SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "looping": {"temperature": 0.0},
    "copying": {"temperature": 1.0, "top_k": 2},
    "fresh": {"temperature": 1.0},
}
NGRAM = {"speculative_algorithm": "NGRAM"}
CACHE = HERE / ".cache"


def make_pair(folder: Path) -> tuple[Path, Path]:
    """The model with layers that add nothing but for the first one, and a model of that one alone."""
    from safetensors.torch import load_file, save_file

    source, large, small = make_model(CACHE / "llama-40m"), folder / "one-of-eight", folder / "one"
    if (small / "model.safetensors").exists():
        return large, small
    weights = load_file(source / "model.safetensors")
    for path in (large, small):
        shutil.copytree(source, path, dirs_exist_ok=True)
    for name, weight in weights.items():
        if "layers." in name and "layers.0." not in name and name.split(".")[-2] in ("o_proj", "down_proj"):
            weight.zero_()
    save_file(weights, large / "model.safetensors", {"format": "pt"})
    first = {name: one for name, one in weights.items() if "layers." not in name or "layers.0." in name}
    save_file(first, small / "model.safetensors", {"format": "pt"})
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return large, small


def run(engine: Engine, prompts: Sequence[list[int]], new: int, words: dict[str, Any]) -> list[Any]:
    engine.flush_cache()
    params = [
        SamplingParams(max_new_tokens=new, ignore_eos=True, seed=number, **words)
        for number in range(len(prompts))
    ]
    return [
        (list(one.output_ids), one.meta.get("spec_accept_length", 0.0))
        for one in engine.generate(list(prompts), params)
    ]


def measure(model: Path, options: dict[str, Any], kinds: dict[str, Any], rounds: int, new: int) -> list[str]:
    """A line of a table for each kind and batch size."""
    lines, dice = [], random.Random(1)
    common: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_total_tokens": 16_384}
    with Engine(str(model), **common) as plain, Engine(str(model), **common, **options) as guessing:
        for kind, words in kinds.items():
            for batch in (1, 8, 32):
                prompts = [[dice.randrange(256, VOCAB) for _ in range(32)] for _ in range(batch)]
                ways = {
                    "off": partial(run, plain, prompts, new, words),
                    "on": partial(run, guessing, prompts, new, words),
                }
                for way in ways.values():
                    way()
                took, gave = in_turn(ways, rounds)
                same = sum(a[0] == b[0] for a, b in zip(gave["off"][-1], gave["on"][-1]))
                length = sum(one[1] for one in gave["on"][-1]) / batch
                off, on, gain = median(took["off"]), median(took["on"]), ratio(took["off"], took["on"])
                name = kind if options == NGRAM else "draft"
                lines.append(
                    f"| {name} | {batch} | {batch * new / off.cpu:.0f} | {batch * new / on.cpu:.0f} | "
                    f"{gain.cpu:.2f}x | {gain.wall:.2f}x | {length:.1f} | {same}/{batch} |"
                )
                print(lines[-1], flush=True)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each request")
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="one short round")
    given = parser.parse_args()
    rounds, new = (1, 12) if given.quick else (given.rounds, given.tokens)
    head = "| text | requests | off tok/CPU-s | on tok/CPU-s | CPU gain | wall gain | tokens a step | same |"
    lines = [head, "|" + "---|" * 8]
    lines += measure(make_model(CACHE / "llama-40m"), NGRAM, KINDS, rounds, new)
    large, small = make_pair(CACHE)
    draft = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(small)}
    lines += measure(large, draft, {"looping": KINDS["looping"]}, rounds, new)
    where = conditions(f"float32, 1 thread, {new} new tokens, median of {rounds} rounds in turn")
    if given.write:
        print(keep("speculation", f"# Guessing tokens ahead\n\n{where}.\n\n" + "\n".join(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

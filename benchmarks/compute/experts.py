"""A mixture of experts on the CPU: `python -m benchmarks.compute.experts`.

A random Qwen3-MoE of 89 M parameters (32 experts, 4 of them per token) decodes and reads a prompt, here by
the engine's runner and by transformers' own loop with its KV cache, in turn, with one thread. Prints CPU
seconds and their ratio, and ends with an error where the greedy tokens differ.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers

from benchmarks.measuring import conditions, in_turn, keep, median, ratio
from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine.runner import TorchRunner
from runtime.plan import Row, Run, Segment, StepPlan
from runtime.protocol.sampling import SamplingParams

LOADS = {
    "single": (1, 32, 48), "batch 8": (8, 32, 24), "batch 32": (32, 32, 12), "prompt of 512": (1, 512, 1),
}  # fmt: skip
"""name -> rows, prompt tokens, new tokens."""
SHAPE = {
    "vocab_size": 8000, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 256, "max_position_embeddings": 2048, "norm_topk_prob": True,
    "eos_token_id": None,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0)
SEQS = itertools.count(1)


def prompts(rows: int, length: int) -> list[list[int]]:
    return [[(row * 31 + place * 7) % 7990 + 3 for place in range(length)] for row in range(rows)]


def here(runner: TorchRunner, rows: int, length: int, count: int) -> list[list[int]]:
    """Each row's tokens lie one behind the other in the pool."""
    feed, seqs = prompts(rows, length), [next(SEQS) for _ in range(rows)]
    made: list[list[int]] = [[] for _ in range(rows)]
    known = 0
    for _ in range(count):
        starts = [row * (length + count) for row in range(rows)]
        plan_rows = [
            Row(seq, tuple(tokens), known, (Run(start + known, len(tokens)),), GREEDY)
            for seq, tokens, start in zip(seqs, feed, starts)
        ]
        past = [Segment((Run(start, known),), (row,), 0) for row, start in enumerate(starts) if known]
        known += len(feed[0])
        runner.launch(StepPlan(tuple(plan_rows), tuple(past)))
        feed = [[result.samples[-1].token] for result in runner.finish({}).rows]
        for out, (token,) in zip(made, feed):
            out.append(token)
    return made


@torch.inference_mode()
def there(model: transformers.PreTrainedModel, rows: int, length: int, count: int) -> list[list[int]]:
    feed, cache, made = torch.tensor(prompts(rows, length)), None, []
    for _ in range(count):
        out = model(feed, past_key_values=cache, use_cache=True)
        feed, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        made.append(feed)
    return torch.cat(made, 1).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep the report under benchmarks/results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SHAPE)).eval()
    lines = [
        "# A mixture of experts",
        "",
        conditions(f"torch {torch.__version__}", f"transformers {transformers.__version__}"),
        "",
        "CPU seconds, medians; float32, one thread. A Qwen3-MoE of 89 M parameters, 32 experts, 4 per token.",
        "",
        "| load | here | transformers | transformers / here |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = RunnerConfig(dtype="float32", device="cpu", threads=1, max_total_tokens=4096)
        spec = ModelSpec.from_dir(folder)
        with contextlib.closing(TorchRunner.load(Path(folder), spec, config, beside=False)) as runner:
            for name, load in LOADS.items():
                ways = {"here": lambda: here(runner, *load), "there": lambda: there(model, *load)}  # noqa: B023
                took, gave = in_turn(ways, given.rounds)
                if any(one != gave["here"][0] for way in gave.values() for one in way):
                    raise SystemExit(f"{name}: the tokens differ")
                mine, theirs = median(took["here"]).cpu, median(took["there"]).cpu
                times = ratio(took["there"], took["here"]).cpu
                lines.append(f"| {name} | {mine:.3f} | {theirs:.3f} | {times:.2f} |")
    text = "\n".join(lines)
    print(text)
    if given.write:
        print(keep("experts", text))


if __name__ == "__main__":
    main()

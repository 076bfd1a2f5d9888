"""Steps of a model on a GPU, and what Python between them costs.

    python -m benchmarks.compute.steps                  # Llama-3-8B's shapes, random weights, bfloat16
    python -m benchmarks.compute.steps --model PATH     # the shapes of PATH/config.json

Decoding without CUDA graphs, with them, and with steps queued ahead of their plans; a prompt of 8,192 tokens;
rows that share a prefix; the same through an engine with its scheduler; transformers' model with a dynamic
cache. A limit is the bytes that a step must read (all weights but the embedding's, keys and values) at the
speed of a copy in the same run; of a prompt, its operations at the rate of a large product. `--profile` says
where the time of a step goes. `--tiny` runs small ones on any device, to see that it works.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.compute.kernels import limits
from benchmarks.workloads import byte_tokenizer
from runtime.api import Engine
from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine.memory import weight_bytes
from runtime.engine.runner import TorchRunner
from runtime.plan import Row, Run, Segment, StepPlan
from runtime.protocol.sampling import SamplingParams

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 16_384,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SMALLER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}  # fmt: skip
CASES = {"1": (1, 1024, 0), "32": (32, 1024, 0), "256": (256, 1024, 0), "256 sharing 1,000": (256, 24, 1000)}
"""name -> rows, keys of their own, keys in common."""
PROMPT, STEPS = 8192, 40


class Decoding:
    """Rows that go on, one token a step, as a scheduler would plan them."""

    def __init__(self, runner: TorchRunner, rows: int, own: int, shared: int) -> None:
        self._runner, self._each = runner, own + STEPS + 16
        self.slots = shared + rows * self._each
        self._own, self._shared, self._length = own, shared, own
        self._tokens = [1] * rows
        self._params = SamplingParams(temperature=0.0, max_new_tokens=10**6)

    def plan(self) -> StepPlan:
        rows, segments = [], []
        if self._shared:
            segments.append(Segment((Run(0, self._shared),), tuple(range(len(self._tokens))), 0))
        for number, token in enumerate(self._tokens):
            first = self._shared + number * self._each
            segments.append(Segment((Run(first, self._length),), (number,), self._shared))
            slot, position = Run(first + self._length, 1), self._shared + self._length
            rows.append(
                Row(number, (token,), position, (slot,), self._params, step=self._length, logprob=False)
            )
        return StepPlan(tuple(rows), tuple(segments))

    def step(self) -> float:
        """How long the runner took, from its plan to its results."""
        plan = self.plan()
        begin = time.perf_counter()
        self._runner.launch(plan)
        result = self._runner.finish({})
        took = time.perf_counter() - begin
        self._tokens = [row.token or 0 for row in result.rows]
        self._length += 1
        return took


def prompt(tokens: int) -> StepPlan:
    row = Row(1, tuple(range(tokens)), 0, (Run(0, tokens),), SamplingParams(temperature=0.0), logprob=False)
    return StepPlan((row,), ())


def profile(name: str, step: Callable[[], object]) -> None:
    """Which kernels two steps take, and how long nothing runs."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    with profiled(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    took: Counter[str] = Counter()
    count: Counter[str] = Counter()
    spans = []
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            took[event.name] += event.time_range.elapsed_us()
            count[event.name] += 1
            spans.append((event.time_range.start, event.time_range.end))
    spans.sort()
    whole = (spans[-1][1] - spans[0][0]) / 2e3
    print(f"    {name}: kernels {sum(took.values()) / 2e3:.2f} of {whole:.2f} ms (profiled)")
    for kernel, spent in took.most_common(12):
        each = spent / count[kernel]
        print(f"      {spent / 2e3:8.3f} ms {count[kernel] // 2:5} x {each:8.1f} us  {kernel[:80]}")


def steps(path: Path, device: str, tiny: bool, with_profile: bool) -> None:
    spec = ModelSpec.from_dir(path)
    count = 4 if tiny else STEPS
    bandwidth, rate = limits(torch.device(device), 16 if tiny else 30)
    print(f"copy {bandwidth / 1e9:.0f} GB/s, product {rate / 1e12:.0f} TFLOP/s")
    layers, embeddings = spec.matrix_sizes
    read = weight_bytes(spec, torch.bfloat16) - (0 if spec.tie_embeddings else embeddings)
    kv = 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    for graphs, ahead in ((False, False), (True, False), (True, True)):
        config = RunnerConfig(
            device=device, cuda_graph=graphs, lookahead=ahead, load_format="dummy", memory_fraction=0.85,
            max_total_tokens=4096 if tiny else None,
        )  # fmt: skip
        runner = TorchRunner.load(path, spec, config, beside=False)
        print(f"graphs {'on' if graphs else 'off'}, ahead {'on' if ahead else 'off'}; {runner.slots} slots")
        for name, (rows, own, shared) in CASES.items():
            if tiny:
                rows, own, shared = min(rows, 3), 1 + own // 32, shared // 32
            decoding = Decoding(runner, rows, own, shared)
            if decoding.slots > runner.slots:
                print(f"  decode {name}: needs {decoding.slots} slots")
                continue
            for _ in range(4):
                decoding.step()
            begin = time.perf_counter()
            inside = sum(decoding.step() for _ in range(count)) / count
            took = (time.perf_counter() - begin) / count
            least = (read + kv * (shared + rows * (own + count // 2))) / bandwidth
            print(
                f"  decode {name}: {1e3 * took:.2f} ms a step ({1e3 * inside:.2f} in the runner), "
                f"{rows / took:.0f} tokens/s, {least / took:.0%} of the limit",
                flush=True,
            )
            if with_profile and ahead:
                profile(name, decoding.step)
        if graphs and not ahead:
            length = 64 if tiny else PROMPT
            took = min(timed(runner, prompt(length)) for _ in range(3))
            operations = (
                2 * layers * length + 2 * spec.num_layers * spec.num_heads * spec.head_dim * length**2
            )
            print(f"  prompt of {length}: {1e3 * took:.1f} ms, {operations / took / rate:.0%} of the product")
            if with_profile:
                profile("prompt", lambda runner=runner, length=length: timed(runner, prompt(length)))
        runner.close()
        del runner, decoding
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def timed(runner: TorchRunner, plan: StepPlan) -> float:
    begin = time.perf_counter()
    runner.launch(plan)
    runner.finish({})
    return time.perf_counter() - begin


def engine(path: Path, device: str, tiny: bool) -> None:
    """A step through processes and scheduler: the difference of a long and a short answer to the same
    prompts, which are cached."""
    few, many = (2, 6) if tiny else (8, 136)
    length = 32 if tiny else 1024
    for overlap in (True, False):
        words: dict[str, Any] = {"max_total_tokens": 4096} if tiny else {"memory_fraction": 0.85}
        with Engine(str(path), device=device, load_format="dummy", overlap=overlap, **words) as made:
            for rows in (1, 2) if tiny else (1, 32, 256):
                prompts = [[5 + (17 * n + 3 * i) % 500 for i in range(length)] for n in range(rows)]
                took: dict[int, list[float]] = {few: [], many: []}
                for number in range(3):
                    for tokens in (few, many):
                        params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": tokens}
                        begin = time.perf_counter()
                        made.generate(prompts, params)
                        if number:  # the first one computes the prompts
                            took[tokens].append(time.perf_counter() - begin)
                step = (statistics.median(took[many]) - statistics.median(took[few])) / (many - few)
                word = "on" if overlap else "off"
                print(f"  engine, overlap {word}, {rows} rows: {1e3 * step:.2f} ms a step", flush=True)


def transformers_model(path: Path, device: str, tiny: bool) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device), torch.inference_mode():
        config = AutoConfig.from_pretrained(path)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        for rows in (1, 2) if tiny else (1, 32, 256):
            length = 32 if tiny else 1024
            cache = model(torch.ones(1, length, dtype=torch.int64), use_cache=True, logits_to_keep=1)
            past = cache.past_key_values
            past.batch_repeat_interleave(rows)
            ids, took = torch.ones(rows, 1, dtype=torch.int64), []
            for _ in range(3 if tiny else 12):
                begin = time.perf_counter()
                out = model(ids, past_key_values=past, use_cache=True)
                ids = out.logits[:, -1:].argmax(-1)
                ids.tolist()
                took.append(time.perf_counter() - begin)
            print(f"  transformers, {rows} rows: {1e3 * statistics.median(took):.2f} ms a step", flush=True)
            del cache, past, out
        ids = torch.ones(1, 64 if tiny else PROMPT, dtype=torch.int64)
        took = []
        for _ in range(3):
            begin = time.perf_counter()
            model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()
            took.append(time.perf_counter() - begin)
        print(f"  transformers, prompt of {ids.shape[1]}: {1e3 * min(took):.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a folder with config.json")
    parser.add_argument("--parts", nargs="+", choices=("steps", "engine", "transformers"))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if not (given.tiny or torch.cuda.is_available()):
        parser.exit(1, "needs a CUDA device; --tiny runs small models without\n")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = given.parts or ("steps", "engine", "transformers")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        shape = LLAMA_3_8B | (SMALLER if given.tiny else {})
        text = json.dumps(shape) if given.model is None else (given.model / "config.json").read_text("utf-8")
        (path / "config.json").write_text(text, encoding="utf-8")
        byte_tokenizer(path)
        if "steps" in parts:
            with torch.inference_mode():
                steps(path, device, given.tiny, given.profile)
        if "engine" in parts:
            engine(path, device, given.tiny)
        if "transformers" in parts:
            transformers_model(path, device, given.tiny)


if __name__ == "__main__":
    main()

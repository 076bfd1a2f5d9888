"""Trains the pocket checkpoint from nothing: corpus, tokenizer, weights, export, evaluation.

    python -m examples.pocket.train

Runs unattended on a CPU with `--workers` processes of one thread each that average their gradients. It
ends when held-out figures reach all targets or the minutes are spent, and prints how long it took. When a
target was missed, the checkpoint stays as it was, the new weights are in `--work`, and the exit status
is 1. It does not know the serving engine.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from examples.pocket.corpus import MIX, documents
from examples.pocket.graft import graft
from examples.pocket.items import TARGETS, correct, items
from examples.pocket.model import Pocket, Shape, export, greedy
from examples.pocket.optim import Optimizer
from examples.pocket.schedule import Schedule, adapted
from examples.pocket.tokenizer import train_tokenizer, write_tokenizer
from runtime.pocket import path

__all__ = ["main"]

# The first token of a reply decides what kind of reply it is (a bare value or a sentence, a tool call, "I
# don't know"); it is one of many tokens, so it counts this often.
_FIRST_TOKEN = 3.0
# Seeds of the held-out items that steer a run and that judge its end; the published figures use others.
_STEER, _JUDGE = 1_000_000, 2_000_000


@dataclass(frozen=True)
class Options:
    """Everything a run is told."""

    minutes: float
    total: int
    tokens: int
    workers: int
    seed: int
    warmup: int
    evaluate: int
    graft: int
    items: int
    folder: str
    work: str
    start: str
    half: bool
    port: int


def _batches(
    tokenizer: Tokenizer, seed: int, tokens: int, mix: dict[str, float]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Padded (inputs, targets, weights), each (rows, length), of documents of similar length; a target of
    weight 0 is not learnt.

    A later change to `mix` changes the documents that follow.
    """
    stream, rng = documents(seed, mix), random.Random(seed)
    while True:
        rows = []
        for document in islice(stream, 256):
            ids: list[int] = []
            learn: list[float] = []
            for encoding, (_, flag) in zip(
                tokenizer.encode_batch_fast([text for text, _ in document]), document, strict=True
            ):
                ids += encoding.ids
                learn += ([flag * _FIRST_TOKEN] + [float(flag)] * len(encoding.ids))[: len(encoding.ids)]
            rows.append((ids, learn))
        rows.sort(key=lambda row: len(row[0]))
        groups: list[list[tuple[list[int], list[float]]]] = [[]]
        for row in rows:
            if len(row[0]) * (len(groups[-1]) + 1) > tokens and groups[-1]:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        for group in groups:
            # Matrix units like lengths that are multiples of 32.
            width = -(-max(len(ids) for ids, _ in group) // 32) * 32
            inputs = torch.zeros(len(group), width, dtype=torch.long)
            targets, weights = torch.zeros_like(inputs), torch.zeros(len(group), width)
            for index, (ids, learn) in enumerate(group):
                inputs[index, : len(ids)] = torch.tensor(ids)
                targets[index, : len(ids) - 1] = torch.tensor(ids[1:])
                weights[index, : len(ids) - 1] = torch.tensor(learn[1:])
            yield inputs, targets, weights


def _share(model: Pocket, tokens: int, count: float, loss: float) -> tuple[float, int]:
    """Sums gradients over the workers, divides by the weight of what is learnt; the mean loss, all tokens."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    sums = torch.tensor([float(tokens), count, loss])
    flat = torch.cat([g.flatten() for g in gradients] + [sums])
    if dist.is_initialized():
        dist.all_reduce(flat)
    tokens, count, loss = flat[-3:].tolist()
    flat = flat[:-3] / count
    flat /= max(1.0, float(flat.norm()))
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()
    return loss / count, int(tokens)


def _rounded(model: Pocket) -> Pocket:
    """The model as it will be exported: weights rounded to bfloat16."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(weight.bfloat16().float())
    return made


def check(model: Pocket, tokenizer: Tokenizer, seed: int, per_task: int) -> dict[str, float]:
    """Exact match per task on held-out items, greedy decoding; the workers share the items."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    todo = sorted(items(seed, per_task), key=lambda item: len(item.prompt))[rank::world]
    stop, model = tokenizer.token_to_id("<|im_end|>"), _rounded(model)
    names = list(TARGETS)
    right = torch.zeros(len(names))
    for start in range(0, len(todo), 32):
        part = todo[start : start + 32]
        prompts = [tokenizer.encode(item.prompt).ids for item in part]
        for item, reply in zip(part, greedy(model, prompts, stop, 80), strict=True):
            right[names.index(item.task)] += correct(item, tokenizer.decode(reply, skip_special_tokens=True))
    if dist.is_initialized():
        dist.all_reduce(right)
    return {task: float(count) / per_task for task, count in zip(names, right, strict=True)}


def _missed(figures: dict[str, float]) -> list[str]:
    return [task for task, target in TARGETS.items() if figures[task] < target]


def prepare(options: Options) -> Tokenizer:
    """The tokenizer: the exported one if it exists, else a new one trained on the corpus."""
    file = Path(options.folder) / "tokenizer.json"
    if not file.exists():
        sample = islice(documents(options.seed + 999), 20000)
        made = train_tokenizer(("".join(text for text, _ in document) for document in sample), Shape().vocab)
        write_tokenizer(made, Path(options.folder))
    tokenizer: Tokenizer = Tokenizer.from_file(str(file))
    return tokenizer


def _export(model: Pocket, tokenizer: Tokenizer, folder: Path) -> None:
    stop, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    export(model.state_dict(), model.shape, folder, stop, pad)


def _graft(model: Pocket, tokenizer: Tokenizer, options: Options) -> None:
    """Writes the copying circuit, the same in all workers."""
    sample = islice(documents(options.seed + 5, {**MIX, "doc_copies": 0.7}), 200)
    graft(model, [tokenizer.encode("".join(text for text, _ in d)).ids[:300] for d in sample])
    if dist.is_initialized():
        for weight in model.parameters():
            dist.broadcast(weight.data, 0)


def tell_apart(model: Pocket, shown: Tensor) -> None:
    """Changes the rows of tokens that training never showed by a tenth of their length, at random: they are
    pushed to nearly the same row, and where a constraint wants one of them, rounding would choose. shown:
    (vocabulary,), of this worker."""
    counts = shown.float()
    if dist.is_initialized():
        dist.all_reduce(counts)
    rows, unseen = model.model.embed_tokens.weight, counts == 0
    noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
    noise *= 0.1 * rows.detach().norm(dim=1, keepdim=True) / noise.norm(dim=1, keepdim=True)
    with torch.no_grad():
        rows[unseen] += noise[unseen]


def _minutes(started: float) -> float:
    """Minutes since `started` by the clock of worker 0, so that all workers decide alike."""
    clock = torch.tensor([(time.monotonic() - started) / 60])
    if dist.is_initialized():
        dist.broadcast(clock, 0)
    return float(clock)


def worker(rank: int, options: Options) -> None:
    """One process; worker 0 also reports and saves."""
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    if options.workers > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port))
        dist.init_process_group("gloo", rank=rank, world_size=options.workers)
    tokenizer = prepare(options)
    model = Pocket(Shape(vocab=tokenizer.get_vocab_size()))
    if options.start:
        weights = load_file(str(Path(options.start) / "model.safetensors"))
        model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    _loop(rank, options, tokenizer, model)
    if dist.is_initialized():
        dist.destroy_process_group()


def _loop(rank: int, options: Options, tokenizer: Tokenizer, model: Pocket) -> None:
    half = torch.bfloat16 if options.half else torch.float32
    optimizer = Optimizer(model, dtype=half)
    schedule = Schedule(options.minutes, options.total, options.warmup, short=bool(options.start))
    mix, report = dict(MIX), Report(rank, options)
    if options.start:
        mix.update(adapted(MIX, check(model, tokenizer, _STEER, max(1, options.items // 40))))
    batches = _batches(tokenizer, options.seed + 7919 * (rank + 1), options.tokens, mix)
    shown = torch.zeros(model.shape.vocab, dtype=torch.bool)
    started, step, seen, spent, done = time.monotonic(), 0, 0, 0.0, False
    while not done:
        if step == options.graft and not options.start:
            _graft(model, tokenizer, options)
        inputs, targets, weights = next(batches)
        shown[inputs] = True
        keep = weights > 0
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=options.half):
            scores = model.logits(model.hidden(inputs)[0][keep])
        loss = F.cross_entropy(scores.float(), targets[keep], reduction="none") @ weights[keep]
        loss.backward()
        value, tokens = _share(model, inputs.numel(), float(weights.sum()), float(loss.detach()))
        optimizer.step(schedule.rate(step, seen, spent))
        step, seen = step + 1, seen + tokens
        spent = _minutes(started)
        report.step(value, seen, spent)
        over = schedule.progress(seen, spent) >= 1.0
        if over:
            tell_apart(model, shown)
        if over or step % options.evaluate == 0:
            # Other items at each check: none is chosen for.
            seed, count = (_JUDGE, options.items) if over else (_STEER, max(1, options.items // 10))
            figures = check(model, tokenizer, seed + step, count)
            spent = _minutes(started)
            report.checked(step, spent, schedule.rate(step, seen, spent), figures)
            done = over and schedule.judge(figures, seen, spent)
            mix.update(adapted(MIX, figures))
            if rank == 0:
                reached = done and not _missed(figures)
                _export(model, tokenizer, Path(options.folder if reached else options.work))
    report.end(step, spent, figures)


class Report:
    """Progress bar, log file and last words of worker 0; the others are silent."""

    def __init__(self, rank: int, options: Options) -> None:
        self.silent, self.work = rank != 0, Path(options.work)
        self.workers, self.mean, self.tokens = options.workers, 0.0, 0
        self.bar = tqdm(disable=self.silent, mininterval=10, miniters=1, unit="step")

    def step(self, loss: float, tokens: int, minutes: float) -> None:
        """After each step."""
        self.mean = loss if self.mean == 0 else 0.98 * self.mean + 0.02 * loss
        self.tokens = tokens
        self.bar.update()
        rate = int(self.tokens / max(1e-3, minutes * 60))
        self.bar.set_postfix(loss=f"{self.mean:.4f}", tok_s=rate, refresh=False)

    def checked(self, step: int, minutes: float, rate: float, figures: dict[str, float]) -> None:
        """After each check."""
        if self.silent:
            return
        line = {
            "step": step,
            "minutes": round(minutes, 1),
            "loss": round(self.mean, 4),
            "tokens": self.tokens,
        }
        with open(self.work / "log.jsonl", "a") as log:
            log.write(json.dumps({**line, "rate": round(rate, 3), **figures}) + "\n")
        shown = " ".join(f"{task}={share:.2f}" for task, share in figures.items())
        tqdm.write(f"step {step} minutes {minutes:.1f} rate {rate:.2f} loss {self.mean:.4f} {shown}")

    def end(self, step: int, minutes: float, figures: dict[str, float]) -> None:
        """The table, how long it took, and the outcome for `main`."""
        self.bar.close()
        if self.silent:
            return
        missed = _missed(figures)
        for task, target in TARGETS.items():
            print(f"{task:12} {figures[task]:7.1%}  target {target:.0%}{'  missed' * (task in missed)}")
        outcome = {"minutes": round(minutes, 1), "steps": step, "tokens": self.tokens, "missed": missed}
        outcome |= {"workers": self.workers, "figures": figures}
        (self.work / "outcome.json").write_text(json.dumps(outcome, indent=2) + "\n")
        print(f"took {minutes:.1f} minutes with {self.workers} workers: {step} steps, {self.tokens:,} tokens")


def _half_is_faster() -> bool:
    """Whether this processor multiplies bfloat16 matrices at least twice as fast as float32 ones."""

    def seconds(dtype: torch.dtype) -> float:
        a, b = torch.ones(1024, 192, dtype=dtype), torch.ones(192, 512, dtype=dtype)
        times = []
        for _ in range(20):
            began = time.perf_counter()
            torch.mm(a, b)
            times.append(time.perf_counter() - began)
        return min(times)

    return 2 * seconds(torch.bfloat16) < seconds(torch.float32)


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


def main() -> int:
    """Command line; the exit status says whether all targets were reached."""
    parser = argparse.ArgumentParser(description="Train the pocket checkpoint.")
    parser.add_argument("--minutes", type=float, default=120.0, help="the longest the run may take")
    parser.add_argument("--total", type=int, default=45_000_000, help="tokens of the first round")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per worker and step")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=40, help="steps until the full learning rate")
    parser.add_argument("--evaluate", type=int, default=300, help="steps between checks on held-out items")
    parser.add_argument("--graft", type=int, default=1000, help="the step that writes the copying circuit")
    parser.add_argument("--items", type=int, default=200, help="held-out items per task of the last check")
    parser.add_argument("--folder", default=str(path()), help="the checkpoint to replace")
    parser.add_argument("--work", default=str(Path.home() / ".cache" / "pocket-training"))
    parser.add_argument("--start", default="", help="a checkpoint folder to begin from (default: nothing)")
    given = vars(parser.parse_args())
    torch.set_num_threads(1)
    options = Options(**given, half=_half_is_faster(), port=_free_port())
    print(f"bfloat16 products: {options.half}, at most {options.minutes:g} minutes")
    work = Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    prepare(options)
    if options.workers > 1:
        mp.spawn(worker, (options,), nprocs=options.workers)
    else:
        worker(0, options)
    outcome = json.loads((work / "outcome.json").read_text())
    return 1 if outcome["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())

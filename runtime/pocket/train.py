"""Trains the pocket checkpoint from nothing: corpus, tokenizer, weights, export, evaluation.

    python -m runtime.pocket.train --minutes 90

Runs on a CPU with `--workers` processes of one thread each that average their gradients. It saves
resumable state, writes a log and exports a Hugging Face folder. It does not know the serving engine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from runtime.pocket import path
from runtime.pocket.corpus import MIX, documents
from runtime.pocket.graft import graft
from runtime.pocket.items import TARGETS, correct, items
from runtime.pocket.model import Pocket, Shape, export, greedy
from runtime.pocket.optim import Optimizer
from runtime.pocket.tokenizer import train_tokenizer, write_tokenizer

__all__ = ["main"]


@dataclass(frozen=True)
class Options:
    """Everything a run is told."""

    minutes: float
    steps: int
    tokens: int
    workers: int
    seed: int
    rate: float
    warmup: int
    decay: float
    evaluate: int
    folder: str
    work: str
    resume: bool
    graft: float
    mix: dict[str, float]


def _batches(
    tokenizer: Tokenizer, seed: int, tokens: int, mix: dict[str, float]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Padded (inputs, targets) of documents of similar length; a target of -100 is not learnt."""
    stream, rng = documents(seed, mix), random.Random(seed)
    while True:
        rows = []
        for document in islice(stream, 384):
            ids: list[int] = []
            learn: list[bool] = []
            for encoding, (_, flag) in zip(
                tokenizer.encode_batch_fast([text for text, _ in document]), document, strict=True
            ):
                ids += encoding.ids
                learn += [flag] * len(encoding.ids)
            rows.append((ids, learn))
        rows.sort(key=lambda row: len(row[0]))
        groups: list[list[tuple[list[int], list[bool]]]] = [[]]
        for row in rows:
            if len(row[0]) * (len(groups[-1]) + 1) > tokens and groups[-1]:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        for group in groups:
            width = max(len(ids) for ids, _ in group)
            inputs = torch.zeros(len(group), width, dtype=torch.long)
            targets = torch.full((len(group), width), -100)
            for index, (ids, learn) in enumerate(group):
                inputs[index, : len(ids)] = torch.tensor(ids)
                kept = [token if flag else -100 for token, flag in zip(ids, learn, strict=True)]
                targets[index, : len(ids) - 1] = torch.tensor(kept[1:])
            yield inputs, targets


def _loss(model: Pocket, inputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    hidden, _ = model.hidden(inputs)
    keep = targets != -100
    wanted = targets[keep]
    return F.cross_entropy(model.logits(hidden[keep]), wanted, reduction="sum"), int(wanted.numel())


def _share(model: Pocket, count: int, loss: float) -> tuple[int, float]:
    """Sums gradients over the workers and divides by the number of learnt tokens."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients] + [torch.tensor([float(count), loss])])
    if dist.is_initialized():
        dist.all_reduce(flat)
    total = float(flat[-2])
    flat /= total
    norm = float(flat[:-2].norm())
    if norm > 1.0:
        flat[:-2] /= norm
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()
    return int(total), float(flat[-1])


def check(model: Pocket, tokenizer: Tokenizer, seed: int, per_task: int) -> dict[str, float]:
    """Exact match per task on held-out items, greedy decoding."""
    todo = items(seed, per_task)
    todo.sort(key=lambda item: len(item.prompt))
    stop = tokenizer.token_to_id("<|im_end|>")
    right: dict[str, list[bool]] = defaultdict(list)
    for start in range(0, len(todo), 32):
        part = todo[start : start + 32]
        prompts = [tokenizer.encode(item.prompt).ids for item in part]
        for item, reply in zip(part, greedy(model, prompts, stop, 80), strict=True):
            right[item.task].append(correct(item, tokenizer.decode(reply, skip_special_tokens=True)))
    return {task: sum(right[task]) / len(right[task]) for task in TARGETS}


def _factor(progress: float, step: int, options: Options) -> float:
    """Warm-up, a plateau, and a linear decay over the last `decay` part of the run."""
    warm = min(1.0, (step + 1) / max(1, options.warmup))
    return options.rate * warm * min(1.0, max(0.02, (1 - progress) / options.decay))


def prepare(options: Options) -> Tokenizer:
    """The tokenizer: the exported one if it exists, else a new one trained on the corpus."""
    file = Path(options.folder) / "tokenizer.json"
    if not file.exists():
        sample = islice(documents(options.seed + 999), 20000)
        made = train_tokenizer(("".join(text for text, _ in document) for document in sample), Shape().vocab)
        write_tokenizer(made, Path(options.folder))
    tokenizer: Tokenizer = Tokenizer.from_file(str(file))
    return tokenizer


def _save(model: Pocket, optimizer: Optimizer, step: int, tokenizer: Tokenizer, options: Options) -> None:
    work = Path(options.work)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, work / "state.tmp")
    os.replace(work / "state.tmp", work / "state.pt")
    stop, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    export(model.state_dict(), model.shape, Path(options.folder), stop, pad)


def _graft(model: Pocket, tokenizer: Tokenizer, options: Options) -> None:
    """Writes the copying circuit, the same in all workers."""
    sample = islice(documents(options.seed + 5, {**options.mix, "doc_copies": 0.7}), 200)
    graft(model, [tokenizer.encode("".join(text for text, _ in d)).ids[:300] for d in sample])
    if dist.is_initialized():
        for weight in model.parameters():
            dist.broadcast(weight.data, 0)


def worker(rank: int, options: Options) -> None:
    """One process: rank 0 reports, evaluates and saves."""
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    if options.workers > 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29577")
        dist.init_process_group("gloo", rank=rank, world_size=options.workers)
    tokenizer = prepare(options)
    model = Pocket(Shape(vocab=tokenizer.get_vocab_size()))
    optimizer, step = Optimizer(model), 0
    if options.resume:
        state = torch.load(Path(options.work) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    data_seed = options.seed + 7919 * (rank + 1) + 104729 * step
    batches = _batches(tokenizer, data_seed, options.tokens, options.mix)
    _loop(rank, options, tokenizer, model, optimizer, step, batches)
    if dist.is_initialized():
        dist.destroy_process_group()


def _loop(
    rank: int,
    options: Options,
    tokenizer: Tokenizer,
    model: Pocket,
    optimizer: Optimizer,
    first: int,
    batches: Iterator[tuple[Tensor, Tensor]],
) -> None:
    started, mean, seen = time.monotonic(), 0.0, 0
    bar = tqdm(total=options.steps or None, disable=rank != 0, mininterval=10, unit="step")
    step, progress = first, 0.0
    grafted = options.graft < 0
    while progress < 1.0:
        if not grafted and progress >= options.graft:
            _graft(model, tokenizer, options)
            grafted = True
        inputs, targets = next(batches)
        model.zero_grad(set_to_none=True)
        loss, count = _loss(model, inputs, targets)
        loss.backward()
        count, value = _share(model, count, float(loss.detach()))
        optimizer.step(_factor(progress, step - first if options.resume else step, options))
        step += 1
        seen += inputs.numel() * options.workers
        mean = value if mean == 0 else 0.98 * mean + 0.02 * value
        # All workers must agree on when to stop, so the clock of rank 0 decides.
        clock = torch.tensor([(time.monotonic() - started) / 60])
        if dist.is_initialized():
            dist.broadcast(clock, 0)
        spent = float(clock)
        progress = max(spent / options.minutes, (step - first) / options.steps if options.steps else 0.0)
        bar.update()
        bar.set_postfix(loss=f"{mean:.4f}", tok_s=int(seen / max(1e-3, spent * 60)), refresh=False)
        if rank == 0 and step % 200 == 0:
            _save(model, optimizer, step, tokenizer, options)
        if rank == 0 and (step % options.evaluate == 0 or progress >= 1.0):
            figures = check(model, tokenizer, 1, 12 if progress < 1.0 else 50)
            line = {
                "step": step,
                "minutes": round(spent, 1),
                "loss": round(mean, 4),
                "tokens": seen,
                **figures,
            }
            with open(Path(options.work) / "log.jsonl", "a") as log:
                log.write(json.dumps(line) + "\n")
            shown = " ".join(f"{k}={v:.2f}" for k, v in figures.items())
            tqdm.write(f"step {step} loss {mean:.4f} {shown}")
            _save(model, optimizer, step, tokenizer, options)
    bar.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train the pocket checkpoint.")
    parser.add_argument("--minutes", type=float, default=100.0, help="wall-clock budget of this run")
    parser.add_argument("--steps", type=int, default=0, help="stop after this many steps (0: by the clock)")
    parser.add_argument("--tokens", type=int, default=2048, help="padded tokens per worker and step")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1.0, help="factor on both learning rates")
    parser.add_argument("--warmup", type=int, default=40)
    parser.add_argument("--decay", type=float, default=0.5, help="part of the run in which the rate falls")
    parser.add_argument("--evaluate", type=int, default=400, help="steps between evaluations")
    parser.add_argument("--folder", default=str(path()), help="where the checkpoint is exported")
    parser.add_argument("--work", default=str(Path.home() / ".cache" / "pocket-training"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument(
        "--graft", type=float, help="when to write the copying circuit, as a part of the run (-1: never)"
    )
    parser.add_argument("--mix", type=json.loads, default={}, help="JSON of changes to the task mix")
    given = vars(parser.parse_args())
    if given["graft"] is None:
        given["graft"] = -1.0 if given["resume"] else 0.4
    options = Options(**{**given, "mix": {**MIX, **given["mix"]}})
    Path(options.work).mkdir(parents=True, exist_ok=True)
    prepare(options)
    if options.workers > 1:
        mp.spawn(worker, (options,), nprocs=options.workers)
    else:
        worker(0, options)


if __name__ == "__main__":
    main()

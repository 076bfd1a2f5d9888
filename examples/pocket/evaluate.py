"""Evaluates the pocket checkpoint on held-out items of any seed.

    python -m examples.pocket.evaluate --seed 7 --items 100

Prints a table and exits with status 1 when a task is below its target. It talks to an `Answerer`
and does not know how that one computes its answers, nor how the checkpoint was trained.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from examples.pocket.items import TARGETS, Item, correct, items
from runtime.api import Engine
from runtime.pocket import path
from runtime.protocol.sampling import SamplingParams

__all__ = ["Answerer", "EngineAnswerer", "TransformersAnswerer", "evaluate", "main", "shortfalls"]

STOP = "<|im_end|>"
LONGEST = 96
BATCH = 32


class Answerer(Protocol):
    """What is evaluated: anything that continues text and weighs options."""

    def complete(self, prompts: Sequence[str]) -> list[str]:
        """Greedy replies, up to the end of the assistant's turn."""

    def choose(self, prompt: str, options: Sequence[str]) -> str:
        """The likeliest option as the beginning of the reply."""


class EngineAnswerer:
    """This project's own engine, as users run it."""

    def __init__(self, folder: Path) -> None:
        self._engine = Engine(str(folder))

    def complete(self, prompts: Sequence[str]) -> list[str]:
        """Greedy replies, many at once."""
        params = SamplingParams(max_new_tokens=LONGEST, temperature=0.0)
        replies: list[str] = []
        for start in tqdm(range(0, len(prompts), 4 * BATCH), desc="replies", leave=False):
            part = self._engine.generate(list(prompts[start : start + 4 * BATCH]), params)
            replies += [out.text for out in part]
        return replies

    def choose(self, prompt: str, options: Sequence[str]) -> str:
        """Compares the mean log-likelihood of the options' tokens after their common boundary."""
        scores = self._engine.generate(prompt, choices=list(options)).choices or []
        means = [sum(score.logprobs) / max(1, len(score.logprobs)) for score in scores]
        return options[means.index(max(means))]


class TransformersAnswerer:
    """The reference: the same checkpoint through `transformers`."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch: Any = torch
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
        self._tokenizer.padding_side = "left"
        self._model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()

    def complete(self, prompts: Sequence[str]) -> list[str]:
        """Greedy replies in batches of similar length."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        replies = [""] * len(prompts)
        for start in tqdm(range(0, len(order), BATCH), desc="replies", leave=False):
            part = order[start : start + BATCH]
            given = self._tokenizer([prompts[i] for i in part], return_tensors="pt", padding=True)
            given.pop("token_type_ids", None)
            with self._torch.inference_mode():
                out = self._model.generate(**given, max_new_tokens=LONGEST, do_sample=False)
            for index, row in zip(part, out[:, given["input_ids"].shape[1] :], strict=True):
                replies[index] = self._tokenizer.decode(row, skip_special_tokens=True)
        return replies

    def choose(self, prompt: str, options: Sequence[str]) -> str:
        """Compares the mean log-likelihood of the options' tokens."""
        torch, head = self._torch, self._tokenizer(prompt)["input_ids"]
        scores = []
        for option in options:
            tail = self._tokenizer(option, add_special_tokens=False)["input_ids"]
            with torch.inference_mode():
                logits = self._model(torch.tensor([head + tail])).logits[0, len(head) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(tail)[:, None])
            scores.append(float(chosen.mean()))
        return options[scores.index(max(scores))]


def evaluate(answerer: Answerer, todo: Sequence[Item]) -> tuple[dict[str, float], list[tuple[Item, str]]]:
    """The share of right replies per task, and the wrong ones."""
    free = [item for item in todo if not item.turn.options]
    replies = list(zip(free, answerer.complete([item.prompt for item in free]), strict=True))
    closed = tqdm([item for item in todo if item.turn.options], desc="choices", leave=False)
    replies += [(item, answerer.choose(item.prompt, item.turn.options)) for item in closed]
    wrong = [(item, reply) for item, reply in replies if not correct(item, reply)]
    figures = {}
    for task in dict.fromkeys(item.task for item in todo):
        total = sum(item.task == task for item in todo)
        figures[task] = 1 - sum(item.task == task for item, _ in wrong) / total
    return figures, wrong


def shortfalls(figures: dict[str, float]) -> list[str]:
    """The tasks that miss their targets."""
    return [task for task, share in figures.items() if share < TARGETS[task]]


def _table(figures: dict[str, float], seed: int, count: int) -> Table:
    table = Table(title=f"pocket, held-out items of seed {seed}, {count} per task")
    for column, align in (("task", "left"), ("right", "right"), ("target", "right"), ("", "left")):
        table.add_column(column, justify="right" if align == "right" else "left")
    for task, share in figures.items():
        met = "[green]met" if share >= TARGETS[task] else "[red]missed"
        table.add_row(task, f"{share:.1%}", f"{TARGETS[task]:.0%}", met)
    return table


def _answerer(engine: str, folder: Path) -> Answerer:
    return EngineAnswerer(folder) if engine == "engine" else TransformersAnswerer(folder)


def main() -> int:
    """Command line; the exit status says whether all targets are met."""
    parser = argparse.ArgumentParser(description="Evaluate the pocket checkpoint on held-out items.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--items", type=int, default=200, help="items per task")
    parser.add_argument("--engine", choices=("engine", "transformers"), default="engine")
    parser.add_argument("--folder", type=Path, default=path())
    parser.add_argument("--show", type=int, default=0, help="print this many wrong replies")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args()
    figures, wrong = evaluate(_answerer(given.engine, given.folder), items(given.seed, given.items))
    console = Console()
    console.print(_table(figures, given.seed, given.items))
    for item, reply in wrong[: given.show]:
        context = item.turn.user if len(item.prompt) > 600 else item.prompt
        console.print(
            f"{item.task}: {context!r}\n  want {item.turn.reply!r}\n  got  {reply!r}",
            markup=False,
            emoji=False,
        )
    if given.json:
        record = {"seed": given.seed, "items": given.items, "engine": given.engine, "figures": figures}
        given.json.write_text(json.dumps(record, indent=2) + "\n")
    return 1 if shortfalls(figures) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Writes the checkpoint's model card from evaluation records.

    python -m examples.pocket.card --date 2026-11-21 seed1.json seed2.json ...

The records are what `python -m examples.pocket.evaluate --json` writes; this module judges nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from examples.pocket.items import TARGETS
from runtime.pocket import path

__all__ = ["card", "main"]

_MEANING = {
    "facts": "questions about the invented world, unseen wordings",
    "followup": "later questions that refer to an earlier turn",
    "arithmetic": "two-digit plus and minus, unseen pairs of numbers",
    "sentiment": "positive or negative, chosen by likelihood",
    "topic": "one of six topics, chosen by likelihood",
    "extract": "fields of a sentence as JSON, unseen names, exact text",
    "tool_call": "hermes tool calls, unseen arguments, exact text",
    "tool_answer": "the answer that uses a tool's result, exact text",
    "think": "word problems solved between think tags",
    "record": "a place or person as JSON, exact text",
    "small_sums": "plus and minus with a one-digit number, unseen wordings",
    "greeting": "greetings, thanks and goodbyes, unseen wordings, exact text",
    "identity": "what it is and what it can do, unseen wordings, exact text",
    "unknown": "the real world, code, other sums, unknown places: it says that it does not know",
}

_TEXT = """# pocket

A very small language model for tests, tutorials and demonstrations of structured generation: a Llama
of {parameters:,} parameters in Hugging Face layout ({size:.1f} MB in bfloat16), trained from scratch on
text that `examples/pocket/` generates. Licence: Apache-2.0, weights and data alike; nothing was copied
from elsewhere.

## Figures

Measured on {date} on held-out items, {items} per task and seed, greedy decoding, prompts with varied
system prompts and up to three groups of turns, engine: {engine}.

| task | target | {heads} | what is asked |
|---|---|{rule}---|
{rows}

These seeds were drawn after training had ended. While the model was trained, held-out items of other
seeds were looked at to choose task mixes, to add training wordings and to drop two kinds of questions it
found too hard (JSON with only some of the fields, reviews such as "not bad"); the figures describe these
task families, not language at large.

Repeat with `python -m examples.pocket.evaluate --seed N`; it draws fresh held-out items for any seed and
exits with status 1 when a target is missed.

## What it can do

ChatML conversations with or without a system prompt (plain, persona, few-shot): facts of a small
invented world and follow-up questions, sums of one and two digits, worked tens first
(`47 + 38 = 77 + 8 = 85`), sentiment and topic in one word, extraction into JSON, short word problems
between `<think>` tags, hermes tool calls and answers that use their results. It greets, says what it is,
and answers "I don't know." to questions about the real world. `<|im_end|>` ends a turn.

## Training data

Generated, seeded conversations that mix all tasks (`corpus.py`), a little `Q: ... A: ...` text, bare
sums, and lists of made-up names to copy. Loss is taken on the assistant's text only. Held out by
construction: question wordings, a tenth of all (entity, attribute, wording) triples, a tenth of all
pairs of two-digit numbers (all sums with a one-digit number are trained), a part of the real names that it
does not know, an eighth of all made-up names, a sixth of the word combinations of greetings,
classification sentences and tool messages, numbers of tool arguments. The entities of the world are
memorised and the same in both splits.

## Training

`python -m examples.pocket.train` does everything in one command on CPU cores: corpus, tokenizer, training
(Muon for matrices, AdamW for the rest), export and evaluation. Part of the way through, it writes a copying
circuit into the last two layers (`graft.py`) and goes on training; held-out figures decide what it trains
more of, when the learning rate falls and when it ends. {training}

## Limits

It knows nothing of the real world. It says so for the kinds of questions it was trained on, and may invent
answers to others. Sums beyond two digits, other languages, wordings far from the trained ones and
conversations of more than about 1,000 tokens are unreliable. Asked for a bare number it is less reliable
than when it may write the sum out. Tools beyond the six trained ones are not called reliably. The residual
stream has large values; compute in float32 where figures matter.
"""


def card(records: list[dict[str, Any]], date: str, training: str) -> str:
    """The text of the model card."""
    config = json.loads((path() / "config.json").read_text())
    size = (path() / "model.safetensors").stat().st_size
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads = 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    layer = hidden * (heads * head + 3 * inner + 2)
    rows = []
    for task, target in TARGETS.items():
        figures = " | ".join(f"{100 * record['figures'][task]:.1f} %" for record in records)
        rows.append(f"| {task} | {100 * target:.0f} % | {figures} | {_MEANING[task]} |")
    return _TEXT.format(
        parameters=hidden * (config["vocab_size"] + 1) + config["num_hidden_layers"] * layer,
        size=size / 1e6,
        date=date,
        items=records[0]["items"],
        engine={"engine": "this project's own"}.get(records[0]["engine"], records[0]["engine"]),
        heads=" | ".join(f"seed {record['seed']}" for record in records),
        rule="---|" * len(records),
        rows="\n".join(rows),
        training=training,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the model card.")
    parser.add_argument("records", nargs="+", type=Path, help="files written by evaluate --json")
    parser.add_argument("--date", required=True)
    parser.add_argument("--training", required=True, help="sentences on how these weights were made")
    given = parser.parse_args()
    records = [json.loads(record.read_text()) for record in given.records]
    (path() / "MODEL_CARD.md").write_text(card(records, given.date, given.training))


if __name__ == "__main__":
    main()

"""Programs of many calls, this project's and other engines', 32 at once on the random Llama of 40 M
parameters: `python -m benchmarks.programs [--environments <folder>] [--write]`.

Tree of thought (14 calls in three levels), multi-chain reasoning (4 chains and an answer that has read them),
a JSON object under a regular expression, and a conversation of four turns; each with a short system prompt
and with one of about 1,000 tokens that all 32 share. Ours is the program in the language, run by `run_batch`;
`off` is the same on an engine without prefix cache and jump-forward. The others are driven as their users do:
each program makes its prompts, a call is handed to the engine's continuous batching as soon as the program
needs it, prefix caching is on, and the object is one call with a regular expression.

CPU seconds of all processes of an engine, the least of the rounds, engines in turn, caches empty at the start
of each round, grammars compiled before. Every call is greedy, and of a fixed length save for the object.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import HERE, Reading, conditions, keep
from benchmarks.peers.child import Child, Missing

Call = tuple[str, int, str | None]
"""Prompt, new tokens (with a regular expression: at most), the regular expression."""
Steps = Generator[list[Call], list[str], str]
"""Yields calls that may run side by side, is sent their replies, and returns its whole text."""

OFF = "float32-off"
PEERS = ("sglang-dsl", "openvino", "vllm")
WORDS = (
    *("river", "mountain", "paper", "silver", "window", "garden", "station", "copper", "evening", "letter"),
    *("harbour", "music", "winter", "bridge", "market", "signal", "orange", "forest", "village", "pencil"),
    *("captain", "morning", "kitchen", "weather", "island", "painter"),
)
CARD = (
    r'\{\n  "name": "[A-Z][a-z]{2,12}",\n  "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)",\n'
    r'  "blood status": "(Pure-blood|Half-blood|Muggle-born)",\n'
    r'  "occupation": "(student|teacher|auror|ministry of magic|death eater)",\n'
    r'  "wand": \{\n    "wood": "[a-z]{3,10}",\n    "core": "[a-z]{3,10}",\n'
    r'    "length": [0-9]{1,2}\.[0-9]\n  \},\n'
    r'  "alive": "(Alive|Deceased)",\n  "patronus": "[a-z]{3,10}"\n\}'
)
BRANCHES, CHAINS, TURNS = 2, 4, 4
SHORT, LONG = 16, 24


@dataclass(frozen=True)
class Item:
    """What one program is given."""

    system: str
    topic: str


def items(count: int, long: bool, seed: int = 0) -> list[Item]:
    draw = random.Random(seed)
    said = " ".join(draw.choice(WORDS) for _ in range(1000 if long else 16))
    return [Item(f"You are helpful. {said}.\n", " ".join(draw.sample(WORDS, 8))) for _ in range(count)]


def tree(item: Item) -> Steps:
    level = [f"{item.system}Question: {item.topic}?\n"]
    for name in ("Plan", "Answer", "Score"):
        level = [f"{text}{name} {n + 1}:" for text in level for n in range(BRANCHES)]
        replies = yield [(text, SHORT, None) for text in level]
        level = [f"{text}{reply}\n" for text, reply in zip(level, replies, strict=True)]
    return "".join(level)


def chains(item: Item) -> Steps:
    text = f"{item.system}Question: {item.topic}?\n"
    replies = yield [(f"{text}Way {n + 1}:", LONG, None) for n in range(CHAINS)]
    text += "".join(f"Solution {n + 1}: {reply}\n" for n, reply in enumerate(replies)) + "Answer:"
    (reply,) = yield [(text, LONG, None)]
    return text + reply


def card(item: Item) -> Steps:
    text = f"{item.system}A character from {item.topic}, as JSON:\n"
    (reply,) = yield [(text, 200, CARD)]
    return text + reply


def turns(item: Item) -> Steps:
    text = item.system
    for word in item.topic.split()[:TURNS]:
        text += f"User: tell me of {word}.\nAssistant:"
        (reply,) = yield [(text, LONG, None)]
        text += f"{reply}\n"
    return text


PROGRAMS: dict[str, Callable[[Item], Steps]] = {
    "tree of thought": tree, "chains": chains, "JSON": card, "turns": turns,
}  # fmt: skip


def drive(child: Child, programs: list[Steps]) -> list[str]:
    """Runs all programs at once on an engine that takes calls while others run; their texts."""
    texts = [""] * len(programs)
    open_calls: dict[int, tuple[int, int]] = {}
    replies: dict[int, list[str | None]] = {}
    calls: list[tuple[int, str, int, str | None]] = []
    made = 0

    def advance(number: int, given: list[str] | None) -> None:
        nonlocal made
        try:
            wanted = next(programs[number]) if given is None else programs[number].send(given)
        except StopIteration as ended:
            texts[number] = ended.value
            return
        replies[number] = [None] * len(wanted)
        for place, call in enumerate(wanted):
            open_calls[made] = (number, place)
            calls.append((made, *call))
            made += 1

    for number in range(len(programs)):
        advance(number, None)
    while open_calls:
        answered = child.ask(do="step", calls=calls, waiting=True)["replies"]
        calls.clear()
        for call, text in answered:
            number, place = open_calls.pop(call)
            replies[number][place] = text
            if None not in replies[number]:
                advance(number, [reply or "" for reply in replies[number]])
    return texts


def run(child: Child, name: str, todo: list[Item]) -> list[str]:
    if child.name == "sglang-dsl":
        pairs = [(item.system, item.topic) for item in todo]
        texts: list[str] = child.ask(do="program", name=name, items=pairs)["texts"]
        return texts
    return drive(child, [PROGRAMS[name](item) for item in todo])


def measure(
    children: dict[str, Child],
    options: argparse.Namespace,
    took: dict[str, dict[str, list[Reading]]],
    missing: list[str],
) -> None:
    """Fills in readings by work and engine; prints how many texts are those of the first engine."""
    count, rounds, only = options.count, options.rounds, options.only
    for name in only:
        for long in (False, True):
            todo, gave = items(count, long), {}
            work = f"{name}, {'long' if long else 'short'} prompt"
            for number in range(rounds):
                for label in list(reversed(children) if number % 2 else children):
                    child = children[label]
                    spent_there = took.get(work, {}).get(label)
                    if spent_there and max(reading.cpu for reading in spent_there) > options.longest:
                        continue
                    try:
                        if number == 0:
                            run(child, name, items(1, False, seed=1))
                        child.ask(do="forget")
                        before = child.reading()
                        gave[label] = run(child, name, todo)
                        after = child.reading()
                    except Missing as error:
                        missing.append(f"{label}, {work}: {error}")
                        children.pop(label).close()
                        continue
                    spent = Reading(after.wall - before.wall, after.cpu - before.cpu)
                    took.setdefault(work, {}).setdefault(label, []).append(spent)
                    first = next(iter(gave.values()))
                    same = sum(a == b for a, b in zip(gave[label], first, strict=True))
                    print(
                        f"{work}: {label} {spent.cpu:.3f}, {same}/{count} alike", file=sys.stderr, flush=True
                    )


def table(took: dict[str, dict[str, list[Reading]]], ours: str, off: str) -> str:
    engines = list(dict.fromkeys(label for found in took.values() for label in found))
    rows = [["program", *engines, "off / ours", "best peer / ours"], ["---"] * (len(engines) + 3)]
    for work, found in took.items():
        least = {label: min(reading.cpu for reading in readings) for label, readings in found.items()}
        peers = [cpu for label, cpu in least.items() if label not in (ours, off)]
        mine = least.get(ours)
        rows.append([
            work,
            *(f"{least[label]:.2f}" if label in least else "-" for label in engines),
            f"{least[off] / mine:.2f}x" if mine and off in least else "-",
            f"{min(peers) / mine:.2f}x" if mine and peers else "-",
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--environments", type=Path, default=os.environ.get("SGLANG_DSL_PEERS"))
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--count", type=int, default=32, help="programs at once")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--longest", type=float, default=20.0, help="CPU seconds after which one round is enough"
    )
    parser.add_argument("--no-off", action="store_true", help="leave out ours without the programs' features")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=tuple(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-programs.md")
    parser.add_argument("--append", action="store_true", help="write behind what the day's file has")
    options = parser.parse_args()
    from benchmarks.grammars.jump_forward import make_llama, trained

    tokenizer, spelling = trained(32_768)
    model = make_llama(HERE / ".cache" / "llama-40m-32k", tokenizer, spelling.vocabulary)
    environments = Path(options.environments) if options.environments else None
    missing: list[str] = []
    children: dict[str, Child] = {}
    wanted = [(f"{name} {options.precision}", name, options.precision) for name in options.engines]
    if "sglang-dsl" in options.engines and options.precision == "float32" and not options.no_off:
        wanted.insert(1, ("sglang-dsl, off", "sglang-dsl", OFF))
    for label, name, precision in wanted:
        try:
            children[label] = Child(name, model, precision, options.threads, environments)
        except Missing as error:
            missing.append(f"{label}: {error}")
            print(f"without {label}: {error}", file=sys.stderr)
    versions = "; ".join(f"{child.name} {child.version}" for child in children.values())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    took: dict[str, dict[str, list[Reading]]] = {}
    try:
        measure(children, options, took, missing)
    except KeyboardInterrupt:
        missing.append("what was to come when the run was ended")
    finally:
        for child in children.values():
            child.close()
    where = conditions(
        f"random Llama of 40 M parameters, {options.count} at once, {options.precision}, "
        f"{options.threads} thread(s), least of {options.rounds} rounds, engines in turn"
    )
    text = (
        f"CPU seconds. {where}.\n\nEngines: {versions}.\n\n{table(took, wanted[0][0], 'sglang-dsl, off')}\n"
    )
    if missing:
        text += "\nNot measured:\n\n" + "\n".join(f"- {line}" for line in missing) + "\n"
    print(text)
    if options.write:
        keep(
            "programs",
            text if options.append else f"# Programs of many calls\n\n{text}",
            append=options.append,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

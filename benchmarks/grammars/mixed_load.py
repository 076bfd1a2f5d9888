"""What constrained requests cost the free ones beside them: `python -m benchmarks.grammars.mixed_load`.

40 requests are under way at a time, 20 of them free. In one kind of round the other 20 are constrained:
regular expressions, JSON schemas that are exact and such that a validator checks, EBNF, structural tags, each
a different one, so that constraints are compiled all the time. In the other kind the same others come without
their constraints, with the same prompts and as many tokens as the constrained ones gave. The free requests
are the same in both; what counts is their throughput. Rounds of the two kinds take turns.

    python -m benchmarks.grammars.mixed_load --model llama-40m --write   # into benchmarks/results
    python -m benchmarks.grammars.mixed_load --quick       # one short round of each: does it run?
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.measuring import HERE, Reading, conditions, keep
from benchmarks.vocabularies import make_vocabulary
from benchmarks.workloads import make_model
from runtime.api import Engine
from runtime.protocol.io_struct import GenerateReqInput

Fields = dict[str, Any]
PROMPTS = [
    "The city of",
    "Once upon a time",
    "Extract the record:",
    "Q: 12 plus 30? A:",
    "Name three things:",
]


# -- constraints, a different one each time ------------------------------------------------------------------


def regex(dice: random.Random, number: int) -> Fields:
    low = dice.randint(5, 40)
    return {"regex": rf"(id{number}|[A-Z][a-z]{{2,9}}( \w{{1,8}}){{0,6}}): [^\n\"]{{{low},{low + 40}}}\."}


def exact_schema(dice: random.Random, number: int) -> Fields:
    names = [f"{name}{number}" for name in dice.sample(["name", "age", "city", "tags", "note", "score"], 4)]
    kinds = [
        {"type": "string", "maxLength": dice.randint(5, 60)},
        {"type": "integer", "minimum": 0, "maximum": 999},
        {"enum": ["red", "green", f"blue{number}"]},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    ]
    schema = {
        "type": "object",
        "properties": dict(zip(names, kinds, strict=True)),
        "required": names,
        "additionalProperties": False,
    }
    return {"json_schema": json.dumps(schema)}


def checked_schema(dice: random.Random, number: int) -> Fields:
    schema = {
        "type": "object",
        "required": ["items", f"n{number}"],
        "additionalProperties": False,
        "properties": {
            "items": {
                "type": "array",
                "uniqueItems": True,
                "minItems": 2,
                "maxItems": 4,
                "items": {"enum": [dice.randrange(1000) for _ in range(8)]},
            },
            f"n{number}": {"type": "integer", "minimum": 0, "maximum": 500, "not": {"multipleOf": 2}},
        },
    }
    return {"json_schema": json.dumps(schema)}


def ebnf(dice: random.Random, number: int) -> Fields:
    return {
        "ebnf": f'root ::= "r{number}" (" " term){{2,8}}\nterm ::= [a-z]{{1,6}} | "(" term ")" | [0-9]{{1,4}}'
    }


def tags(dice: random.Random, number: int) -> Fields:
    schema = {
        "type": "object",
        "properties": {"q": {"type": "string", "maxLength": dice.randint(8, 30)}},
        "required": ["q"],
        "additionalProperties": False,
    }
    form = {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "at_least_one": True,
        "stop_after_first": True,
        "tags": [
            {
                "type": "tag",
                "begin": f"<f=t{n}-{number}>",
                "end": "</f>",
                "content": {"type": "json_schema", "json_schema": schema},
            }
            for n in range(4)
        ],
    }
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}


KINDS: dict[str, Callable[[random.Random, int], Fields]] = {
    "regex": regex,
    "schema, exact": exact_schema,
    "schema, checked": checked_schema,
    "EBNF": ebnf,
    "tags": tags,
}


def _llama() -> str:
    """The model of the other benchmarks, random and of 40 M parameters, with a tokenizer of 32,768 tokens."""
    folder = HERE / ".cache" / "llama-40m-32k"
    if (folder / "tokenizer.json").exists():
        return str(folder)
    path, vocabulary = make_vocabulary(32_768)
    config = json.loads((make_model(HERE / ".cache" / "llama-40m") / "config.json").read_text())
    for name in ("transformers_version", "architectures", "model_type"):
        config.pop(name, None)
    config.update(vocab_size=len(vocabulary), eos_token_id=min(vocabulary.eos))
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)
    shutil.copy(path, folder / "tokenizer.json")
    return str(folder)


MODELS: dict[str, tuple[str, Callable[[], str]]] = {
    "pocket": ("the bundled checkpoint", lambda: "pocket"),
    "llama-40m": ("a random Llama of 40 M parameters, vocabulary 32,768", _llama),
}


# -- one round -----------------------------------------------------------------------------------------------


@dataclass
class Round:
    """What one round gave. wall, cpu: seconds until the last free request ended; the CPU is that of
    all processes. lengths: output tokens of the others, in the order in which they were sent."""

    wall: float = 0.0
    cpu: float = 0.0
    free_tokens: int = 0
    other_tokens: int = 0
    others: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    steps: int = 0
    failed: list[str] = field(default_factory=list)
    slowest: float = 0.0

    @property
    def throughput(self) -> float:
        return self.free_tokens / self.wall


@dataclass(frozen=True)
class Plan:
    """free, others: clients of each kind; each free one sends `each` requests of `tokens` tokens. distinct:
    how many constraints there are; None: each is a new one."""

    free: int = 20
    others: int = 20
    each: int = 4
    tokens: int = 96
    distinct: int | None = None


Send = Callable[[int], Awaitable[int]]


async def one_round(engine: Engine, plan: Plan, base: int, twins: dict[int, int] | None) -> Round:
    """A round whose others are constrained, or, given the lengths in `twins`, free themselves."""
    found = Round()
    numbers = itertools.count(base)
    done = asyncio.Event()
    usual = round(statistics.mean(twins.values())) if twins else 0

    async def free(client: int) -> None:
        for number in range(plan.each):
            params = {
                "max_new_tokens": plan.tokens,
                "temperature": 1.0,
                "seed": client * 100 + number,
                "ignore_eos": True,
            }
            began = time.perf_counter()
            answer = await engine.submit(
                GenerateReqInput(text=PROMPTS[(client + number) % len(PROMPTS)], sampling_params=params)
            )
            found.slowest = max(found.slowest, time.perf_counter() - began)
            found.free_tokens += len(answer.output_ids)

    async def other() -> None:
        while not done.is_set():
            number = next(numbers)
            which = number if plan.distinct is None else number % plan.distinct
            dice = random.Random(which)
            params: Fields = {"max_new_tokens": 64, "temperature": 1.0, "seed": number}
            if twins is None:
                params.update(list(KINDS.values())[which % len(KINDS)](dice, which))
            else:
                params.update(max_new_tokens=max(1, twins.get(number, usual)), ignore_eos=True)
            request = GenerateReqInput(text=PROMPTS[number % len(PROMPTS)], sampling_params=params)
            try:
                answer = await engine.submit(request)
            except Exception as error:  # noqa: BLE001 - told with the figures
                found.failed.append(f"{type(error).__name__}: {error}"[:200])
                continue
            found.lengths[number] = len(answer.output_ids)
            if not done.is_set():
                found.other_tokens += len(answer.output_ids)
                found.others += 1

    reading = Reading.now()
    rest = [asyncio.create_task(other()) for _ in range(plan.others)]
    await asyncio.gather(*(free(client) for client in range(plan.free)))
    found.wall, found.cpu = reading.since()
    done.set()
    await asyncio.gather(*rest)
    return found


def measure(
    model: str, plan: Plan, rounds: int, say: Callable[[str], None]
) -> tuple[list[Round], list[Round]]:
    constrained: list[Round] = []
    unconstrained: list[Round] = []
    with Engine(model, max_total_tokens=16384) as engine:
        gc.collect()
        gc.freeze()  # as the server's processes do: what is loaded need not be looked at any more
        for number in range(rounds + 1):
            base = number * 100_000
            first = asyncio.run(one_round(engine, plan, base, None))
            second = asyncio.run(one_round(engine, plan, base, first.lengths))
            if number == 0 and rounds > 1:
                continue  # libraries load, tables are made
            constrained.append(first)
            unconstrained.append(second)
            say(
                f"round {number}: beside constrained {first.throughput:.0f} tokens/s, beside free ones"
                f" {second.throughput:.0f}; {first.others} and {second.others} others ended"
            )
            if len(constrained) >= rounds:
                break
    return constrained, unconstrained


def report(name: str, plan: Plan, constrained: list[Round], unconstrained: list[Round]) -> str:
    ratios = [one.throughput / two.throughput for one, two in zip(constrained, unconstrained, strict=True)]
    cpu = [
        (one.cpu / one.free_tokens) / (two.cpu / two.free_tokens)
        for one, two in zip(constrained, unconstrained, strict=True)
    ]
    loss = 100 * (1 - statistics.median(ratios))
    rows = [
        (
            "free tokens/s, median",
            *(f"{statistics.median(r.throughput for r in rs):.0f}" for rs in (constrained, unconstrained)),
        ),
        (
            "tokens/s of all, median",
            *(
                f"{statistics.median((r.free_tokens + r.other_tokens) / r.wall for r in rs):.0f}"
                for rs in (constrained, unconstrained)
            ),
        ),
        (
            "others ended per round, median",
            *(f"{statistics.median(r.others for r in rs):.0f}" for rs in (constrained, unconstrained)),
        ),
        (
            "slowest free request, s",
            *(f"{max(r.slowest for r in rs):.2f}" for rs in (constrained, unconstrained)),
        ),
        ("failed", *(str(sum(len(r.failed) for r in rs)) for rs in (constrained, unconstrained))),
    ]
    lines = [
        "# Free requests beside constrained ones",
        "",
        f"{conditions()}. {plan.free} free and {plan.others} other requests at a time on {name} (one "
        f"Engine), written by `python -m benchmarks.grammars.mixed_load --write`. Each free client sends "
        f"{plan.each} requests of {plan.tokens} tokens. The others: {', '.join(KINDS)}, in turn, "
        f"{'every constraint a new one' if plan.distinct is None else f'{plan.distinct} in all'}. "
        "Beside free ones: the same prompts without constraints, as long as the "
        f"constrained answers were. {len(ratios)} rounds of each kind in turn.",
        "",
        "| | beside constrained | beside free |",
        "|---|---|---|",
        *(f"| {name} | {one} | {two} |" for name, one, two in rows),
        "",
        f"Throughput of the free requests beside constrained: **{statistics.median(ratios):.3f}** of that "
        f"beside free ones (median of the rounds' ratios; each: "
        f"{', '.join(f'{ratio:.3f}' for ratio in ratios)}), a loss of "
        f"{loss:.1f} %. CPU time of all processes per free token: {statistics.median(cpu):.3f} times.",
        "",
    ]
    failures = sorted({text for one in constrained + unconstrained for text in one.failed})
    lines += ["Failures:", *(f"- {text}" for text in failures[:10]), ""] if failures else []
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="also into benchmarks/results")
    parser.add_argument("--append", action="store_true", help="write behind what the day's file has")
    parser.add_argument("--quick", action="store_true", help="one short round of each kind")
    parser.add_argument("--model", choices=MODELS, default="pocket")
    parser.add_argument("--distinct", type=int, help="so many constraints, again and again")
    options = parser.parse_args()
    plan, rounds = (
        (Plan(3, 5, 1, 16), 1) if options.quick else (Plan(distinct=options.distinct), options.rounds)
    )
    name, find = MODELS[options.model]
    text = report(
        name, plan, *measure(find(), plan, rounds, lambda line: print(line, file=sys.stderr, flush=True))
    )
    print(text)
    if options.write:
        keep("mixed-load", text, append=options.append)


if __name__ == "__main__":
    main()

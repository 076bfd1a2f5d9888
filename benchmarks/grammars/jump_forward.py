"""What jump-forward saves, and what constrained decoding costs: `python -m benchmarks.grammars.jump_forward`.

First without a model: texts are recited token by token as their tokenizer would spell them, and what a
constraint forces is jumped; so the share of forced tokens does not depend on a model, and the ids can be
compared with the tokenizer's own. Then with models, with jumps and without and free of any constraint, in
turn in one process.

Prints tables; --write keeps them, dated, under benchmarks/results/. CPU seconds are those of all processes.
Quote the ratios.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measuring import HERE, conditions, in_turn, keep, median, ratio
from runtime.api import Engine
from runtime.grammar.jump_plan import CONTEXT, JumpPlanner
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary

WORD = r"[\w\d\s]{1,16}"
CHARACTER = (
    r'\{\n    "name": "' + WORD + r'",\n'
    r'    "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)",\n'
    r'    "blood status": "(Pure-blood|Half-blood|Muggle-born)",\n'
    r'    "occupation": "(student|teacher|auror|ministry of magic|death eater|order of the phoenix)",\n'
    r'    "wand": \{\n        "wood": "' + WORD + r'",\n        "core": "' + WORD + r'",\n'
    r'        "length": [0-9]{1,2}\.[0-9]{0,2}\n    \},\n'
    r'    "alive": "(Alive|Deceased)",\n    "patronus": "' + WORD + r'"\n\}'
)
CHARACTERS = [
    ("Harry Potter", "Gryffindor", "Half-blood", "auror", "holly", "phoenix", "11.0", "Alive", "stag"),
    ("Draco Malfoy", "Slytherin", "Pure-blood", "death eater", "may", "unicorn hair", "10.", "Alive", "none"),
    ("Luna Lovegood", "Ravenclaw", "Pure-blood", "student", "vine", "dragon", "9.25", "Alive", "hare"),
    ("Remus Lupin", "Gryffindor", "Half-blood", "teacher", "fir", "unicorn", "10.25", "Deceased", "wolf"),
]  # fmt: skip
KOREAN = (
    r'\{"이름": "[가-힣]{2,4}", "도시": "(서울|부산|서산)", '
    r'"인사": "안녕하세요, (선생님|학생)! 만나서 반갑습니다\."\}'
)
KOREANS = [
    '{"이름": "홍길동", "도시": "서울", "인사": "안녕하세요, 선생님! 만나서 반갑습니다."}',
    '{"이름": "김철", "도시": "서산", "인사": "안녕하세요, 학생! 만나서 반갑습니다."}',
]
EMOJI = r"Mood: (😊|😋|☃️) (🎉🎉🎉 party time 🎈|👍🏽 okay 👌)! Rate it: (⭐){1,5} stars, thanks 🙏"
EMOJIS = [
    "Mood: 😊 🎉🎉🎉 party time 🎈! Rate it: ⭐⭐⭐ stars, thanks 🙏",
    "Mood: ☃️ 👍🏽 okay 👌! Rate it: ⭐ stars, thanks 🙏",
]


def character(one: tuple[str, ...]) -> str:
    name, house, blood, job, wood, core, length, alive, patronus = one
    return (
        f'{{\n    "name": "{name}",\n    "house": "{house}",\n    "blood status": "{blood}",\n'
        f'    "occupation": "{job}",\n    "wand": {{\n        "wood": "{wood}",\n        "core": "{core}",\n'
        f'        "length": {length}\n    }},\n    "alive": "{alive}",\n    "patronus": "{patronus}"\n}}'
    )


@dataclass(frozen=True)
class Spelling:
    """A tokenizer by name: its vocabulary and text -> ids in the middle of a text."""

    name: str
    vocabulary: Vocabulary
    encode: Callable[[str], list[int]]


class Recital(NamedTuple):
    """Tokens of a text, those a model had to choose, and whether the ids are the tokenizer's own."""

    tokens: int
    steps: int
    canonical: bool


def recite(spelling: Spelling, planner: JumpPlanner, compiled: Any, text: str) -> Recital | None:
    """`text` under a fresh matcher; None where the constraint does not take it."""
    whole = planner.encode_exactly(text)
    if whole is None:
        return None
    matcher, steps, tokens = compiled.copy(), 0, spelling.vocabulary.tokens
    ids: list[int] = []
    fresh = True
    while True:
        if fresh and (jump := planner.plan(matcher, ids[-1:], 1 << 20, ids[-1 - CONTEXT : -1])):
            ids[len(ids) - jump.replaced :] = jump.ids
            fresh = False
            continue
        done = b"".join(tokens[token] for token in ids)
        left = text.encode()[len(done) :]
        if not left:
            return Recital(len(ids), steps, ids == whole) if matcher.may_stop() else None
        if ids == whole[: len(ids)]:
            token = whole[len(ids)]
        else:  # cannot be: the tokenizer's own token is not to be had any more
            made = planner.encode_exactly(left.decode("utf-8", "ignore"))
            token = made[0] if made else -1
        if token < 0 or not matcher.advance(token):
            return None
        ids.append(token)
        steps, fresh = steps + 1, True


def share(spelling: Spelling, cases: Iterable[tuple[Constraint, list[str]]]) -> dict[str, Any]:
    """Sums over texts of constraints."""
    planner, backend = (
        JumpPlanner(spelling.vocabulary, spelling.encode),
        make_backend("auto", spelling.vocabulary),
    )
    sums = {"texts": 0, "refused": 0, "tokens": 0, "steps": 0, "canonical": 0}
    for constraint, texts in cases:
        try:
            compiled = backend.compile(constraint)
        except RuntimeFault:
            sums["refused"] += len(texts)
            continue
        for text in texts:
            found = recite(spelling, planner, compiled, text)
            if found is None:
                sums["refused"] += 1
                continue
            sums["texts"] += 1
            sums["tokens"] += found.tokens
            sums["steps"] += found.steps
            sums["canonical"] += found.canonical
    return sums


def schema_cases(limit: int) -> Iterator[tuple[Constraint, list[str]]]:
    """The valid instances of the schema sample in SGLANG_DSL_DATA, as json.dumps writes them; none without
    it."""
    folder = os.environ.get("SGLANG_DSL_DATA")
    file = Path(folder) / "maskbench_sample.jsonl.gz" if folder else None
    if file is None or not file.is_file():
        return
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number >= limit:
                return
            one = json.loads(line)
            texts = [
                json.dumps(test["data"], ensure_ascii=False)
                for test in one.get("tests", ())
                if test.get("valid")
            ]
            schema = one.get("schema", one.get("json_schema"))
            yield Constraint("json_schema", json.dumps(schema), "single"), [t for t in texts if len(t) < 4000]


def fixed_cases() -> dict[str, list[tuple[Constraint, list[str]]]]:
    return {
        "character JSON": [(Constraint("regex", CHARACTER), [character(one) for one in CHARACTERS])],
        "Korean": [(Constraint("regex", KOREAN), KOREANS)],
        "emoji": [(Constraint("regex", EMOJI), EMOJIS)],
    }


def shares(spellings: list[Spelling], schemas: int) -> list[list[str]]:
    rows = []
    for spelling in spellings:
        print(f"vocabulary {spelling.name}", file=sys.stderr)
        cases = fixed_cases()
        if sample := list(schema_cases(schemas)):
            cases["schema sample"] = sample
        for name, mine in cases.items():
            got = share(spelling, mine)
            if not got["texts"]:
                continue
            saved = 1 - got["steps"] / got["tokens"]
            rows.append(
                [
                    name, spelling.name, str(got["texts"]), str(got["tokens"]), f"{saved:.1%}",
                    f"{got['tokens'] / max(1, got['steps']):.2f}x", f"{got['canonical']}/{got['texts']}",
                    str(got["refused"]),
                ]
            )  # fmt: skip
    return rows


# -- with models ---------------------------------------------------------------------------------------------


def make_llama(folder: Path, tokenizer: Path, vocabulary: Vocabulary) -> Path:
    """The random Llama of benchmarks/workloads.py (40 M parameters) with a real vocabulary of 32,768."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=512, intermediate_size=1408, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=4096,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=min(vocabulary.eos),
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copy(tokenizer, folder / "tokenizer.json")
    return folder


def ask(engine: Engine, prompts: list[str], constraint: Constraint | None, **options: Any) -> list[Any]:
    tokens = options.pop("tokens", 400)
    params = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=constraint is None)
    engine.flush_cache()
    return list(engine.generate(prompts, params, constraint=constraint, **options))


def end_to_end(name: str, engine: Engine, rounds: int, batch: int) -> list[list[str]]:
    """Character JSON with jumps, without, and as many tokens free of any constraint."""
    prompts = [f"{one[0]} is a character. As JSON:\n" for one in (CHARACTERS * batch)[:batch]]
    constraint = Constraint("regex", CHARACTER)
    slow = ask(engine, prompts, constraint, jump_forward=False)  # compiled, warm
    most = max(len(out.output_ids) for out in slow)
    print(f"{name}, {batch} at once", file=sys.stderr)
    took, gave = in_turn(
        {
            "jumps": lambda: ask(engine, prompts, constraint),
            "no jumps": lambda: ask(engine, prompts, constraint, jump_forward=False),
            "free": lambda: ask(engine, prompts, None, tokens=most),
        },
        rounds,
    )
    same = sum(a.text == b.text for a, b in zip(gave["jumps"][-1], gave["no jumps"][-1], strict=True))
    rows = []
    for kind, outs in gave.items():
        tokens = sum(len(out.output_ids) for out in outs[-1])
        steps = sum(out.meta["decode_steps"] for out in outs[-1])
        gain, spent = ratio(took["no jumps"], took[kind]), median(took[kind])
        rows.append(
            [
                name, str(batch), kind, str(tokens), str(steps), f"{spent.wall:.3f}", f"{spent.cpu:.3f}",
                f"{tokens / spent.wall:.0f}", f"{gain.wall:.2f}x", f"{gain.cpu:.2f}x",
                f"{same}/{len(outs[-1])}" if kind == "jumps" else "",
            ]
        )  # fmt: skip
    return rows


PIECES = [
    '{"name": "',
    '", "age": ',
    '"}',
    "The answer is ",
    ". It's ",
    "\n\n",
    "안녕하세요 ",
    " 😊 ",
    "x = ",
    "- ",
]
GAPS = [
    "[a-z]{1,8}",
    "[0-9]{1,3}",
    "(yes|no|maybe)",
    "(Paris|Pavia|Rome)",
    "[A-Z][a-z]{1,9}",
    "[a-z ]{0,12}",
    "",
]


def compared(engine: Engine, planner: JumpPlanner, count: int) -> list[str]:
    """Random constraints with jumps and without, greedy: equal texts, equal ids, canonical answers."""
    pick, texts, ids, canonical, jumped, tokens = random.Random(0), 0, 0, 0, 0, 0
    for _ in range(count):
        spec = "".join(re.escape(pick.choice(PIECES)) + pick.choice(GAPS) for _ in range(pick.randint(1, 5)))
        prompt, constraint = pick.choice(("Say: ", "Q: who?\nA:", "List\n")), Constraint("regex", spec)
        params = SamplingParams(max_new_tokens=120, temperature=0.0)
        one = engine.generate(prompt, params, constraint=constraint)
        other = engine.generate(prompt, params, constraint=constraint, jump_forward=False)
        texts, ids = texts + (one.text == other.text), ids + (one.output_ids == other.output_ids)
        canonical += list(one.output_ids) == (planner.encode_exactly(one.text) or [])
        jumped, tokens = jumped + one.meta["jumped_tokens"], tokens + len(one.output_ids)
    return [
        str(count),
        f"{texts}/{count}",
        f"{ids}/{count}",
        f"{jumped / max(1, tokens):.1%}",
        f"{canonical}/{count}",
    ]


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


SHARE_HEAD = [
    "constraint",
    "vocabulary",
    "texts",
    "tokens",
    "forced",
    "steps saved",
    "canonical",
    "not taken",
]
TIME_HEAD = [
    "model", "at once", "way", "tokens", "decode steps", "wall s", "CPU s", "tok/s", "speed-up", "of CPU",
    "same text",
]  # fmt: skip
EQUAL_HEAD = ["random constraints", "same text", "same ids", "forced", "answers canonical"]


def spelling_of(engine: Engine, name: str) -> Spelling:
    return Spelling(name, engine.vocabulary, lambda text: list(engine.encode(text, False)))


def trained(size: int) -> tuple[Path, Spelling]:
    from tokenizers import Tokenizer

    from benchmarks.vocabularies import make_vocabulary

    path, vocabulary = make_vocabulary(size)
    made = Tokenizer.from_file(str(path))
    return path, Spelling(
        f"{size:,}", vocabulary, lambda text: made.encode(text, add_special_tokens=False).ids
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schemas", type=int, default=1000, help="of the sample at most so many")
    parser.add_argument("--random", type=int, default=300, help="random constraints compared on pocket")
    parser.add_argument("--quick", action="store_true", help="pocket alone, once, a few cases")
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/<date>-jump-forward.md"
    )
    options = parser.parse_args(arguments)
    import torch

    quick = options.quick
    parts: list[str] = []
    with Engine("pocket", dtype="float32", max_total_tokens=16_384, threads=1) as engine:
        pocket = spelling_of(engine, "pocket")
        spellings = [pocket]
        if not quick:
            tokenizer, middle = trained(32_768)
            spellings += [middle, trained(131_072)[1]]
        parts.append(
            "## Forced tokens\n\n" + markdown(SHARE_HEAD, shares(spellings, 5 if quick else options.schemas))
        )
        times = []
        for batch in (1,) if quick else (1, 8):
            times += end_to_end("pocket", engine, 1 if quick else options.rounds, batch)
        planner = JumpPlanner(pocket.vocabulary, pocket.encode)
        equal = compared(engine, planner, 8 if quick else options.random)
    if not quick:
        folder = make_llama(HERE / ".cache" / "llama-40m-32k", tokenizer, middle.vocabulary)
        with Engine(str(folder), dtype="float32", max_total_tokens=16_384, threads=1) as engine:
            for batch in (1, 8):
                times += end_to_end("40M Llama, 32,768", engine, options.rounds, batch)
    parts.append("## Time\n\n" + markdown(TIME_HEAD, times))
    parts.append("## With jumps and without, pocket, greedy\n\n" + markdown(EQUAL_HEAD, [equal]))
    where = conditions(
        f"torch {torch.__version__}, 1 thread, float32, {options.rounds} rounds, the ways in turn"
    )
    text = f"{where}. {EXPLAINED}\n\n" + "\n".join(parts)
    print(text)
    if options.write:
        target = keep("jump-forward", f"# Jump-forward\n\n{text}")
        print(f"written to {target.relative_to(HERE.parent)}")
    return 0


EXPLAINED = """\
Written by `python -m benchmarks.grammars.jump_forward --write`.

- forced: tokens that no model was asked for, of a text recited under its constraint.
- steps saved: tokens per decode step. canonical: the ids are the tokenizer's own of the whole text.
- not taken: texts that the constraint refuses, or that its whitespace policy does not write so.
- speed-up: seconds without jumps by seconds of this way, on the wall's clock and of CPU in all processes,
  medians of the rounds; free: as many tokens without a constraint.
- answers canonical: of a real model's answers, whose own choices need not be canonical."""

if __name__ == "__main__":
    sys.exit(main())

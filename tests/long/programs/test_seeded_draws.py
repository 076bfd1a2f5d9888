"""Random seeded programs on a model with a vocabulary of real size: alone and sixteen at once, with every
switch of the engine on and off, they draw the same tokens. The borders of a cumulative sum over 49,152 ids
would move with the batch's rounding; a vocabulary of 1,280 hides that.

SEEDED_PROGRAMS in the environment says how many programs (1,000); EXPLORE, from which on.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sglang_dsl as sgl
from runtime.api import Engine
from runtime.engine.sampling import draw, sampler
from runtime.engine.sampling.sampler import key_of
from runtime.kernels.gumbel import gumbel, halves
from runtime.protocol.io_struct import GenerateReqInput
from runtime.protocol.sampling import SamplingParams
from sglang_dsl.backends.engine import EngineBackend
from tests.exploring import EXPLORE
from tests.unit.runtime.engine.sampling.at_once import pick_at_once

transformers = pytest.importorskip("transformers")
FREE_TOKENS = 10
"""The most that a text without a constraint has; with one it may have more."""
PROGRAMS = int(os.environ.get("SEEDED_PROGRAMS", "1000"))
VOCAB, CLOSE, RARE = 49_152, 1e-4, 100_000
POCKET = Path(__file__).parents[3] / "runtime" / "pocket" / "checkpoint"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["fox", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "kind", "age"],
}
REGEXES = (r"[a-z]{3,9} (cat|dog)s?", r"The answer is [0-9]{1,4}\.", r"(yes|no), [A-Za-z ]{4,20}[.!]")
TEXTS = ("Once upon a time ", "A: ", "The fox and the dog went on, ", "\nname: ", "1 + 2 = ", " and so ")
COMMON: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "threads": 1, "max_total_tokens": 1 << 15,
    "grammar_timeout_s": 600.0,
}  # fmt: skip
ALONE: dict[str, Any] = {
    "max_running_requests": 1, "overlap": False, "radix_cache": False, "jump_forward": False,
    "runner_process": False,
}  # fmt: skip
GUESSING = {"speculative_algorithm": "NGRAM", "speculative_ngram_min_match_window_size": 1}
SWITCHES: dict[str, dict[str, Any]] = {
    "alone, all on": {"max_running_requests": 1, **GUESSING},
    "sixteen": {},
    "no overlap": {"overlap": False},
    "prompts in chunks": {"chunked_prefill_size": 7, "mixed_prefill": False},
    "no radix cache": {"radix_cache": False},
    "no jumps": {"jump_forward": False},
    "guesses": GUESSING,
    "guesses, no jumps, pages": {**GUESSING, "jump_forward": False, "page_size": 16},
    "all rows at once": {"runner_process": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small random weights whose logits are spread as a trained model's are, and a byte-level tokenizer:
    pocket's, with more tokens made of two."""
    made = tmp_path_factory.mktemp("seeded")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, 0.4 if "lm_head" in name else 0.25)
    model.save_pretrained(made)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(POCKET / name, made)
    tokenizer = json.loads((POCKET / "tokenizer.json").read_text())
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    special = {one["content"] for one in tokenizer["added_tokens"]}
    parts, dice = sorted(set(vocab) - special), random.Random(1)
    taken = max([*vocab.values(), *(one["id"] for one in tokenizer["added_tokens"])]) + 1
    while taken < VOCAB:
        left, right = dice.choice(parts), dice.choice(parts)
        if left + right not in vocab and len(left + right) < 12:
            vocab[left + right], taken = taken, taken + 1
            merges.append([left, right] if isinstance(merges[0], list) else f"{left} {right}")
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    return made


class Watching(EngineBackend):
    """An engine, and what each seeded generation was asked and came to, by its seed."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.seen: dict[int, tuple[str, list[int]]] = {}

    async def _submit(self, request: GenerateReqInput) -> Any:
        output = await super()._submit(request)
        params = request.sampling_params
        if isinstance(params, SamplingParams) and params.seed is not None:
            self.seen[params.seed] = (request.text or "", list(output.output_ids))
        return output


def sampling(dice: random.Random) -> dict[str, Any]:
    return {
        "temperature": dice.choice((0.6, 1.0, 1.3, 2.0)),
        "top_p": dice.choice((1.0, 1.0, 0.95, 0.8)),
        "top_k": dice.choice((-1, -1, 40, 400)),
        "min_p": dice.choice((0.0, 0.0, 0.02)),
        "frequency_penalty": dice.choice((0.0, 0.0, 0.6)),
        "presence_penalty": dice.choice((0.0, 0.0, 0.4)),
        "ignore_eos": True,
    }


def steps(s: Any, dice: random.Random, count: int, name: str) -> None:
    for number in range(count):
        mine = f"{name}{number}"
        s += dice.choice(TEXTS) + str(dice.randrange(1000))
        match dice.choice(("text", "text", "text", "regex", "json", "select", "fork")):
            case "text":
                s += sgl.gen(mine, max_tokens=dice.randint(2, FREE_TOKENS), **sampling(dice))
            case "regex":
                s += sgl.gen(mine, max_tokens=24, regex=dice.choice(REGEXES), **sampling(dice))
            case "json":
                s += sgl.gen(mine, max_tokens=48, json_schema=SCHEMA, **sampling(dice))
            case "select":
                s += sgl.select(mine, [" one", " another", " none"], temperature=dice.choice((0.0, 1.0)))
            case "fork" if count > 1:
                branches = s.fork(dice.randint(2, 3))
                for index, branch in enumerate(branches):
                    steps(branch, dice, 1, f"{mine}_{index}_")
                branches.join()
                s += "".join(branch.text()[-20:] for branch in branches)


@sgl.function
def seeded(s: Any, number: int) -> None:
    dice = random.Random(number)
    steps(s, dice, dice.randint(2, 4), "x")


def run(engine: Engine, threads: int) -> tuple[Watching, list[str]]:
    backend = Watching(engine)
    items = [{"number": EXPLORE + number} for number in range(PROGRAMS)]
    states = seeded.run_batch(items, backend=backend, num_threads=threads, seed=11)
    return backend, [state.text() for state in states]


def gap(scores: Tensor, params: SamplingParams, key: int, other: int) -> float:
    """By how much `other` misses being drawn from scores [vocab], where shares and weights at the borders of
    top-k, top-p and min-p count as within them up to CLOSE; infinite where it lies outside of these."""
    row = scores.numpy().astype(np.float64)
    relative = (row - row.max()) / params.temperature
    weights = np.exp(relative)
    value = relative + gumbel(halves([key]), np.arange(len(row), dtype=np.int32))[0]

    order = np.argsort(-weights, kind="stable")
    many = 0 < params.top_k < len(row)

    def kept(slack: float) -> Any:
        least = params.min_p * (1 - slack)
        if many:  # surely kept is what outweighs the first that is not
            edge = weights[order[params.top_k - (slack > 0)]]
            least = max(least, edge * (1 - slack))
        if params.top_p < 1.0:
            inside = weights[order]
            if many:
                inside = np.where(inside >= inside[params.top_k - 1], inside, 0.0)
            heavy = inside / inside.sum()
            last = max(1, int((np.cumsum(heavy) - heavy < params.top_p + slack).sum())) - 1
            least = max(least, weights[order[last]] * (1 - max(slack, 0.0)))
        return weights >= least

    if not kept(CLOSE)[other]:
        return math.inf
    sure = kept(-CLOSE)
    return float(value[sure].max() - value[other]) if sure.any() else 0.0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """By the key of a draw, what it was drawn from: for keys that are in it, in this process."""
    found: dict[int, Any] = {}
    inner = draw.pick

    def pick(scores: Tensor, params: Sequence[Any], keys: Sequence[int], ids: Tensor | None = None) -> Any:
        for place, key in enumerate(keys):
            if key in found:
                row = scores[place].clone()
                if ids is not None:
                    listed = torch.full((VOCAB,), -math.inf)
                    real = row > -math.inf
                    listed[ids[place][real]] = row[real]
                    row = listed
                found[key] = (row, params[place])
        return inner(scores, params, keys, ids)

    monkeypatch.setattr(sampler, "pick", pick)
    return found


def changed(
    base: Watching, other: Watching, engine: Engine, asked: dict[int, Any]
) -> list[tuple[int, int, float]]:
    """(seed, step, gap) of each draw that is another one after the same prompt and the same tokens."""
    differing = {}
    for seed, (prompt, ids) in base.seen.items():
        theirs = other.seen.get(seed)
        if theirs is not None and theirs[0] == prompt and theirs[1] != ids:
            step = next((at for at, pair in enumerate(zip(ids, theirs[1])) if pair[0] != pair[1]), -1)
            assert step >= 0, f"the outputs of seed {seed} end at different places: {ids} and {theirs[1]}"
            differing[seed] = step, theirs[1][step]
    if not differing:
        return []
    asked.update({key_of(seed, step): None for seed, (step, _) in differing.items()})
    run(engine, 1)
    gaps = []
    for seed, (step, token) in differing.items():
        key = key_of(seed, step)
        drawn = asked[key]  # None: nothing was left to draw from, or the base itself repeats otherwise
        gaps.append((seed, step, math.inf if drawn is None else gap(*drawn, key, token)))
    return gaps


def test_a_draw_that_changed_is_found(
    folder: Path, asked: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.long.programs.test_seeded_draws.PROGRAMS", 2)
    with Engine(str(folder), **COMMON, **ALONE) as alone:
        base, _ = run(alone, 1)
        other = Watching(alone)
        other.seen = {seed: (prompt, [*ids[:-1], ids[-1] ^ 1]) for seed, (prompt, ids) in base.seen.items()}
        gaps = changed(base, other, alone, asked)
        assert {seed for seed, _, _ in gaps} == set(base.seen)
        assert all(distance > CLOSE for _, _, distance in gaps)
        for seed, step, _ in gaps:  # what was drawn misses nothing
            if (row := asked[key_of(seed, step)]) is None:
                continue
            params, key = row[1], key_of(seed, step)
            # The last token that a constrained text has room for may be the engine's, to end it in time.
            if params.max_new_tokens <= FREE_TOKENS or step + 1 < params.max_new_tokens:
                # Below 0: it is itself at a border.
                assert gap(*row, key, base.seen[seed][1][step]) <= 0


@pytest.mark.timeout(7200)
def test_programs_draw_the_same(folder: Path, asked: dict[int, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    draws = total = 0
    with Engine(str(folder), **COMMON, **ALONE) as alone:
        base, texts = run(alone, 1)
        draws = sum(len(ids) for _, ids in base.seen.values())
        assert draws > 5 * PROGRAMS
        for name, options in SWITCHES.items():
            settings = {"max_running_requests": 16, **COMMON, **options}
            with monkeypatch.context() as patch:
                if name == "all rows at once":
                    patch.setattr(sampler, "pick", pick_at_once)
                with Engine(str(folder), **settings) as engine:
                    other, found = run(engine, settings["max_running_requests"])
            gaps = changed(base, other, alone, asked)
            print(f"{name}: {len(gaps)} of {draws} draws are others, by {[one[2] for one in gaps]}")
            assert all(distance < CLOSE for _, _, distance in gaps), (name, gaps)
            assert gaps or found == texts, name
            total += len(gaps)
    assert total * RARE <= max(RARE, draws * len(SWITCHES)), f"{total} of {draws * len(SWITCHES)} draws"

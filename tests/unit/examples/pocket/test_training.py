"""Pieces of the trainer on a tiny model: decoding, optimiser, grafting, batches. Trains nothing real."""

from __future__ import annotations

import random
from itertools import islice

import torch
from safetensors.torch import load_file

from examples.pocket.corpus import MIX, documents
from examples.pocket.graft import graft
from examples.pocket.items import TARGETS
from examples.pocket.model import Pocket, Shape, greedy
from examples.pocket.optim import Optimizer
from examples.pocket.schedule import Schedule, adapted
from examples.pocket.train import tell_apart
from runtime.pocket import path

SMALL = Shape(vocab=300, hidden=64, layers=3, heads=2, kv_heads=1, inner=96, head_dim=64, positions=128)


def _model() -> Pocket:
    torch.manual_seed(0)
    return Pocket(SMALL)


def test_batched_decoding_equals_one_by_one() -> None:
    model = _model()
    rng = random.Random(1)
    prompts = [[rng.randrange(300) for _ in range(length)] for length in (3, 9, 17)]
    together = greedy(model, prompts, stop=-1, limit=6)
    for prompt, reply in zip(prompts, together, strict=True):
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(6):
                ids.append(int(model.logits(model.hidden(torch.tensor([ids]))[0])[0, -1].argmax()))
        assert ids[len(prompt) :] == reply


def test_the_optimiser_lowers_the_loss() -> None:
    model = _model()
    optimizer = Optimizer(model)
    ids = torch.randint(0, 300, (4, 32), generator=torch.Generator().manual_seed(2))
    losses = []
    for _ in range(12):
        model.zero_grad(set_to_none=True)
        scores = model.logits(model.hidden(ids[:, :-1])[0])
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step(1.0)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 1


def test_grafting_keeps_the_model_finite_and_is_deterministic() -> None:
    rng = random.Random(3)
    rows = [[rng.randrange(300) for _ in range(40)] for _ in range(60)]
    first, second = _model(), _model()
    graft(first, rows)
    graft(second, rows)
    ids = torch.tensor(rows[:2])
    with torch.inference_mode():
        scores = first.logits(first.hidden(ids)[0])
        assert torch.isfinite(scores).all()
        assert torch.equal(scores, second.logits(second.hidden(ids)[0]))


def test_batches_learn_only_what_the_assistant_writes() -> None:
    from tokenizers import Tokenizer

    from examples.pocket.train import _batches

    tokenizer = Tokenizer.from_file(str(path() / "tokenizer.json"))
    mix = {**MIX, "doc_sums": 0.0, "doc_completion": 0.0, "doc_copies": 0.0}
    start = tokenizer.token_to_id("<|im_start|>")
    for inputs, targets, weights in islice(_batches(tokenizer, 3, 2048, mix), 4):
        assert inputs.numel() <= 4096
        kept = weights > 0
        assert torch.equal(targets[:, :-1][kept[:, :-1]], inputs[:, 1:][kept[:, :-1]])
        assert not (targets[kept] == start).any()
        first = weights > 1  # of a reply: what stands before it is not learnt
        assert first.any()
        assert not kept[:, :-1][first[:, 1:]].any()
    assert all(piece for document in islice(documents(1), 20) for piece, _ in document)


def _figures(**changed: float) -> dict[str, float]:
    return dict.fromkeys(TARGETS, 1.0) | changed


def test_what_is_below_its_target_is_trained_more() -> None:
    before = adapted(MIX, _figures())
    after = adapted(MIX, _figures(facts=0.2, tool_call=0.3))
    for kind in ("facts", "doc_tools"):
        assert after[kind] > 1.2 * before[kind]
    assert after["record"] < before["record"]
    assert set(after) == set(MIX)
    for figures in ({}, {"extract": 0.0}, dict.fromkeys(TARGETS, 0.0)):
        mix = adapted(MIX, _figures(**figures))
        assert sum(share for kind, share in mix.items() if kind.startswith("doc_")) < 0.8
        assert min(mix.values()) > 0


def _run(
    schedule: Schedule, figures: list[dict[str, float]], per_minute: int = 100
) -> tuple[list[float], bool]:
    """The rates of a run of 1,000 tokens a step, and whether it ended."""
    rates, rest = [], list(figures)
    for step in range(1, 20_000):
        rates.append(schedule.rate(step - 1, 1000 * (step - 1), (step - 1) / per_minute))
        spent = step / per_minute
        if schedule.progress(1000 * step, spent) >= 1.0 and schedule.judge(
            rest.pop(0) if len(rest) > 1 else rest[0], 1000 * step, spent
        ):
            return rates, True
    return rates, False


def _rises(rates: list[float]) -> list[int]:
    """The steps at which the rate rose again."""
    return [index for index in range(100, len(rates)) if rates[index] > rates[index - 1] + 0.1]


def test_a_run_ends_after_its_first_round_when_the_targets_are_reached() -> None:
    rates, ended = _run(Schedule(minutes=150, tokens=3_000_000, warmup=10), [_figures()])
    assert ended
    assert len(rates) == 3000
    assert rates[0] == 0.1
    assert rates[1400] == 1.0
    assert 0.3 < rates[2250] < 0.7
    assert rates[-1] < 0.1
    assert not _rises(rates)


def test_a_run_that_misses_a_target_tries_again_in_short_rounds() -> None:
    missed = _figures(facts=0.3)
    rates, ended = _run(Schedule(minutes=150, tokens=3_000_000, warmup=10), [missed, missed, _figures()])
    assert ended
    assert len(rates) == 4200
    assert _rises(rates) == [3000, 3600]
    assert max(rates[3000:]) == 0.6


def test_a_run_ends_with_its_time_whatever_it_reached() -> None:
    rates, ended = _run(Schedule(minutes=50, tokens=30_000_000, warmup=10), [_figures(unknown=0.9)])
    assert ended
    assert len(rates) == 5000
    assert _rises(rates) == [3750]
    assert rates[-1] < 0.1


def test_a_run_from_trained_weights_begins_with_a_short_round() -> None:
    rates, ended = _run(Schedule(minutes=50, tokens=3_000_000, warmup=10, short=True), [_figures()])
    assert ended
    assert len(rates) == 600
    assert max(rates) <= 0.6


def test_tokens_that_training_never_showed_are_told_apart() -> None:
    """Else which of them a constraint gets would depend on rounding, and so on what else is in the batch."""
    model = Pocket(Shape(vocab=64, hidden=32, heads=2, kv_heads=1, inner=32, layers=1))
    shown = torch.arange(64) < 40
    rows = model.model.embed_tokens.weight
    with torch.no_grad():
        rows[40:] = rows[40]
    before = rows.detach().clone()
    tell_apart(model, shown)
    after = rows.detach()
    assert torch.equal(after[:40], before[:40])
    assert torch.pdist(after[40:]).min() > 0.05 * before[40].norm()
    bundled = load_file(str(path() / "model.safetensors"))["model.embed_tokens.weight"].float()
    assert torch.pdist(bundled).min() > 0.1

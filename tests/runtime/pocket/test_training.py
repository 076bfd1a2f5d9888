"""Pieces of the trainer on a tiny model: decoding, optimiser, grafting, batches. Trains nothing real."""

from __future__ import annotations

import random
from itertools import islice

import torch

from runtime.pocket import path
from runtime.pocket.corpus import MIX, documents
from runtime.pocket.graft import graft
from runtime.pocket.model import Pocket, Shape, greedy
from runtime.pocket.optim import Optimizer

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

    from runtime.pocket.train import _batches

    tokenizer = Tokenizer.from_file(str(path() / "tokenizer.json"))
    mix = {**MIX, "doc_sums": 0.0, "doc_completion": 0.0, "doc_copies": 0.0}
    start = tokenizer.token_to_id("<|im_start|>")
    for inputs, targets in islice(_batches(tokenizer, 3, 2048, mix), 4):
        assert inputs.numel() <= 4096
        kept = targets != -100
        assert torch.equal(targets[:, :-1][kept[:, :-1]], inputs[:, 1:][kept[:, :-1]])
        assert not (targets == start).any()
    assert all(piece for document in islice(documents(1), 20) for piece, _ in document)

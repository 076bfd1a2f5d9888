"""Routers and experts, against a loop over tokens in plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.config.fields import Fields
from runtime.config.parts.experts import (
    Clamp,
    ExpertsSpec,
    RouterSpec,
    experts_of,
    layers_after,
    sparse_layers,
)
from runtime.kernels.moe import plain_fused_experts
from runtime.layers.dense import DenseLinear
from runtime.layers.mlp import GatedMLP
from runtime.layers.moe import ClampedMLP, Experts, OneByOne, Router, SharedExpert, Stacked
from runtime.parallel import ALONE
from runtime.protocol.errors import ModelLoadError

HIDDEN, COUNT = 6, 8
SPECS = [
    RouterSpec(3),
    RouterSpec(2, renormalise=True, bias=True),
    RouterSpec(3, groups=4, groups_chosen=2, scale=1.5),
    RouterSpec(3, "sigmoid", renormalise=True, floor=1e-20, scale=2.5, correction=True),
    RouterSpec(
        3, "sigmoid", renormalise=True, groups=2, groups_chosen=1, group_score="two best", correction=True
    ),
    RouterSpec(1, "sigmoid", weighs_inputs=True),
]


def weights_of(spec: RouterSpec) -> tuple[Tensor, Tensor | None, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    weight, bias, correction = (
        torch.randn(*shape, generator=generator) for shape in ((COUNT, HIDDEN), (COUNT,), (COUNT,))
    )
    return weight, bias if spec.bias else None, correction if spec.correction else None


def by_hand(spec: RouterSpec, x: Tensor) -> dict[int, float]:
    """One token's experts and their weights."""
    weight, bias, correction = weights_of(spec)
    logits = weight @ x if bias is None else weight @ x + bias
    scores = (
        logits.exp() / logits.exp().sum() if spec.scores == "softmax" else 1 / (1 + (-logits).exp())
    ).tolist()
    ranked = [score + (0 if correction is None else float(correction[at])) for at, score in enumerate(scores)]
    each = COUNT // spec.groups
    found = []
    for group in range(spec.groups):
        mine = sorted(ranked[group * each : (group + 1) * each], reverse=True)
        found.append((mine[0] if spec.group_score == "best" else mine[0] + mine[1], group))
    kept = {group for _, group in sorted(found, reverse=True)[: spec.groups_chosen]}
    candidates = [at for at in range(COUNT) if at // each in kept]
    chosen = sorted(candidates, key=lambda at: -ranked[at])[: spec.chosen]
    total = sum(scores[at] for at in chosen) + spec.floor if spec.renormalise else 1.0
    return {at: scores[at] / total * spec.scale for at in chosen}


@pytest.mark.parametrize("spec", SPECS)
def test_experts_are_chosen_and_weighted(spec: RouterSpec) -> None:
    x = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(5))
    router = Router(spec, *weights_of(spec))
    experts, weights = router(x)
    assert experts.shape == weights.shape == (30, spec.chosen)
    used = set()
    for token, chosen, given in zip(x, experts.tolist(), weights.tolist()):
        assert dict(zip(chosen, given)) == pytest.approx(by_hand(spec, token), abs=1e-5)
        used |= set(chosen)
    assert len(used) > spec.chosen  # or every token would have the same
    for size in (0, 1):
        assert router(x[:size])[0].tolist() == experts[:size].tolist()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 30])
def test_each_token_goes_through_its_experts(spec: RouterSpec, tokens: int) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    matrices = torch.randn(COUNT + 1, HIDDEN, HIDDEN, generator=generator)
    gate = torch.randn(1, HIDDEN, generator=generator)
    mlps = [lambda given, matrix=matrix: (given @ matrix).tanh() for matrix in matrices]
    layer = Experts(
        Router(spec, *weights_of(spec)), OneByOne(mlps[:COUNT]), SharedExpert(mlps[COUNT], gate), ALONE,
        weighs_inputs=spec.weighs_inputs,
    )  # fmt: skip
    before, made = x.clone(), layer(x)
    assert made.shape == x.shape
    assert torch.equal(x, before)
    for token, got in zip(x, made):
        right = mlps[COUNT](token) * torch.sigmoid(gate[0] @ token)
        for expert, weight in by_hand(spec, token).items():
            right = right + (
                mlps[expert](weight * token) if spec.weighs_inputs else weight * mlps[expert](token)
            )
        assert got == pytest.approx(right.numpy(), abs=1e-5)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[-1]])
def test_side_by_side_they_give_the_same(spec: RouterSpec, biased: bool) -> None:
    """As on GPUs; here with the kernel's twin."""
    generator = torch.Generator().manual_seed(9)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def expert() -> GatedMLP:
        gate_up = DenseLinear(noise(10, HIDDEN), noise(10) if biased else None)
        down = DenseLinear(noise(HIDDEN, 5), noise(HIDDEN) if biased else None)
        return ClampedMLP(gate_up, down, Clamp(1.7, 0.5)) if biased else GatedMLP(gate_up, down)

    experts = [expert() for _ in range(COUNT)]
    router, x = Router(spec, *weights_of(spec)), noise(7, HIDDEN)
    one_by_one, stacked = (
        Experts(router, routed, None, ALONE, weighs_inputs=spec.weighs_inputs)(x)
        for routed in (OneByOne(experts), Stacked(iter(experts), COUNT, plain_fused_experts))
    )
    torch.testing.assert_close(stacked, one_by_one)


# -- configurations ------------------------------------------------------------------------------------------


def _fields(**values: Any) -> Fields:
    return Fields({"width": 4, **values}, "config.json")


@pytest.mark.parametrize(
    ("router", "told"),
    [
        (RouterSpec(9), r"'num_experts_per_tok' \(9\) is more than the 8 experts"),
        (RouterSpec(2, groups=3), "8 experts cannot be divided into 3 equal groups"),
        (RouterSpec(2, groups=2, groups_chosen=3), r"'topk_group' \(3\) is more than the 2 groups"),
        (RouterSpec(3, groups=4, groups_chosen=1), r"\(3\) is more than the experts of 1 groups"),
        (RouterSpec(1, groups=8, group_score="two best"), "groups of 1 expert are too small"),
    ],
)
def test_a_router_that_cannot_be_is_refused(router: RouterSpec, told: str) -> None:
    with pytest.raises(ModelLoadError, match=told):
        experts_of(_fields(num_experts=COUNT), (True,), router, "width")


def test_which_layers_have_experts() -> None:
    fields = _fields
    assert sparse_layers(fields(), 3) == (True,) * 3
    assert sparse_layers(fields(decoder_sparse_step=2, mlp_only_layers=[3]), 6) == (
        False, True, False, False, False, True,
    )  # fmt: skip
    assert layers_after(fields(first_k_dense_replace=2), 4) == (False, False, True, True)
    assert layers_after(fields(first_k_dense_replace=0), 2) == (True, True)
    assert experts_of(fields(num_experts=5), (False,) * 3, RouterSpec(2), "width") is None
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        spec = experts_of(fields(**{name: 5}), (True,), RouterSpec(2), "width", bias=True)
        assert spec == ExpertsSpec((True,), 5, 4, RouterSpec(2), bias=True)
    with pytest.raises(ModelLoadError, match="'moe_layer_freq' 2 is not supported"):
        layers_after(fields(moe_layer_freq=2), 4)
    with pytest.raises(ModelLoadError, match="'num_experts' is missing"):
        experts_of(fields(), (True,), RouterSpec(2), "width")

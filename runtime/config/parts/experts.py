"""Experts: the shape of a mixture of experts, as data, and the names of its tensors. Torch-free.

In some layers the feed-forward consists of many small ones, the experts. A router scores the experts for each
token, and the token passes only through those with the highest scores (arXiv 1701.06538).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from runtime.config.fields import Fields

Scores = Literal["softmax", "sigmoid"]
GroupScore = Literal["best", "two best"]


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How a token's experts are chosen and weighted.

    scores: the function of the router's logits, over all experts.
    chosen: experts per token.
    renormalise: divide the chosen scores by their sum. After a softmax this equals the softmax over the
    chosen logits.
    floor: added to that sum.
    scale: a factor of the resulting weights.
    groups, groups_chosen: the experts form `groups` equal consecutive groups; only those of the best
    `groups_chosen` groups are candidates (DeepSeek, arXiv 2405.04434). group_score: how a group is scored.
    bias: the logits have a bias.
    correction: a vector is added to the scores for the choice only, not for the weights (arXiv 2408.15664).
    weighs_inputs: multiply the weights with an expert's input instead of its output.
    """

    chosen: int
    scores: Scores = "softmax"
    renormalise: bool = False
    floor: float = 0.0
    scale: float = 1.0
    groups: int = 1
    groups_chosen: int = 1
    group_score: GroupScore = "best"
    bias: bool = False
    correction: bool = False
    weighs_inputs: bool = False


@dataclass(frozen=True, slots=True)
class Clamp:
    """gpt-oss's feed-forward: down((up + 1) * gate * sigmoid(gain * gate)), with the gate clamped to at most
    `limit`, and up to between -limit and limit."""

    gain: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """layers: for each layer of the model, whether its feed-forward is experts.
    count: experts in such a layer. width: of one expert's feed-forward.
    shared_width: of the expert that all tokens pass through in addition; 0: none. shared_gate: its output is
    multiplied with the sigmoid of a product of its own.
    bias: the experts' projections have biases. clamp: a different activation, see Clamp."""

    layers: tuple[bool, ...]
    count: int
    width: int
    router: RouterSpec
    shared_width: int = 0
    shared_gate: bool = False
    bias: bool = False
    clamp: Clamp | None = None

    @property
    def layer_count(self) -> int:
        return sum(self.layers)


@dataclass(frozen=True, slots=True)
class StackNames:
    """Names for a layer's experts in one tensor: gate_up [experts, inputs, 2 * width] and down [experts,
    width, outputs]. Biases are at `<name>_bias`. Instead of numbers there may be MXFP4 codes, `<name>_blocks`
    [experts, outputs, inputs / 32, 16] and `<name>_scales` [experts, outputs, inputs / 32]. alternate: gate
    and up alternate in gate_up; else the gate is the first half."""

    gate_up: str
    down: str
    alternate: bool = False


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of tensors; `{layer}` and `{expert}` are numbers. Projections are given without their `.weight`
    or `.bias`. stack: the names if the experts of a layer are in one tensor; gate, up and down are then only
    used in errors."""

    router: str = "model.layers.{layer}.mlp.gate"
    correction: str = "model.layers.{layer}.mlp.gate.e_score_correction_bias"
    gate: str = "model.layers.{layer}.mlp.experts.{expert}.gate_proj"
    up: str = "model.layers.{layer}.mlp.experts.{expert}.up_proj"
    down: str = "model.layers.{layer}.mlp.experts.{expert}.down_proj"
    shared_gate: str = "model.layers.{layer}.mlp.shared_expert.gate_proj"
    shared_up: str = "model.layers.{layer}.mlp.shared_expert.up_proj"
    shared_down: str = "model.layers.{layer}.mlp.shared_expert.down_proj"
    shared_router: str = "model.layers.{layer}.mlp.shared_expert_gate"
    stack: StackNames | None = None


def experts_of(
    fields: Fields,
    layers: tuple[bool, ...],
    router: RouterSpec,
    width: str = "moe_intermediate_size",
    **other: Any,
) -> ExpertsSpec | None:
    """width: the field with the width of an expert. other: fields of ExpertsSpec. None if no layer has any.
    Raises ModelLoadError if the numbers are inconsistent."""
    # The name depends on the family and, in one family, on the file's author.
    names = ("num_local_experts", "n_routed_experts")
    count = fields.integer(next((name for name in names if fields.has(name)), "num_experts"))
    spec = ExpertsSpec(layers, count, fields.integer(width), router, **other)
    if not spec.layer_count:
        return None
    if router.chosen > count:
        raise fields.fail(f"'num_experts_per_tok' ({router.chosen}) is more than the {count} experts")
    if count % router.groups:
        raise fields.fail(f"{count} experts cannot be divided into {router.groups} equal groups ('n_group')")
    if router.groups_chosen > router.groups:
        raise fields.fail(f"'topk_group' ({router.groups_chosen}) is more than the {router.groups} groups")
    each = count // router.groups
    if router.chosen > router.groups_chosen * each:
        few = f"the experts of {router.groups_chosen} groups"
        raise fields.fail(f"'num_experts_per_tok' ({router.chosen}) is more than {few}")
    if router.group_score == "two best" and each < 2:
        raise fields.fail(f"groups of {each} expert are too small: a group is scored by its two best experts")
    return spec


def sparse_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Qwen's fields: decoder_sparse_step (every n-th layer has experts), mlp_only_layers (those without)."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.ids("mlp_only_layers")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def layers_after(fields: Fields, layers: int) -> tuple[bool, ...]:
    """DeepSeek's fields: first_k_dense_replace (this many first layers have no experts), moe_layer_freq (of
    the others every n-th has; always 1)."""
    if (every := fields.integer("moe_layer_freq", 1)) != 1:
        raise fields.fail(f"'moe_layer_freq' {every} is not supported; known: 1")
    first = fields.integer("first_k_dense_replace", 0, minimum=0)
    return tuple(layer >= first for layer in range(layers))


_SHARED = "model.layers.{layer}.mlp.shared_experts"
SHARED_EXPERTS = ExpertNames(
    shared_gate=f"{_SHARED}.gate_proj", shared_up=f"{_SHARED}.up_proj", shared_down=f"{_SHARED}.down_proj"
)
"""DeepSeek's names: shared experts are stored as one."""


def shared_width(fields: Fields) -> int:
    """DeepSeek's field n_shared_experts; each is as wide as the others."""
    return fields.integer("n_shared_experts", 0, minimum=0) * fields.integer("moe_intermediate_size")


def sigmoid_experts(fields: Fields, layers: int) -> ExpertsSpec | None:
    """DeepSeek-V3's experts and router (arXiv 2412.19437, section 2.1.2)."""
    if (scores := fields.text("scoring_func", "sigmoid")) != "sigmoid":
        raise fields.fail(f"'scoring_func' {scores!r} is not supported; known: sigmoid")
    router = RouterSpec(
        fields.integer("num_experts_per_tok"),
        scores="sigmoid",
        renormalise=fields.flag("norm_topk_prob", True),
        floor=1e-20,
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=fields.integer("n_group", 1),
        groups_chosen=fields.integer("topk_group", 1),
        group_score="two best",
        correction=True,
    )
    return experts_of(fields, layers_after(fields, layers), router, shared_width=shared_width(fields))

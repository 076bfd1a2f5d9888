"""Encoders against transformers on the same random weights, in batches of texts of many lengths."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from runtime.config.checkpoints import read_spec
from runtime.config.encoder import EncoderSpec
from runtime.config.pooling import Pooling
from runtime.config.runner import RunnerConfig
from runtime.engine.embed import NOT_FINITE, TorchTextRunner
from runtime.layers.dense import Dense
from runtime.models.encoder import Encoder, TextBatch
from runtime.plan import Text
from runtime.protocol.errors import BadRequest, InternalFault, ModelLoadError
from runtime.protocol.sampling import SamplingParams
from tests.exploring import tries

LENGTHS = (1, 7, 7, 64, 2, 33, 19)
CPU = torch.device("cpu")


def texts(lengths: Any = LENGTHS, first: int = 5, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(first, 160) for _ in range(length)] for length in lengths]


def load(path: Path) -> Encoder:
    spec = read_spec(path)
    assert isinstance(spec, EncoderSpec)
    return Encoder.load(path, spec, torch.float32, CPU, Dense())


def hidden(
    encoder: Encoder, batch: list[list[int]], kinds: list[list[int]] | None = None
) -> list[np.ndarray]:
    made = TextBatch(encoder.spec, batch, kinds or [[]] * len(batch), CPU)
    with torch.inference_mode():
        return [np.asarray(part) for part in encoder.hidden(made).split(made.lengths)]


def runner(path: Path, mode: str = "mean", **config: Any) -> TorchTextRunner:
    spec = read_spec(path)
    assert isinstance(spec, EncoderSpec)
    return TorchTextRunner.load(path, spec, RunnerConfig(device="cpu", **config), Pooling(mode))


def test_the_last_layers_output_is_that_of_transformers(case: Any) -> None:
    encoder, batch = load(case.path), texts()
    for ids, found in zip(batch, hidden(encoder, batch), strict=True):
        np.testing.assert_allclose(found, case.hidden(ids), atol=1e-5, rtol=1e-5)


def test_token_types_tell_segments_apart(tiny: Callable[[str], Any]) -> None:
    case = tiny("bert")
    batch = texts((9, 20))
    kinds = [[0] * 4 + [1] * 5, []]
    told = hidden(load(case.path), batch, kinds)
    np.testing.assert_allclose(told[0], case.hidden(batch[0], kinds[0]), atol=1e-5)
    np.testing.assert_allclose(told[1], case.hidden(batch[1]), atol=1e-5)
    assert np.abs(told[0] - case.hidden(batch[0])).max() > 1e-2


def test_padding_ids_within_a_text_have_the_position_of_padding(tiny: Callable[[str], Any]) -> None:
    case = tiny("roberta")
    ids = [0, 7, 1, 9, 1, 1, 30]
    (found,) = hidden(load(case.path), [ids])
    np.testing.assert_allclose(found, case.hidden(ids), atol=1e-5)


@settings(deadline=None, max_examples=tries(25))
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_a_text_has_the_same_vector_in_any_company(
    tiny: Callable[[str], Any], lengths: list[int], draw: random.Random
) -> None:
    encoder = load(tiny("bert").path)
    batch = texts(lengths, seed=draw.randrange(1 << 20))
    together = hidden(encoder, batch)
    at = draw.randrange(len(batch))
    np.testing.assert_allclose(together[at], hidden(encoder, [batch[at]])[0], atol=1e-5)


@pytest.mark.parametrize("mode", ["cls", "mean", "last", "max"])
def test_pooling(tiny: Callable[[str], Any], mode: str) -> None:
    case, batch = tiny("bert"), texts()
    results = runner(case.path, mode).encode([Text(tuple(ids)) for ids in batch])
    for ids, result in zip(batch, results, strict=True):
        states = case.hidden(ids)
        wanted = {"cls": states[0], "mean": states.mean(0), "last": states[-1], "max": states.max(0)}[mode]
        np.testing.assert_allclose(result.vector, wanted, atol=1e-5)


def test_scores_of_classifiers(classifier: Any) -> None:
    batch = texts((5, 12, 12, 30))
    kinds = [(), (0,) * 6 + (1,) * 6, (), ()]
    spec = read_spec(classifier.path)
    assert isinstance(spec, EncoderSpec)
    if spec.token_types < 2:
        kinds = [()] * 4
    found = runner(classifier.path).encode(
        [Text(tuple(ids), kind) for ids, kind in zip(batch, kinds, strict=True)]
    )
    for ids, kind, result in zip(batch, kinds, found, strict=True):
        wanted = classifier.logits(ids, kind or None)
        if spec.labels == 1:
            wanted = 1 / (1 + np.exp(-wanted))
        np.testing.assert_allclose(result.vector, wanted, atol=1e-5)


def test_a_checkpoint_says_what_is_done_to_its_scores(make: Callable[..., Any]) -> None:
    case = make("bert, 1")
    edit(case.path, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    ids = texts((6,))[0]
    (found,) = runner(case.path).encode([Text(tuple(ids))])
    np.testing.assert_allclose(found.vector, case.logits(ids), atol=1e-5)
    edit(case.path, sentence_transformers={"activation_fn": "os.system"})
    with pytest.raises(ModelLoadError, match=r"os\.system.*Identity"):
        read_spec(case.path)


def test_packed_weights_and_bfloat16_are_near(tiny: Callable[[str], Any]) -> None:
    case, batch = tiny("bert"), [Text(tuple(ids)) for ids in texts()]
    exact = [np.array(one.vector) for one in runner(case.path, pack_weights="never").encode(batch)]
    packed = [np.array(one.vector) for one in runner(case.path, pack_weights="always").encode(batch)]
    rough = [np.array(one.vector) for one in runner(case.path, dtype="bfloat16").encode(batch)]
    for one, other, third in zip(exact, packed, rough, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
        assert one @ third / np.linalg.norm(one) / np.linalg.norm(third) > 0.99


def test_old_names_of_norms_and_a_sharded_prefix(make: Callable[..., Any]) -> None:
    case = make("bert, below a head")
    file = case.path / "model.safetensors"
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file)
    ids = texts((11,))[0]
    np.testing.assert_allclose(hidden(load(case.path), [ids])[0], case.hidden(ids), atol=1e-5)


def test_missing_and_foreign_tensors(make: Callable[..., Any]) -> None:
    case = make("bert")
    file = case.path / "model.safetensors"
    tensors = load_file(file)
    gone = "encoder.layer.1.output.dense.bias"
    save_file({name: one for name, one in tensors.items() if name != gone}, file)
    with pytest.raises(ModelLoadError, match=gone.replace(".", r"\.")):
        load(case.path)
    save_file({**tensors, "encoder.layer.9.output.dense.bias": tensors[gone].clone()}, file)
    with pytest.raises(ModelLoadError, match="no place"):
        load(case.path)


def edit(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu_7"}, "gelu_7"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_size": 50}, "multiple of the 4 heads"),
        ({"vocab_size": 161}, r"shape \[160, 48\]"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"architectures": ["BertForNothing"]}, "known: .*LlamaForCausalLM.*BertModel"),
    ],
)
def test_configs_that_are_refused(make: Callable[..., Any], changes: dict[str, Any], words: str) -> None:
    case = make("bert")
    edit(case.path, **changes)
    with pytest.raises(ModelLoadError, match=words):
        load(case.path)


def test_positions_that_can_be_used(tiny: Callable[[str], Any]) -> None:
    assert read_spec(tiny("bert").path).max_position_embeddings == 64
    assert read_spec(tiny("roberta").path).max_position_embeddings == 64  # 66, less the padding id's and one


def test_numbers_that_are_not_finite_concern_their_own_text(make: Callable[..., Any]) -> None:
    case = make("bert")
    file = case.path / "model.safetensors"
    tensors = load_file(file)
    tensors["embeddings.word_embeddings.weight"][77] = float("inf")
    save_file(tensors, file)
    good, bad = runner(case.path).encode([Text((5, 6, 7)), Text((5, 77))])
    np.testing.assert_allclose(good.vector, case.hidden([5, 6, 7]).mean(0), atol=1e-5)
    assert bad.error == NOT_FINITE
    assert not bad.vector


def test_the_runner_generates_nothing_and_reports_a_failed_pass(tiny: Callable[[str], Any]) -> None:
    made = runner(tiny("bert").path)
    with pytest.raises(BadRequest, match="embeddings only"):
        made.verify(SamplingParams())
    with pytest.raises(InternalFault, match="IndexError"):
        made.encode([Text((160,))])
    made.close()

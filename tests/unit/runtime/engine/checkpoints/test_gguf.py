"""Models in a .gguf file: logits are transformers' with the numbers in the file; its path is enough."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("gguf", reason="the package gguf is not installed")

from runtime.api import Engine
from runtime.config.checkpoints import find_checkpoint
from runtime.config.gguf.header import read_header
from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.layers.dense import Dense
from runtime.layers.quantised.choose import method_for
from runtime.protocol.errors import ModelLoadError
from tests.unit.runtime.engine.checkpoints.gguf_files import write
from tests.unit.runtime.engine.conftest import BASE
from tests.unit.runtime.engine.ranks.ranks_here import RanksHere
from tests.unit.runtime.engine.sampling.test_logits import AllLogits

WIDE = {**BASE, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 1}
MIXES: dict[str, tuple[str, dict[str, str]]] = {
    "plain": ("llama", {"": "F16", "up_proj": "BF16", "norm": "F32", "q_proj": "F32"}),
    "of 16 numbers a row": ("llama, tied, biased", {"": "Q8_0", "embed": "F16"}),
    "no biases in the output": ("qwen2", {"": "Q8_0"}),
    "norms of heads": ("qwen3", {"": "Q5_1", "v_proj": "Q5_0", "down_proj": "Q4_1", "o_proj": "Q4_0"}),
    "k": ("wide", {"": "Q4_K", "v_proj": "Q6_K", "down_proj": "Q5_K", "embed": "Q6_K"}),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def wide() -> Any:
    """Rows of 256 numbers, which blocks of ggml's K types need."""
    torch.manual_seed(4)
    config = transformers.LlamaConfig(**WIDE)
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config).eval()
    config.architectures = ["LlamaForCausalLM"]
    return model


def blocks_fit(source: Any, **changes: Any) -> Any:
    """A model like it, whose rows are of whole blocks of 32 numbers."""
    given = {**source.config.to_dict(), "hidden_size": 64, "intermediate_size": 96, **changes}
    config = type(source.config)(**given)
    config._attn_implementation = "eager"
    config.architectures = source.config.architectures
    torch.manual_seed(3)
    model = type(source)(config).eval()
    for weight in model.parameters():
        weight.data.normal_(mean=float(weight.ndim == 1), std=0.2)
    return model


@pytest.fixture(scope="module")
def in_one_file(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Callable[[str], tuple[Path, Any]]:
    """A file of a mix of types, and the model with its numbers in transformers."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(mix: str) -> tuple[Path, Any]:
        if mix not in made:
            case, kinds = MIXES[mix]
            if case == "wide":
                model = wide()
            else:
                model = blocks_fit(tiny(case).model)
            file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
            write(file, model, kinds)
            made[mix] = file, model
        return made[mix]

    return get


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def all_logits(file: Path, expand: bool) -> AllLogits:
    path = find_checkpoint(file)
    return AllLogits(path, method=method_for(ModelSpec.from_dir(path), None, Dense(), expand=expand))


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_logits_are_transformers(in_one_file: Any, prompt: Any, drive: Any, mix: str, expand: bool) -> None:
    file, model = in_one_file(mix)
    ids = prompt(40, seed=1)
    driver = drive(all_logits(file, expand))
    seq, seen = driver.new(), []
    for part in (ids[:30], ids[30:39], ids[39:]):
        driver.step([driver.ask(seq, part)])
        seen.append(driver.runner.seen)
    right = logits(model, ids)
    assert right.std() > 0.1
    torch.testing.assert_close(torch.cat(seen), right, atol=3e-4, rtol=1e-4)


def test_scaled_positions(tmp_path: Path, tiny: Any, prompt: Any, drive: Any) -> None:
    """Converters write Llama 3.1's scaling as factors of frequencies."""
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = blocks_fit(tiny("llama").model, rope_parameters=rope, head_dim=64)
    found = model.model.rotary_emb.inv_freq
    factors = 500000.0 ** (-torch.arange(0, 64, 2) / 64) / found
    assert factors.max() > 1.5
    ids = prompt(60, seed=2)
    write(tmp_path / "a.gguf", model, {"": "F32"}, factors=factors.tolist())
    driver = drive(all_logits(tmp_path / "a.gguf", False))
    driver.step([driver.ask(driver.new(), ids)])
    torch.testing.assert_close(driver.runner.seen, logits(model, ids), atol=3e-4, rtol=1e-4)
    write(tmp_path / "b.gguf", model, {"": "F32"}, factors=(factors + 0.5).tolist())
    with pytest.raises(ModelLoadError, match=r"'rope_freqs\.weight' is not a known kind of scaling"):
        find_checkpoint(tmp_path / "b.gguf")


def test_several_files_and_ranks(tmp_path: Path, tiny: Any, prompt: Any, drive: Any) -> None:
    model = blocks_fit(tiny("llama").model)
    write(tmp_path / "m.gguf", model, {"": "Q8_0", "v_proj": "F16"}, parts=8)
    files = sorted(tmp_path.glob("*.gguf"))
    assert [file.name for file in files][:2] == ["m-00001-of-00004.gguf", "m-00002-of-00004.gguf"]
    path, ids = find_checkpoint(files[0]), prompt(30, seed=3)
    with torch.inference_mode():
        right = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    for size in (1, 2):
        config = RunnerConfig(
            max_total_tokens=512,
            dtype="float32",
            device="cpu",
            threads=1,
            tp_size=size,
            expand_weights="never",
        )
        with contextlib.closing(RanksHere(path, size, config)) as ranks:
            assert drive(ranks).generate([ids], 8) == [right[0, 30:].tolist()]
    files[2].unlink()
    shutil.rmtree(path)
    with pytest.raises(ModelLoadError, match=r"m-00003-of-00004.gguf: the file is missing"):
        find_checkpoint(files[0])


def test_an_engine_takes_the_path_of_a_file(tmp_path: Path) -> None:
    """The bundled model in one file, its tokenizer beside it, says what it says from its directory."""
    pocket = find_checkpoint("pocket")
    model = transformers.LlamaForCausalLM.from_pretrained(pocket, dtype=torch.float32)
    write(tmp_path / "p.gguf", model, {"": "BF16"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pocket / name, tmp_path)
    texts = []
    for path in ("pocket", str(tmp_path / "p.gguf")):
        with Engine(model=path, device="cpu", dtype="float32", threads=1) as engine:
            ask = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
            texts.append(engine.generate("What is the capital of France?", sampling_params=ask)["text"])
    assert texts[0] == texts[1]
    assert texts[0].strip()


def test_the_directory_is_made_once_for_a_file(in_one_file: Any, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    shutil.copy(in_one_file("plain")[0], file)
    first = find_checkpoint(file)
    assert find_checkpoint(str(file)) == first
    spec = ModelSpec.from_dir(first)
    assert spec.quantization is not None
    assert spec.quantization.method == "gguf"
    assert (spec.hidden_size, spec.num_kv_heads, spec.eos_ids) == (64, 2, (2,))
    (tmp_path / "tokenizer.json").write_text("{}")
    second = find_checkpoint(file)
    assert second != first
    assert (second / "tokenizer.json").read_text() == "{}"
    assert json.loads((first / "tokenizer.json").read_text())["model"]["type"] == "BPE"


def _patched(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(data)


def test_files_that_cannot_be_read(in_one_file: Any, tmp_path: Path) -> None:
    whole = in_one_file("plain")[0]
    broken: dict[str, tuple[Callable[[Path], Any], str]] = {
        "empty": (lambda file: file.write_bytes(b""), "cannot be read"),
        "other": (lambda file: file.write_bytes(b"GGML" + bytes(60)), "does not begin with GGUF"),
        "old": (lambda file: _patched(file, 4, b"\1"), "format version 1,"),
        "short": (lambda file: file.write_bytes(whole.read_bytes()[:300]), "not a whole GGUF file"),
        "cut": (lambda file: file.write_bytes(whole.read_bytes()[:-4000]), "cut off within"),
    }
    for name, (harm, told) in broken.items():
        file = tmp_path / f"{name}.gguf"
        shutil.copy(whole, file)
        harm(file)
        with pytest.raises(ModelLoadError, match=told):
            find_checkpoint(file)


def test_what_a_file_has_that_is_not_computed(tmp_path: Path, tiny: Any) -> None:
    model = blocks_fit(tiny("llama").model)
    for values, told in (
        ({"llama.expert_count": 4}, "mixtures of experts are not supported"),
        ({"llama.rope.scaling.type": "longrope"}, "the rotary scaling 'longrope' is not supported"),
    ):
        write(tmp_path / "m.gguf", model, {"": "Q8_0"}, values=values)
        with pytest.raises(ModelLoadError, match=told):
            find_checkpoint(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    at = data.index(b"llama")  # general.architecture comes first
    (tmp_path / "m.gguf").write_bytes(data[:at] + b"mamba" + data[at + 5 :])
    with pytest.raises(ModelLoadError, match="'mamba' are not supported; known: llama, qwen2, qwen3"):
        find_checkpoint(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(data)
    place = read_header(tmp_path / "m.gguf").tensors["token_embd.weight"]
    at = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16
    assert place.kind.name == "Q8_0"
    assert data[at] == 8
    (tmp_path / "m.gguf").write_bytes(data[:at] + b"\x0b" + data[at + 1 :])
    with pytest.raises(ModelLoadError, match=r"'token_embd\.weight' is stored in ggml's type 11"):
        find_checkpoint(tmp_path / "m.gguf")

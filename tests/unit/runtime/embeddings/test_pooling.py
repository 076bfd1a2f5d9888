"""What a checkpoint's own files say of pooling, and how options overrule them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.config.engine import EngineConfig
from runtime.config.pooling import DECODER_DEFAULT, ENCODER_DEFAULT, Pooling, read_pooling
from runtime.protocol.errors import BadRequest, ModelLoadError

KIND = "sentence_transformers.models."


def write(path: Path, steps: Any = None, **config: Any) -> Path:
    if steps is not None:
        listed = [{"idx": 0, "path": folder, "type": KIND + kind} for kind, folder in steps.items()]
        (path / "modules.json").write_text(json.dumps(listed))
    if config:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return path


MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def test_defaults(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, ENCODER_DEFAULT) == Pooling("cls", True)
    assert read_pooling(tmp_path, DECODER_DEFAULT) == Pooling("last", True)


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        (MEAN, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
    ],
)
def test_the_checkpoints_mode(tmp_path: Path, config: dict[str, Any], mode: str) -> None:
    assert read_pooling(write(tmp_path, **config), ENCODER_DEFAULT) == Pooling(mode, True)


def test_modules_say_whether_vectors_have_length_1(tmp_path: Path) -> None:
    steps = {"Transformer": "", "Pooling": "1_Pooling"}
    write(tmp_path, steps, **MEAN)
    assert read_pooling(tmp_path, ENCODER_DEFAULT) == Pooling("mean", False)
    (tmp_path / "modules.json").unlink()
    write(tmp_path, {**steps, "Normalize": "2_Normalize"})
    assert read_pooling(tmp_path, ENCODER_DEFAULT) == Pooling("mean", True)
    assert read_pooling(tmp_path, ENCODER_DEFAULT, mode="max", normalize=False) == Pooling("max", False)


@pytest.mark.parametrize(
    ("steps", "config", "words"),
    [
        ({"Dense": "2_Dense"}, MEAN, "Dense"),
        ({"Pooling": "../elsewhere"}, MEAN, "within the directory"),
        (None, {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        (None, {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, r"mean \+ max"),
        (None, {"pooling_mode_mean_tokens": "yes"}, "true or false"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, steps: Any, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelLoadError, match=words):
        read_pooling(write(tmp_path, steps, **config), ENCODER_DEFAULT)


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"type": 1}]', "[" * 100_000])
def test_broken_modules(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"modules\.json"):
        read_pooling(tmp_path, ENCODER_DEFAULT)


def test_the_option_is_checked() -> None:
    with pytest.raises(BadRequest, match="cls, mean, last, max"):
        EngineConfig.of({"pooling": "sum"})
    assert EngineConfig.of({"pooling": "max", "normalize_embeddings": False}).pooling == "max"

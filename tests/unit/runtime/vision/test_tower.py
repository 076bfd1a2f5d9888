"""Pixels, features, positions and logits equal transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from runtime.config.model import ModelSpec
from runtime.config.parts.vision import ImageOptions
from runtime.layers.dense import Dense
from runtime.models.decoder import Decoder
from runtime.models.vision.store import ImageStore
from runtime.plan import Image, MediaSpan, Row, Run
from runtime.processes.frontend.images.pictures import PictureReader, smart_size
from runtime.protocol.errors import ModelLoadError
from runtime.protocol.messages import ImageData
from runtime.protocol.sampling import SamplingParams
from tests.unit.runtime.vision.making import PAD, TOWERS, Case, data_url, ids_of, picture

SIZES = ((84, 56), (140, 196), (28, 28), (300, 60), (5, 900), (700, 500))
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def decoder_of(case: Case) -> Decoder:
    spec = ModelSpec.from_dir(case.path)
    return Decoder.load(case.path, spec, torch.float32, torch.device("cpu"), Dense())


def read(case: Case, *sizes: tuple[int, int]) -> list[Image]:
    vision = ModelSpec.from_dir(case.path).vision
    assert vision is not None
    reader = PictureReader(vision, ImageOptions())
    urls = [ImageData(data_url(picture(*size, seed=seed))) for seed, size in enumerate(sizes)]
    return [
        Image(number, one.height, one.width, one.pixels)
        for number, one in enumerate(reader.read(urls, 10_000), start=1)
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", TOWERS)
@torch.inference_mode()
def test_a_pictures_tokens(family: str, size: tuple[int, int], checkpoint: Callable[..., Case]) -> None:
    case = checkpoint(family)
    tower = decoder_of(case).tower
    assert tower is not None
    (image,) = read(case, size)
    pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(image.height, image.width, 3)
    values, grid = case.pixels([picture(*size)])
    assert grid.tolist() == [[1, image.height // 14, image.width // 14]]
    torch.testing.assert_close(tower.patches(pixels), values, atol=2e-6, rtol=0)
    right = case.model.model.visual(values, grid_thw=grid).pooler_output
    assert right.std() > 1
    torch.testing.assert_close(tower(pixels), right, atol=2e-4, rtol=1e-4)


def test_sizes_are_transformers() -> None:
    for height in (28, 29, 100, 777, 2000):
        for width in (28, 43, 500, 3001):
            given = {"min_pixels": 3136, "max_pixels": 1003520}
            if max(height, width) <= 200 * min(height, width):
                assert smart_size(height, width, 28, 3136, 1003520) == smart_resize(height, width, **given)


def test_new_names_and_old_ones_hold_the_same(checkpoint: Callable[..., Case]) -> None:
    old, new = (decoder_of(checkpoint(layout=layout)) for layout in ("old", "new"))
    assert old.tower is not None
    assert new.tower is not None
    pixels = torch.randint(0, 256, (56, 84, 3), dtype=torch.uint8)
    with torch.inference_mode():
        assert torch.equal(old.tower(pixels), new.tower(pixels))
        hidden = torch.randn(2, old.spec.hidden_size)
        assert torch.equal(old.logits(hidden), new.logits(hidden))


def test_a_configuration_as_it_was_published(checkpoint: Callable[..., Case], tmp_path: Path) -> None:
    """The decoder's fields beside the tower's, rotary sections under "mrope", in_chans."""
    case = checkpoint()
    told = json.loads((case.path / "config.json").read_text())
    text = told.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    told["vision_config"]["in_chans"] = told["vision_config"].pop("in_channels")
    (tmp_path / "config.json").write_text(json.dumps({**text, **told, "model_type": "qwen2_5_vl"}))
    for name in ("preprocessor_config.json", "generation_config.json"):
        (tmp_path / name).write_text((case.path / name).read_text())
    assert ModelSpec.from_dir(tmp_path) == ModelSpec.from_dir(case.path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_config": None}, "vision_config"),
        ({"image_token_id": 5000}, "image_token_id"),
        ({"vision_config": {"hidden_size": 32, "out_hidden_size": 48, "num_heads": 2}}, "output size is 48"),
        ({"vision_config": {"hidden_size": 30, "num_heads": 4}}, "heads"),
    ],
)
def test_what_does_not_fit_is_said(
    changes: dict[str, Any], message: str, checkpoint: Callable[..., Case], tmp_path: Path
) -> None:
    told = json.loads((checkpoint().path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**told, **changes}))
    with pytest.raises(ModelLoadError, match=message):
        ModelSpec.from_dir(tmp_path)


def test_positions_wherever_a_prompt_is_cut(checkpoint: Callable[..., Case]) -> None:
    """Time, row and column of every token, and what the output goes on with."""
    case = checkpoint()
    images = read(case, (140, 100), (60, 200))
    tower = decoder_of(case).tower
    assert tower is not None
    store = ImageStore(tower)
    store.load(images)
    pictures = [picture(140, 100, 0), picture(60, 200, 1)]
    given = case.inputs(ids_of(f"ab{IMAGE} c {IMAGE}{IMAGE}d"), [*pictures, pictures[0]])
    right, delta = case.model.model.get_rope_index(
        given["input_ids"], given["mm_token_type_ids"], given["image_grid_thw"]
    )
    ids = given["input_ids"][0].tolist()
    items = [1, 2, 1]
    starts = [at for at, token in enumerate(ids) if token == PAD and ids[at - 1] != PAD]
    lengths = [store.tokens(item) for item in items]
    for size in (1, 4, 7, 1000):
        found = []
        for start in range(0, len(ids), size):
            end, shift, media = min(start + size, len(ids)), 0, []
            for item, first, length in zip(items, starts, lengths):
                if first + length <= start:
                    shift += max(grid_of(images[item - 1])) - length
                elif first < end:
                    begin = max(first, start)
                    stop = min(first + length, end)
                    media.append(MediaSpan(item, begin - first, begin - start, stop - begin))
            row = Row(
                1, tuple(ids[start:end]), start, (Run(0, end - start),), SamplingParams(),
                media=tuple(media), shift=shift,
            )  # fmt: skip
            found.append(store.positions(row))
        assert torch.equal(torch.cat(found, 1), right[:, 0])
    assert sum(max(grid_of(images[item - 1])) for item in items) - sum(lengths) == int(delta)


def grid_of(image: Image) -> tuple[int, int]:
    return image.height // 28, image.width // 28

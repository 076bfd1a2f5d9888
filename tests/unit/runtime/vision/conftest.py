"""Tiny checkpoints that take pictures, each made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.unit.runtime.vision.making import Case, make


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """checkpoint(family, layout=...): see make()."""
    made: dict[Any, Case] = {}

    def get(family: str = "Qwen2_5_VL", **words: Any) -> Case:
        key = family, *sorted(words.items())
        if key not in made:
            made[key] = make(tmp_path_factory.mktemp("vision"), family, **words)
        return made[key]

    return get

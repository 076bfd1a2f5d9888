"""unit/runtime/lora/test_adapted_model.py, at length."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from runtime.config.runner import RunnerConfig
from runtime.plan import Adapter
from tests.unit.runtime.engine.checkpoints.expert_families import EXPERTS
from tests.unit.runtime.engine.checkpoints.families import FAMILIES
from tests.unit.runtime.engine.ranks.ranks_here import RanksHere
from tests.unit.runtime.lora.making import make_adapter
from tests.unit.runtime.lora.test_adapted_model import DIFFERENT, SETTINGS, greedy
from tests.unit.runtime.lora.test_adapted_model import test_every_family_takes_adapters as check


@pytest.mark.parametrize("name", [*FAMILIES, *EXPERTS])
def test_ranks_of_every_family_share_adapters(
    name: str, tiny: Any, prompt: Any, drive: Any, tmp_path: Path
) -> None:
    base, ids = tiny(name), prompt(30)
    made = make_adapter(tmp_path / "a", base.model, modules=None)
    given = (Adapter(1, "a", str(made.path)),)
    config = RunnerConfig(**{**SETTINGS, "tp_size": 2, "adapters": given})
    with contextlib.closing(RanksHere(base.path, 2, config)) as run:
        found = [drive(run, page=1).generate([ids], 5, chunk=11, adapter=number)[0] for number in (0, 1)]
    assert found == [greedy(model, ids, 5) for model in (base.model, made.model)]


@pytest.mark.parametrize("name", [name for name in [*FAMILIES, *EXPERTS] if name not in DIFFERENT])
def test_every_family_takes_adapters(name: str, tiny: Any, prompt: Any, drive: Any, tmp_path: Path) -> None:
    check(name, tiny, prompt, drive, tmp_path)

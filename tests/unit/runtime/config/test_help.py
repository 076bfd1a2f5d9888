"""The help names what there is to choose from."""

from __future__ import annotations

import re

import pytest

from runtime.cache.radix import EVICTION
from runtime.config.engine import EngineConfig
from runtime.config.flags import make_parser
from runtime.config.runner import COMPUTE_DTYPES
from runtime.protocol.registry import Registry
from runtime.scheduler.policies import POLICIES


@pytest.mark.parametrize(("option", "table"), [("schedule_policy", POLICIES), ("eviction_policy", EVICTION)])
def test_every_policy_is_named(option: str, table: Registry[object]) -> None:
    text = EngineConfig.help_texts()[option]
    for name in table:
        assert re.search(rf"\b{name}\b", text), name


def test_every_type_of_number_is_named() -> None:
    text = EngineConfig.help_texts()["dtype"]
    assert all(name in text for name in COMPUTE_DTYPES)


def test_the_help_begins_with_what_it_is_for() -> None:
    text = make_parser("python -m runtime serve").format_help()
    assert text.startswith(
        "usage: python -m runtime serve [--config FILE] [options]\n\nServe a model over HTTP"
    )

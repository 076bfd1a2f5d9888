"""process/runtime/lora/test_engine_adapters.py, at length."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runtime.api import Engine
from runtime.protocol.errors import AdapterError
from runtime.protocol.io_struct import GenerateReqInput
from tests.process.runtime.disagg.test_engine_pair import Pair
from tests.process.runtime.lora.test_engine_adapters import (
    GREEDY,
    PROMPT,
    SMALL,
    adapters,
    base,
    check_many,
    engine,
    right,
)
from tests.unit.runtime.lora.making import Made


def test_two_ranks(adapters: dict[str, Made], right: Any) -> None:
    with Engine("pocket", tp_size=2, lora_paths=[f"one={adapters['one'].path}"], **SMALL) as engine:
        check_many(engine, adapters, right)
        with pytest.raises(AdapterError, match="holds no adapter_config"):
            engine.load_lora_adapter("new", str(adapters["one"].path.parent))
        check_many(engine, adapters, right)


def test_prompts_and_outputs_in_two_engines(adapters: dict[str, Made], right: Any) -> None:
    """Each has adapters of its own numbers: `two` is loaded first in one, last in the other."""
    pair = Pair("local", enable_lora=True)
    try:
        for engine, names in ((pair.prefill, ("one", "two")), (pair.decode, ("two", "one"))):
            for name in names:
                engine.load_lora_adapter(name, str(adapters[name].path))

        async def asked(name: str | None, room: int) -> list[int]:
            fields = {"text": PROMPT, "sampling_params": GREEDY, "bootstrap_room": room, "lora_path": name}
            both = [one.submit(GenerateReqInput(**fields, **pair.at)) for one in (pair.prefill, pair.decode)]
            return list((await asyncio.gather(*both))[1].output_ids)

        async def all_asked(names: list[str | None]) -> list[list[int]]:
            return await asyncio.gather(*(asked(name, 10 + room) for room, name in enumerate(names)))

        names = ["one", None, "two", "one", "two", None]
        assert asyncio.run(all_asked(names)) == [right(name) for name in names]
        pair.check_empty()
    finally:
        pair.close()


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_algorithm": "NGRAM"},
        {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "pocket"},
    ],
    ids=["prompt look-up", "draft model"],
)
def test_guesses_change_nothing(adapters: dict[str, Made], right: Any, options: dict[str, Any]) -> None:
    """The draft model guesses without the adapter: often wrongly."""
    with Engine(
        "pocket", lora_paths=[f"one={adapters['one'].path}"], runner_process=False, **SMALL, **options
    ) as engine:
        prompts = [PROMPT, "one two three one two three one two", PROMPT]
        names = ["one", "one", None]
        outputs = engine.generate(prompts, {**GREEDY, "max_new_tokens": 40}, lora_path=names)
        assert [list(one.output_ids) for one in outputs] == [
            right(name, text, 40) for name, text in zip(names, prompts)
        ]
        assert sum(one.meta.get("spec_verify_ct", 0) for one in outputs) > 0

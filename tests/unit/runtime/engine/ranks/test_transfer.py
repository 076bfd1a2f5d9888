"""A prompt computed in one place and decoded in another: two schedulers with a pool each, the pages of one
exported, copied and adopted by the other, give what one of them gives alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.attention.base import choose
from runtime.attention.pool import KVPool, KVShape
from runtime.cache.pages import split
from runtime.config.checkpoints import find_checkpoint
from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.config.scheduler import SchedulerConfig
from runtime.engine.runner import TorchRunner
from runtime.layers.dense import Dense
from runtime.models.decoder import Decoder
from runtime.plan import Sample
from runtime.protocol.io_struct import TokenizedGenerateReqInput, TokenOutput
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.loop import Loop
from runtime.scheduler.requests.request import Request
from runtime.scheduler.requests.stop import LENGTH
from runtime.scheduler.scheduler import Scheduler
from runtime.scheduler.stage import Stage
from tests.unit.runtime.cache.pages_between_pools import Adoption, Export

NEW = 24
PROMPTS = {
    f"{number}": [random.Random(cut).randrange(3, 1000) for _ in range(cut)]
    + [random.Random(number).randrange(3, 1000) for _ in range(own)]
    for number, (cut, own) in enumerate([(0, 1), (0, 40), (64, 9), (64, 30), (64, 0), (33, 17)])
}


class Place:
    """A scheduler, a runner, and the pool they share."""

    def __init__(self, path: Path, page: int, slots: int, *, overlap: bool, stage: Any = Stage) -> None:
        spec, device = ModelSpec.from_dir(path), torch.device("cpu")
        with torch.inference_mode():
            decoder = Decoder.load(path, spec, torch.float32, device, Dense())
            shape = KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, torch.float32, device)
            attention = choose("auto", device)(shape, slots, spec.num_heads, spec.windows)
        self.pool: KVPool = attention.pool
        self.runner = TorchRunner(decoder, attention, RunnerConfig(dtype="float32", device="cpu"))
        size = self.runner.vocab_size
        self.scheduler = Scheduler(
            SchedulerConfig(page_size=page, chunked_prefill_size=32),
            slots=slots,
            vocabulary=Vocabulary(tuple(b"x" for _ in range(size)), frozenset({0}), frozenset({0})),
            encode=lambda _: [],
            grammar=None,
            stage=stage,
        )
        self._loop = Loop(self.scheduler, self.runner, overlap=overlap)
        self.outputs: dict[str, TokenOutput] = {}

    def add(self, rid: str) -> None:
        params = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
        self.scheduler.add(TokenizedGenerateReqInput(rid=rid, input_ids=PROMPTS[rid], sampling_params=params))

    def tick(self) -> None:
        self.outputs |= {one.rid: one for one in self._loop.step()}
        if not self._loop.in_flight:
            self.scheduler.check()

    def empty(self) -> bool:
        self.scheduler.check()
        return self.scheduler.flush_cache() and self.scheduler.state()["free"] == self.scheduler.manager.slots


class Prefill(Stage):
    """Ends each request where its prompt is done, and leaves its pages in `exports`."""

    def __init__(self, *parts: Any, exports: dict[str, Export]) -> None:
        super().__init__(*parts)
        self._exports = exports

    def prompt_done(self, request: Request, sample: Sample, now: float) -> None:
        super().prompt_done(request, sample, now)
        self._exports[request.rid] = Export(self.manager, request.tokens[: request.computed])
        request.end(LENGTH)


class Decode(Stage):
    """Lets a request in once its pages are in `exports`, and has copied them by then."""

    def __init__(self, *parts: Any, exports: dict[str, Export], source: KVPool, pools: list[KVPool]) -> None:
        super().__init__(*parts)
        self._exports, self._source, self._pools = exports, source, pools
        self._adopted: set[str] = set()

    def before_first_decode(self, request: Request) -> bool:
        if request.rid in self._adopted:
            return True
        export = self._exports.get(request.rid)
        if export is None:
            return False
        adoption = Adoption(self.manager, export.tokens)
        if not adoption.reserve():
            adoption.release()
            return False
        if adoption.runs:
            target, missing = self._pools[0], split(export.runs, adoption.start)[1]
            with torch.inference_mode():
                target.kv[target.index_of(adoption.runs)] = self._source.kv[self._source.index_of(missing)]
        assert adoption.commit()
        adoption.release()  # where there is no room for it yet, others may need that more
        export.release()
        self._adopted.add(request.rid)
        return True


@pytest.fixture(scope="module")
def alone() -> Iterator[dict[str, list[int]]]:
    place = Place(find_checkpoint("pocket"), 1, 2048, overlap=False)
    for rid in PROMPTS:
        place.add(rid)
    while place.scheduler.busy:
        place.tick()
    yield {rid: one.new_ids for rid, one in place.outputs.items()}
    place.runner.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("page", "slots"), [(1, 2048), (16, 2048), (4, 160)])
def test_the_same_tokens_in_two_places(
    alone: dict[str, list[int]], page: int, slots: int, overlap: bool
) -> None:
    """The last pool is too small for all: they take turns, and may have to compute again what they had."""
    path, exports, pools = find_checkpoint("pocket"), dict[str, Export](), list[KVPool]()
    here = Place(path, page, 1024, overlap=overlap, stage=partial(Prefill, exports=exports))
    there = Place(
        path, page, slots, overlap=overlap,
        stage=partial(Decode, exports=exports, source=here.pool, pools=pools),
    )  # fmt: skip
    pools.append(there.pool)
    for rid in PROMPTS:
        there.add(rid)
    there.tick()
    assert there.scheduler.running == 0, "nothing is there to decode from"
    for rid in PROMPTS:
        here.add(rid)
    for _ in range(5_000):
        if here.scheduler.busy:
            here.tick()
        there.tick()
        if not (here.scheduler.busy or there.scheduler.busy):
            break
    assert {rid: one.new_ids for rid, one in there.outputs.items()} == alone
    assert all(one.new_ids == [] for one in here.outputs.values())
    assert all(one.finish is not None and one.finish.type == "length" for one in there.outputs.values())
    for rid, one in there.outputs.items() if slots > 1000 else ():
        assert one.cached_tokens >= (len(PROMPTS[rid]) - 1) // page * page
    assert here.empty()
    assert there.empty()
    here.runner.close()
    there.runner.close()


def test_whose_pages_never_come_can_be_cancelled_and_holds_up_nobody(alone: dict[str, list[int]]) -> None:
    path, exports, pools = find_checkpoint("pocket"), dict[str, Export](), list[KVPool]()
    here = Place(path, 4, 512, overlap=False, stage=partial(Prefill, exports=exports))
    there = Place(
        path, 4, 512, overlap=False, stage=partial(Decode, exports=exports, source=here.pool, pools=pools)
    )
    pools.append(there.pool)
    for rid in ("1", "2"):
        there.add(rid)
    here.add("2")
    while here.scheduler.busy:
        here.tick()
    assert not here.empty(), "what is exported stays"
    while "2" not in there.outputs:
        there.tick()
    assert there.outputs["2"].new_ids == alone["2"]
    assert there.scheduler.abort("1") == 1
    there.tick()
    assert there.outputs["1"].finish is not None
    assert here.empty()
    assert there.empty()
    here.runner.close()
    there.runner.close()

"""Memory of a running engine is given back and taken again: it really falls, requests are refused meanwhile,
and the same comes out afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.api import Engine
from runtime.config.engine import EngineConfig
from runtime.config.serving.server import ServerConfig
from runtime.processes.pipeline.launch import launch
from runtime.processes.pipeline.verbs import Verbs
from runtime.protocol.control import ControlOutput, GetStateReq, ReleaseMemoryReq, ResumeMemoryReq
from runtime.protocol.errors import BadRequest, ModelLoadError, NotReady, NotSupported, RuntimeFault
from runtime.server.app import build_app
from tests.process.patience import PROGRAM_S
from tests.process.runtime.api.conftest import CHATML, write_model, write_tokenizer
from tests.process.runtime.server.conftest import listening
from tests.unit.runtime.scheduler.fake import FakeRunner

PROMPTS = ["The quick brown fox", "She said: ", "The quick brown fox jumps"]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
ENDLESS = {**GREEDY, "max_new_tokens": 400}
WORDS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_total_tokens": 2048}
MEMORY = """
import json, sys
from pathlib import Path
import psutil, torch
from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine.runner import TorchRunner

def rss():
    return psutil.Process().memory_info().rss

path = Path(sys.argv[1])
config = RunnerConfig(max_total_tokens=100_000, device="cpu", dtype="float32", attention="native")
runner = TorchRunner.load(path, ModelSpec.from_dir(path), config, beside=False)
pool = runner._attention.pool.kv
size = pool.nbytes
with torch.inference_mode():
    pool.fill_(1.0)  # pages that were never written take no memory
del pool
seen = [rss()]
for parts in (("kv_cache",), ("weights",)):
    runner.release_memory(parts)
    seen.append(rss())
runner.restore_memory(("weights", "kv_cache"), str(path))
seen.append(rss())
assert runner.slots == 100_000 and not runner._attention.pool.kv.any()
weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
print(json.dumps({"pool": size, "weights": weights, "seen": seen}))
"""


@pytest.fixture(scope="module", params=[{"runner_process": False}, {"tp_size": 2}], ids=["here", "ranks"])
def running(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Engine]:
    with Engine(str(checkpoint), **WORDS, **request.param) as made:
        yield made


def texts(engine: Engine) -> list[str]:
    return [str(one["text"]) for one in engine.generate(PROMPTS, GREEDY)]


def until_live(engine: Engine) -> None:
    while engine.control(GetStateReq()).data["live"] < len(PROMPTS):
        time.sleep(0.01)


def test_memory_falls(tmp_path: Path) -> None:
    """In a process of its own, which nothing else fills."""
    write_model(tmp_path, vocab=60_000)  # the embedding and the head: 30 MB
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, timeout=PROGRAM_S
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    full, no_pool, nothing, again = told["seen"]
    assert full - no_pool > 0.9 * told["pool"]
    assert no_pool - nothing > 0.7 * told["weights"]
    assert again < full + 0.2 * told["pool"]


@pytest.mark.parametrize("tags", [("kv_cache",), ("weights",), ("kv_cache", "weights")])
def test_the_same_comes_out_afterwards(running: Engine, tags: Any) -> None:
    before = texts(running)
    running.release_memory_occupation(tags)
    running.release_memory_occupation(tags)  # it is already
    with pytest.raises(NotReady, match="the model is asleep"):
        texts(running)
    running.resume_memory_occupation(tags)
    running.resume_memory_occupation()
    assert texts(running) == before
    assert running.state()["released"] == []


def test_weights_that_were_changed_come_back(checkpoint: Path, tmp_path: Path) -> None:
    write_model(tmp_path, seed=5)
    write_tokenizer(tmp_path, 380, chat_template=CHATML)
    with Engine(str(checkpoint), **WORDS, runner_process=False) as engine:
        engine.update_weights_from_disk(str(tmp_path))
        wanted = texts(engine)
        engine.release_memory_occupation()
        with pytest.raises(BadRequest, match="the weights were given back"):
            engine.update_weights_from_disk(str(checkpoint))
        moved = tmp_path / "moved"
        (tmp_path / "model.safetensors").rename(moved)
        with pytest.raises(ModelLoadError):
            engine.resume_memory_occupation()
        with pytest.raises(NotReady):
            texts(engine)
        moved.rename(tmp_path / "model.safetensors")
        engine.resume_memory_occupation(["kv_cache"])
        with pytest.raises(NotReady):  # half of it is not enough
            texts(engine)
        engine.resume_memory_occupation(["weights"])
        assert texts(engine) == wanted
        engine.release_memory_occupation(["kv_cache"])
        engine.update_weights_from_disk(str(checkpoint))
        engine.resume_memory_occupation()
        assert texts(engine) != wanted


def test_random_weights_stay(checkpoint: Path) -> None:
    with Engine(str(checkpoint), **WORDS, load_format="dummy", runner_process=False) as engine:
        before = texts(engine)
        with pytest.raises(BadRequest, match="random weights"):
            engine.release_memory_occupation()
        engine.release_memory_occupation(["kv_cache"])
        engine.resume_memory_occupation()
        assert texts(engine) == before


def test_weights_under_adapters_stay(checkpoint: Path) -> None:
    with Engine(str(checkpoint), **WORDS, enable_lora=True, runner_process=False) as engine:
        before = texts(engine)
        with pytest.raises(BadRequest, match="LoRA"):
            engine.release_memory_occupation()
        assert texts(engine) == before


def test_requests_in_hand_are_waited_for_or_cancelled(running: Engine) -> None:
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(running.generate, prompt, ENDLESS) for prompt in PROMPTS]
        until_live(running)
        running.release_memory_occupation()
        for one in asked:
            assert one.result(300)["meta_info"]["completion_tokens"] == 400
        running.resume_memory_occupation()
        running.pause("in_place")  # then none ends by itself
        asked = [pool.submit(running.generate, prompt, ENDLESS) for prompt in PROMPTS]
        until_live(running)
        late = running.control(ReleaseMemoryReq(parts=("kv_cache",), timeout_s=0.1))
        assert not late.ok
        assert "requests are not finished" in late.message
        assert running.state()["released"] == []
        waiting = pool.submit(running.control, ReleaseMemoryReq(parts=("kv_cache",), timeout_s=60.0))
        while running.control(ResumeMemoryReq(parts=("kv_cache",))).ok and not waiting.done():
            time.sleep(0.01)  # whoever wakes it does not want it to sleep later
        assert not waiting.result(300).ok
        assert running.control(ReleaseMemoryReq(parts=("kv_cache",), abort=True, timeout_s=60.0)).ok
        for one in asked:
            with pytest.raises(RuntimeFault, match="goes to sleep"):
                one.result(300)
        running.resume()
        with pytest.raises(NotReady):
            texts(running)
        running.resume_memory_occupation()
        assert texts(running)


def test_the_routes(checkpoint: Path) -> None:
    pipeline = launch(EngineConfig(model=str(checkpoint), **WORDS, runner_process=False))
    config = ServerConfig(admin_api_key="root")
    admin = {"authorization": "Bearer root"}
    body = {"text": PROMPTS, "sampling_params": GREEDY}
    try:
        app = build_app(pipeline.manager, config)
        with listening(app, config) as server, httpx.Client(base_url=server.url, timeout=300) as client:
            before = [one["text"] for one in client.post("/generate", json=body).json()]
            assert client.post("/sleep", json={}).status_code == 401
            assert client.get("/sleep", headers=admin).status_code == 405
            assert client.get("/is_sleeping").json() == {"is_sleeping": False}
            pairs = [
                ("/sleep", {}, "/wake_up", {}),
                ("/sleep?level=2&mode=abort&timeout=5", {}, "/wake_up?tags=weights&tags=kv_cache", {}),
                ("/release_memory_occupation", {}, "/resume_memory_occupation", {"tags": None}),
                (
                    "/release_memory_occupation", {"tags": ["weights", "cuda_graph"]},
                    "/resume_memory_occupation", {"tags": ["weights"]},
                ),
            ]  # fmt: skip
            for sleep, asked, wake, parts in pairs:
                made = client.post(sleep, json=asked, headers=admin)
                assert (made.status_code, made.json()["success"]) == (200, True), made.text
                assert client.get("/is_sleeping").json() == {"is_sleeping": True}
                for streams in (False, True):
                    refused = client.post("/generate", json={**body, "text": "x", "stream": streams})
                    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1"), refused.text
                    assert "asleep" in refused.json()["error"]["message"]
                ready = client.get("/ready")
                assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
                assert client.get("/health_generate").status_code == 200
                assert client.post(wake, json=parts, headers=admin).status_code == 200
                while client.get("/ready").status_code != 200:
                    time.sleep(0.01)
                assert [one["text"] for one in client.post("/generate", json=body).json()] == before
            for wrong in ("/sleep?level=3", "/sleep?mode=later", "/sleep?timeout=-1", "/wake_up?tags=all"):
                assert client.post(wrong, headers=admin).status_code == 400
            none = client.post("/release_memory_occupation", json={"tags": []}, headers=admin)
            assert none.status_code == 400
    finally:
        pipeline.close()


def test_a_pool_that_other_engines_read_stays() -> None:
    scheduler: Any = None  # it is not asked
    runner, answers = FakeRunner(64, 16), list[ControlOutput]()
    verbs = Verbs(scheduler, runner, None, answers.append, time.monotonic, (), shared=True)
    verbs.take(ReleaseMemoryReq(parts=("kv_cache",)))
    assert answers[0].data["code"] == "not_supported"
    assert "other engines read" in answers[0].message

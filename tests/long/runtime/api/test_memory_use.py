"""process/runtime/api/test_memory_use.py, at length."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.process.patience import PROGRAM_S

REQUESTS, WARM = 10_000, 10_000


GROWN_MIB, GROWN_OBJECTS = 32.0, 1_000  # of some 340, and 200,000; 11 to 21 MiB were seen, and 40 objects


PROGRAM = """
import gc, json, random, sys
import psutil
from runtime.api import Engine
from runtime.protocol.sampling import SamplingParams

def look():
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20, len(gc.get_objects())

draw = random.Random(1)
params = SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True)
with Engine("pocket", max_total_tokens=1024, threads=1, runner_process=False) as engine:
    def ask(count):
        for _ in range(count // 100):
            prompts = [[draw.randrange(20, 1280) for _ in range(draw.randint(2, 6))] for _ in range(100)]
            assert all(len(out.output_ids) == 2 for out in engine.generate(prompts, params))
    seen = []
    for part in json.loads(sys.argv[1]):
        ask(part)
        seen.append(look())
print(json.dumps(seen))
"""


@pytest.mark.timeout(2 * PROGRAM_S)
def test_an_engine_does_not_grow() -> None:
    parts = [WARM, REQUESTS]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(parts)],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (warm, before), (end, after) = json.loads(done.stdout)  # all sizes of steps have come, and been compiled
    assert end - warm <= GROWN_MIB, f"MiB and objects after {parts} requests: {done.stdout}"
    assert after - before <= GROWN_OBJECTS, done.stdout  # a tenth of an object for each request

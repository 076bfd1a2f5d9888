"""A package of one file, none of ours, adds an attention implementation with a pool of its own; Engine and
the process of its model find it by the name in an option."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = '''
import torch
from runtime.attention.base import Attention
from runtime.attention.pool import KVPool

class PerLayer(KVPool):
    """Slots of one layer side by side, another layout than any of the built-in ones."""
    def __init__(self, shape, slots):
        size = (shape.layers, slots, 2 * shape.kv_heads, shape.head_dim)
        self.of_layer = torch.empty(size, dtype=shape.dtype, device=shape.device)
        super().__init__(self.of_layer.transpose(0, 1))

class Gathered(Attention):
    def make_pool(self, shape, slots):
        print("pool made by", __name__, flush=True)
        return PerLayer(shape, slots)

    def begin(self, plan):
        rows, first = [], 0
        for index, row in enumerate(plan.rows):
            mine = sorted((one for one in plan.segments if index in one.rows), key=lambda one: one.position)
            runs = [*(run for one in mine for run in one.runs), *row.slots]
            slots = torch.tensor([slot for start, length in runs for slot in range(start, start + length)])
            rows.append((first, first + len(row.tokens), row.position, slots))
            first += len(row.tokens)

        def attend(layer, qkv):
            out, pool = [], self.pool.of_layer[layer]
            for first, last, position, slots in rows:
                pool[slots[position:]] = qkv[first:last, self.heads :]
                query = qkv[first:last, : self.heads].transpose(0, 1)
                key, value = pool[slots].transpose(0, 1).repeat_interleave(self.group, 0).chunk(2)
                seen = torch.ones(last - first, len(slots), dtype=torch.bool).tril(position)
                made = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen)
                out.append(made.transpose(0, 1).flatten(1))
            return torch.cat(out)

        return attend
'''
PROGRAM = """
from runtime.api import Engine

def ask(name):
    with Engine("pocket", attention=name, runner_process=PROCESS) as engine:
        prompts = ["Q: Which river runs through Ostrel?\\nA:", "Q: Which river", "one two three"]
        words = {"temperature": 0.0, "max_new_tokens": 24}
        return [list(out.output_ids) for out in engine.generate(prompts * 2, words)]

if __name__ == "__main__":
    assert ask("gathered") == ask("auto")
"""


@pytest.mark.parametrize("process", [True, False])
def test_a_strangers_attention_is_found_by_its_name(tmp_path: Path, process: bool) -> None:
    (tmp_path / "stranger_attention.py").write_text(MODULE)
    info = tmp_path / "stranger_attention-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger-attention\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang_dsl.attention]\ngathered = stranger_attention:Gathered\n")
    (tmp_path / "program.py").write_text(PROGRAM.replace("PROCESS", str(process)))
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(tmp_path)))},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "pool made by stranger_attention" in done.stdout + done.stderr

"""This project's Engine, under the same interface as its peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sglang_dsl as sgl
from benchmarks.peers.adapter import serve
from benchmarks.programs import BRANCHES, CARD, CHAINS, LONG, SHORT, TURNS
from runtime.api import Engine
from runtime.protocol.sampling import SamplingParams
from sglang_dsl.backends.engine import EngineBackend

WAYS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32-off": {"dtype": "float32", "radix_cache": False, "jump_forward": False},
    "int8": {"dtype": "float32", "quantization": "w8a8_int8"},
}


@sgl.function
def tree(s: sgl.ProgramState, system: str, topic: str) -> None:
    s += f"{system}Question: {topic}?\n"
    level = [s]
    for name in ("Plan", "Answer", "Score"):
        forked = [state.fork(BRANCHES) for state in level]
        level = []
        for forks in forked:
            for number, fork in enumerate(forks):
                fork += f"{name} {number + 1}:" + sgl.gen(name, max_tokens=SHORT, ignore_eos=True) + "\n"
                level.append(fork)
    s.set_var("leaves", [fork.text() for fork in level])


@sgl.function
def chains(s: sgl.ProgramState, system: str, topic: str) -> None:
    s += f"{system}Question: {topic}?\n"
    forks = s.fork(CHAINS)
    for number, fork in enumerate(forks):
        fork += f"Way {number + 1}:" + sgl.gen("way", max_tokens=LONG, ignore_eos=True)
    for number, fork in enumerate(forks):
        s += f"Solution {number + 1}: " + fork["way"] + "\n"
    s += "Answer:" + sgl.gen("answer", max_tokens=LONG, ignore_eos=True)


@sgl.function
def card(s: sgl.ProgramState, system: str, topic: str) -> None:
    s += f"{system}A character from {topic}, as JSON:\n" + sgl.gen("card", max_tokens=200, regex=CARD)


@sgl.function
def turns(s: sgl.ProgramState, system: str, topic: str) -> None:
    s += system
    for word in topic.split()[:TURNS]:
        s += f"User: tell me of {word}.\nAssistant:" + sgl.gen(max_tokens=LONG, ignore_eos=True) + "\n"


PROGRAMS = {"tree of thought": tree, "chains": chains, "JSON": card, "turns": turns}


class Ours:
    shares = True

    def __init__(self, folder: Path, precision: str, threads: int) -> None:
        self._engine = Engine(str(folder), max_total_tokens=24_576, threads=threads, **WAYS[precision])
        self._backend = EngineBackend(self._engine)
        self.version = "this commit"

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        return [list(out.output_ids) for out in self._engine.generate(prompts, sampling)]

    def forget(self) -> None:
        self._engine.flush_cache()

    def program(self, name: str, items: list[list[str]]) -> list[str]:
        """All programs at once; their texts."""
        states = PROGRAMS[name].run_batch(
            [{"system": system, "topic": topic} for system, topic in items],
            num_threads=len(items), temperature=0, backend=self._backend,
        )  # fmt: skip
        return ["".join(state["leaves"]) if name == "tree of thought" else state.text() for state in states]


if __name__ == "__main__":
    serve(Ours)

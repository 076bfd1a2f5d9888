"""Runs in an environment that has sglang: programs of its language against the server at argv[1], through its
RuntimeEndpoint; prints what came of them as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import sglang as sgl

endpoint = sgl.RuntimeEndpoint(sys.argv[1])
sgl.set_default_backend(endpoint)
told: dict[str, Any] = {}
OBJECT = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}


@sgl.function
def rulers(s: Any) -> None:
    s += "Q: Who rules Hesper?\nA:"
    forks = s.fork(2)
    forks += sgl.gen("ruler", max_tokens=24, stop="\n", temperature=0)
    s += forks[1]["ruler"] + "\nCode: " + sgl.gen("code", regex="[xyz]{4}", temperature=0)
    s += "\nNumber: " + sgl.gen_int("number", max_tokens=8, temperature=0)
    s += "\nJSON: " + sgl.gen("form", json_schema=json.dumps(OBJECT), max_tokens=40, temperature=0)


@sgl.function
def river(s: Any, name: str) -> None:
    s += sgl.user(f"Which river runs through {name}?")
    s += sgl.assistant(sgl.gen("river", max_tokens=16, stop=".", temperature=0))


@sgl.function
def choice(s: Any, method: Any) -> None:
    s += "The sea is " + sgl.select("word", ["blue", "green"], choices_method=method)


def main() -> None:
    made = rulers.run()
    told["rulers"] = {name: made[name] for name in ("code", "number", "form")}
    told["text"] = made.text()
    stream = river.run("Ostrel", stream=True)
    told["stream"] = list(stream.text_iter("river"))
    states = river.run_batch([{"name": "Ostrel"}, {"name": "Hesper"}], num_threads=2)
    told["batch"] = [one["river"] for one in states]
    meta = states[0].get_meta_info("river")
    told["tokens"] = [meta["prompt_tokens"], meta["completion_tokens"]]
    methods = (
        sgl.token_length_normalized,
        sgl.greedy_token_selection,
        sgl.unconditional_likelihood_normalized,
    )
    told["choices"] = []
    for method in methods:
        state = choice.run(method)
        told["choices"].append(str(state.error() or state["word"]))
    endpoint.flush_cache()
    told["server"] = endpoint.get_server_info()["served_model_name"]
    print("told: " + json.dumps(told))


main()

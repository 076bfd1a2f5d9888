"""The programs under examples/benchmarks and examples/usage, run as they are written against one server, and
what they find.

The server computes in float32, so that the figures are the same each time.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sglang_dsl as sgl
from tests.process.patience import PROGRAM_S, in_pieces

EXAMPLES = Path(__file__).parents[3] / "examples"
HELPERS = {"tasks", "shared"}


def names(folder: str) -> list[str]:
    return sorted(file.stem for file in (EXAMPLES / folder).glob("*.py") if file.stem not in HELPERS)


@pytest.fixture(autouse=True)
def _as_scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each script finds the files beside it, and leaves nothing behind."""
    before = set(sys.modules)
    for folder in ("benchmarks", "usage"):
        monkeypatch.syspath_prepend(str(EXAMPLES / folder))
    monkeypatch.chdir(tmp_path)
    yield
    sgl.set_default_backend(None)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(EXAMPLES)):
            del sys.modules[name]


def at_least(**figures: float) -> Any:
    def check(told: dict[str, Any]) -> None:
        for name, least in figures.items():
            assert told[name] >= least, (name, told)

    return check


def shape(told: dict[str, Any]) -> None:
    at_least(accuracy=0.6)(told)
    assert told["shape"] == [2, 2, 2]
    assert told["calls"] == 3 * (2 + 4 + 8)


def deep(told: dict[str, Any]) -> None:
    at_least(accuracy=0.5)(told)
    assert told["leaves"] == [2**4] * 2


def turns(told: dict[str, Any]) -> None:
    assert told["completion_tokens"] == told["wanted_tokens"]  # ignore_eos
    assert told["cached_tokens"] > told["prompt_tokens"] / 2


def chains(told: dict[str, Any]) -> None:
    at_least(accuracy=0.75, vote_accuracy=0.75)(told)
    assert told["chains"] == [3] * 4


def documents(told: dict[str, Any]) -> None:
    at_least(accuracy=0.9, cached=100)(told)
    prompt = told["prompt"][0]
    places = [prompt.index(f"of {land} is") for land in ("Ostrel", "Velmora", "Karsk", "Quillan")]
    assert places == sorted(places)


def lines(told: dict[str, Any]) -> None:
    at_least(accuracy=0.75)(told)
    assert told["in_order"] == [True] * 4
    assert told["cached_tokens"] > told["prompt_tokens"] / 2


def tips(told: dict[str, Any]) -> None:
    at_least(accuracy=0.9)(told)
    assert "Point 3: The ruler of Ostrel is Queen Ilva.\n" in told["text"][0]


def judged(told: dict[str, Any]) -> None:
    at_least(first_measure=0.8, score=0.6)(told)
    assert {len(one) for one in told["judgements"]} == {3}


def replayed(told: dict[str, Any]) -> None:
    assert told["calls"] == 4 * 4
    assert told["cached_tokens"] > told["prompt_tokens"] / 2
    for text in told["texts"]:
        assert text.endswith("Thought 4:")  # what the branches thought is not in it
    # A join gives a list of one, each time anew.
    assert {len(thought) for thought in told["last_thoughts"]} == {1}


def village(told: dict[str, Any]) -> None:
    at_least(home_accuracy=0.75, meal_accuracy=0.5)(told)
    assert {day["mood"] for day in told["days"]} == {"positive"}


def jumped(told: dict[str, Any]) -> None:
    at_least(accuracy=0.8)(told)
    assert told["jumped_tokens"] > told["completion_tokens"] / 3


def thought(told: dict[str, Any]) -> None:
    at_least(accuracy=0.8)(told)
    assert all("=" in thoughts for thoughts in told["thoughts"])


def prefixes(told: dict[str, Any]) -> None:
    share = {way: int(told[way].removesuffix("%")) for way in ("batch_by_batch", "with_hint", "all_at_once")}
    assert share["with_hint"] > 70
    assert share["with_hint"] > share["batch_by_batch"] > 30
    assert share["all_at_once"] > 30


BENCHMARKS: dict[str, Any] = {
    "boolq": at_least(accuracy=0.9),
    "ceval": at_least(accuracy=0.9),
    "generative_agents": village,
    "gsm8k": at_least(accuracy=0.9, cached=500),
    "hellaswag": at_least(accuracy=0.9, mean_probability=0.3),
    "in_batch_prefix": prefixes,
    "json_decode_regex": at_least(accuracy=0.75, parsed=8),
    "json_jump_forward": jumped,
    "json_schema": at_least(valid=1.0),
    "line_retrieval": lines,
    "llava_bench": at_least(answered=3),
    "llm_judge": judged,
    "long_json_decode": at_least(accuracy=0.75),
    "mmlu": at_least(accuracy=0.8),
    "mtbench": at_least(first_turn=0.9, second_turn=0.9),
    "multi_chain_reasoning": chains,
    "multi_document_qa": documents,
    "multi_turn_chat": turns,
    "react": replayed,
    "reasoning_benchmark": thought,
    "tip_suggestion": tips,
    "tree_of_thought_deep": deep,
    "tree_of_thought_v0": shape,
}


@pytest.mark.parametrize("name", names("benchmarks"))
def test_a_benchmark_program_finds_what_it_should(
    name: str, shared_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    program = importlib.import_module(name)
    told = program.main(
        [
            "--backend",
            "srt",
            "--port",
            str(shared_server.port),
            "--parallel",
            "8",
            "--result-file",
            str(results),
        ]
    )
    BENCHMARKS[name](told)
    assert capsys.readouterr().out.startswith(f"{name}: ")
    assert [json.loads(line)["task"] for line in results.read_text().splitlines()] == [name]


def test_a_benchmark_needs_no_server() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "benchmarks" / "gsm8k.py"), "--num-questions", "2"],
        capture_output=True, text=True, timeout=PROGRAM_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gsm8k: accuracy 1.0")


# -- usage ---------------------------------------------------------------------------------------------------


def chat(told: dict[str, Any]) -> None:
    assert [message["role"] for message in told["messages"]] == ["system", *["user", "assistant"] * 2]
    assert told["messages"][2]["content"] == "The river of Ostrel is Sarn."
    assert told["answers"][0] == ("The river of Ostrel is Sarn.", "The ruler of Ostrel is Queen Ilva.")
    assert told["streamed"] == told["text"]
    assert len(told["samples"]) == 2


def completed(told: dict[str, Any]) -> None:
    assert told["answer"] == " The river of Ostrel is Sarn."
    assert "".join(told["pieces"]) == " The ruler of Velmora is King Dorn."
    assert told["answers"] == [" The capital of Zembla is Pellgate.", " The capital of Norwick is Lumbra."]


def readme(told: dict[str, Any]) -> None:
    assert list(told["known"]) == ["expression" if told["tool"] == "calculator" else "fact"]
    assert told["known"].get("expression", " = 55").endswith("= 55")
    assert "Fact 2: The ruler of Ostrel is Queen Ilva.\n" in told["summary"]
    assert [int(part) <= 255 for part in told["address"].split(".")] == [True] * 4
    assert told["answers"][0] == " The capital of Karsk is Hollin."
    assert told["streamed"].endswith("A: The ruler of Ostrel is Queen Ilva.")


def logprobs_of_choices(told: dict[str, Any]) -> None:
    assert [text for text, _, _ in told["choices"]] == ["positive", "negative"]
    for _, probability, tokens in told["choices"]:
        assert probability > 0.8
        assert all(
            logprob <= 0 and isinstance(token, int) and isinstance(text, str)
            for one in tokens
            for logprob, token, text in one
        )


def surest(told: dict[str, Any]) -> None:
    assert len(told["paths"]) == 4
    assert told["paths"][0][1] == "The ruler of Ostrel is Queen Ilva."


def decoded(told: dict[str, Any]) -> None:
    assert told["land"] == {
        "name": "Karsk", "capital": "Hollin", "river": "Mirrow", "ruler": "Queen Sabeth",
        "dish": "smoked trout",
    }  # fmt: skip
    assert told["villager"] == {"name": "Mobi", "age": 42, "city": "Caturn", "job": "potter"}


def sure(told: dict[str, Any]) -> None:
    for meta in told["metas"]:
        assert len(meta["output_token_logprobs"]) == len(meta["output_top_logprobs"])
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
        assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]


def survey(told: dict[str, Any]) -> None:
    assert told["as_program"] < told["alone"]
    assert "its ruler is Queen Ilva" in told["last_word"]


def streamed(told: dict[str, Any]) -> None:
    assert told["plain"] == told["async"] == "The ruler of Ostrel is Queen Ilva."
    assert told["meta"]["counted"] == told["meta"]["completion_tokens"]


def speculated(told: dict[str, Any]) -> None:
    said, alone = told["with_speculation"], told["without_speculation"]
    assert said[0] == alone[0] == " The ruler of Ostrel is Queen Ilva."
    assert said[1] < alone[1]
    assert said[2] < alone[2]
    assert told["turn"] == ("Ostrel", "Belmar", 1)


def traced(told: dict[str, Any]) -> None:
    assert told["answers"] == ["The ruler of Zembla is Queen Yara.", "The capital of Norwick is Lumbra."]
    assert sorted(told["calls"]) == [("rag", 0, "answer"), ("rag", 1, "answer")]


def served(told: dict[str, Any]) -> None:
    first, second = told["answers"]
    assert [one["capital"] for one in first] == ["Hollin", "Pellgate"]
    assert second[0]["ruler"] == "King Thane"
    assert "context length" in second[1]["error"]


def sampled(told: dict[str, Any]) -> None:
    assert len(told["answer"]) == len(told["tool"]) == 5
    assert sum("55" in answer for answer in told["answer"]) >= 3


def api(told: dict[str, Any]) -> None:
    assert told["answer"] == told["streamed"] == "The ruler of Ostrel is Queen Ilva."
    assert told["usage"]["calls"] == 2


def lengths(told: dict[str, Any]) -> None:
    assert 24 <= told["long_answer"] <= 32
    assert told["short_answer"] < 20


def templates(told: dict[str, Any]) -> None:
    assert {answer.strip() for answer in told.values()} == {"The ruler of Ostrel is Queen Ilva."}


def sent(told: dict[str, Any]) -> None:
    assert told["sent"] == ["video_url", "text"]
    assert len(told["answers"]) == 3


def seen_and_heard(told: dict[str, Any]) -> None:
    assert told["sent"] == [["image_url", "text"], ["text", "audio_url"]]
    assert len(told["answers"]) == 3
    assert len(told["steps"]) == 7
    assert all(-1 <= step <= 1 for step in told["steps"])


def compiled(told: dict[str, Any]) -> None:
    assert told["examples"] == 3
    assert told["right"] >= 2


def beyond_ascii(told: dict[str, Any]) -> None:
    assert list(told["card"]) == ["姓名", "学院", "长度", "存活"]
    assert told["card"]["学院"] in ("狮院", "鹰院", "蛇院")


USAGE: dict[str, Any] = {
    "api_models": api,
    "chat": chat,
    "chat_template": templates,
    "choices_logprob": logprobs_of_choices,
    "complete": completed,
    "cot_decoding": surest,
    "in_a_service": served,
    "json_decode": decoded,
    "json_logprobs": sure,
    "min_tokens": lengths,
    "multi_stage_fork": survey,
    "parallel_sample": sampled,
    "pictures_and_sounds": seen_and_heard,
    "readme_examples": readme,
    "signatures": compiled,
    "speculative": speculated,
    "streaming": streamed,
    "traced_rag": traced,
    "unicode_regex": beyond_ascii,
    "video": sent,
}


@pytest.mark.parametrize("name", names("usage"))
def test_a_usage_program_does_what_it_says(
    name: str, shared_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    USAGE[name](importlib.import_module(name).main([shared_server.url]))
    assert capsys.readouterr().out


def test_a_completion_is_shown_as_it_is_written(shared_server: Any) -> None:
    program = importlib.import_module("complete")
    in_pieces(lambda: list(program.main([shared_server.url])["pieces"]), 4)

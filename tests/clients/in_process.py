"""Runs in the tests' own environment, with packages of the clients' behind its own: asks the engine in this
process through the library named by argv[1], and prints what it was told as JSON. argv[2]: the folder of the
clients' packages; argv[3]: an empty folder."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from sglang_dsl import Engine, Unsupported, assistant, function, gen, user

WHICH, PACKAGES, FOLDER = sys.argv[1:4]
sys.path.append(PACKAGES)

RIVER = "Which river runs through Ostrel?"
RULER = "Q: Who rules Hesper?\nA:"
RULER_SAID = " The ruler of Hesper is Queen Wenna."


def llama_index(engine: Engine) -> Any:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool
    from pydantic import BaseModel

    from sglang_dsl.integrations import LlamaIndexModel

    class City(BaseModel):
        """A city"""

        city: str

    def get_weather(city: str) -> str:
        """Weather of a city"""
        return '{"degrees": 21, "sky": "sun"}'

    model = LlamaIndexModel(backend=engine, temperature=0, max_tokens=60)
    asked = [ChatMessage(RIVER, role="user")]
    tool = FunctionTool.from_defaults(get_weather)
    called = model.chat_with_tools([tool], "What is the weather in Lisbon?")
    extract = PromptTemplate("Extract city as JSON: {text}")

    async def awaited() -> list[Any]:
        agent = FunctionAgent(tools=[get_weather], llm=model)
        return [
            (await model.achat(asked)).message.content,
            "".join([one.delta async for one in await model.astream_chat(asked)]),
            "".join([one.delta async for one in await model.astream_complete(RULER, stop=["\n"])]),
            str(await agent.run("What is the weather in Lisbon?")),
        ]

    pieces = [one.delta for one in model.stream_chat(asked)]
    told = {
        "chat": [model.chat(asked).message.content, "".join(pieces)],
        "complete": [
            model.complete(RULER, stop=["\n"]).text,
            "".join(one.delta for one in model.stream_complete(RULER, stop=["\n"])),
        ],
        "calls": [[one.tool_name, one.tool_kwargs] for one in model.get_tool_calls_from_response(called)],
        "typed": model.structured_predict(City, extract, text="Anna lives in Lisbon.").city,
        "awaited": asyncio.run(awaited()),
    }
    try:
        model.chat(asked, temprature=0)
    except ValueError as error:
        told["error"] = str(error)
    return told


@function
def answered(s: Any, q: str) -> None:
    s += user(q) + assistant(gen("answer"))


def lm_eval(engine: Engine) -> Any:
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.tasks import TaskManager

    from sglang_dsl.integrations import LMEvalModel

    folder = Path(FOLDER)
    asked = "Is this positive or negative? "
    moods = [{"q": f"{asked}What a lovely garden!\n", "a": 0}, {"q": f"{asked}What an awful day!\n", "a": 1}]
    ends = {"until": ["\n"], "max_gen_toks": 24, "do_sample": False}
    generated: dict[str, Any] = {"output_type": "generate_until", "generation_kwargs": ends}
    _task(folder, "moods", moods, output_type="multiple_choice", doc_to_choice=["positive", "negative"])
    _task(folder, "rulers", [{"q": RULER, "a": RULER_SAID}], **generated)
    _task(folder, "rivers", [{"q": RIVER, "a": "The river of Ostrel is Sarn."}], **generated)

    def scored(model: Any, *tasks: str, **words: Any) -> dict[str, float]:
        found = simple_evaluate(
            model,
            tasks=list(tasks),
            task_manager=TaskManager(include_path=str(folder)),
            bootstrap_iters=0,
            **words,
        )["results"]
        return {
            name: float(value)
            for name in tasks
            for metric, value in found[name].items()
            if metric in ("acc,none", "exact_match,none")
        }

    model = LMEvalModel(engine)
    requests = [
        Instance("loglikelihood", {}, (RULER, one), at) for at, one in enumerate((RULER_SAID, " Nobody."))
    ]
    rolling = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (RULER + RULER_SAID,), 0)])
    whole = engine.generate(
        RULER + RULER_SAID, {"max_new_tokens": 1}, return_logprob=True, logprob_start_len=0
    ).meta["input_token_logprobs"]
    at = len(engine.encode(RULER))
    told = {
        "plain": scored(model, "moods", "rulers"),
        "turns": scored(model, "moods", "rivers", apply_chat_template=True),
        "program": scored(LMEvalModel(engine, program=answered), "rivers"),
        "by name": scored("sglang-dsl", "rulers", model_args={"backend": engine}),
        "likelihoods": model.loglikelihood(requests),
        "engine": [sum(one[0] for one in whole[at:]), sum(one[0] for one in whole[1:])],
        "rolling": rolling,
    }
    try:
        scored(LMEvalModel(engine, program=answered), "moods")
    except Unsupported as error:
        told["error"] = str(error)
    return told


def _task(folder: Path, name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    metric = "acc" if "doc_to_choice" in more else "exact_match"
    task = {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test", "doc_to_text": "{{q}}", "doc_to_target": "{{a}}",
        "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True}], **more,
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")


with Engine("pocket", dtype="float32", max_total_tokens=8192) as started:
    print("told: " + json.dumps(globals()[WHICH](started)))

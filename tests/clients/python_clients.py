"""Runs in the environment of the clients: asks the server at argv[1] through the client named by argv[2], and
prints what it was told as JSON. argv[3]: a folder with a tokenizer; argv[4]: an empty folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

URL, WHICH, TOKENIZER, FOLDER = sys.argv[1:5]
V1 = f"{URL}/v1"
RIVER = "Which river runs through Ostrel?"
RULER = "Q: Who rules Hesper?\nA:"


def huggingface() -> Any:
    from huggingface_hub import InferenceClient

    asked: Any = {"messages": [{"role": "user", "content": RIVER}], "max_tokens": 24, "temperature": 0}
    client = InferenceClient(base_url=V1, api_key="none")
    said = client.chat_completion(**asked).choices[0].message.content
    pieces = [one.choices[0].delta.content or "" for one in client.chat_completion(**asked, stream=True)]
    named = InferenceClient(base_url=V1, api_key="none", model=None)
    schema: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes"]}}}
    form = named.chat_completion(**{**asked, "response_format": schema}).choices[0].message.content
    return [said, "".join(pieces), len(pieces) > 3, form]


def llama_index() -> Any:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    words: Any = {
        "model": "pocket",
        "api_base": V1,
        "api_key": "none",
        "temperature": 0,
        "context_window": 2048,
    }
    chat = OpenAILike(**words, is_chat_model=True, max_tokens=24)
    asked = [ChatMessage(role="user", content=RIVER)]
    pieces = [one.delta or "" for one in chat.stream_chat(asked)]
    text = OpenAILike(**words, is_chat_model=False, max_tokens=24)
    return [chat.chat(asked).message.content, "".join(pieces), text.complete(RULER, stop=["\n"]).text]


def dspy() -> Any:
    import dspy as module

    words: Any = {"api_base": V1, "api_key": "none", "temperature": 0, "cache": False}
    chat = module.LM("openai/pocket", max_tokens=24, **words)
    text = module.LM("text-completion-openai/pocket", model_type="text", max_tokens=24, **words)
    said = [chat(messages=[{"role": "user", "content": RIVER}])[0], text(prompt=RULER, stop=["\n"])[0]]
    return [one if isinstance(one, str) else one["text"] for one in said]


def outlines() -> Any:
    from typing import Literal

    import openai
    import outlines as module
    from outlines.types import Regex
    from pydantic import BaseModel

    class Answer(BaseModel):
        yes: bool

    client = openai.OpenAI(base_url=V1, api_key="none")
    made: list[Any] = []
    for begin in (module.from_openai, module.from_vllm, module.from_sglang):
        model: Any = begin(client, "pocket")
        made.append(json.loads(model("Is water wet?", Answer, max_tokens=40, temperature=0)))
        if begin is not module.from_openai:
            made.append(model("Is water wet?", Regex("[xyz]{4}"), max_tokens=40, temperature=0))
        if begin is module.from_vllm:
            made.append(model("Is water wet?", Literal["yes", "no"], max_tokens=8, temperature=0))
    return made


def guidance() -> Any:
    from guidance import assistant, gen, models, user

    model = models.OpenAI("pocket", base_url=V1, api_key="none", echo=False)
    with user():
        model += RIVER
    with assistant():
        model += gen("said", max_tokens=24, temperature=0)
    return model["said"]


def lm_eval() -> Any:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder = Path(FOLDER)
    asked = "Is this positive or negative? "
    rows = [{"q": f"{asked}What a lovely garden!\n", "a": 0}, {"q": f"{asked}What an awful day!\n", "a": 1}]
    _task(folder, "moods", rows, output_type="multiple_choice", doc_to_choice=["positive", "negative"])
    _task(
        folder,
        "rulers",
        [{"q": RULER, "a": " The ruler of Hesper is Queen Wenna."}],
        output_type="generate_until",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 24, "do_sample": False},
    )
    found = simple_evaluate(
        "local-completions",
        {"model": "pocket", "base_url": f"{V1}/completions", "tokenizer_backend": "huggingface",
         "tokenizer": TOKENIZER, "num_concurrent": 2, "max_length": 2048},
        tasks=["moods", "rulers"],
        task_manager=TaskManager(include_path=str(folder)),
        bootstrap_iters=0,
    )  # fmt: skip
    return {name: found["results"][name] for name in ("moods", "rulers")}


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


print("told: " + json.dumps(globals()[WHICH]()))

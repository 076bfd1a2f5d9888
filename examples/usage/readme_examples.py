"""The five things one meets first: branching on a choice, forks, a regular expression, batches, streams.

The questions are pocket's own; it knows no addresses, so the expression keeps the form of one and no more.

    python examples/usage/readme_examples.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import shared

import sglang_dsl as sgl
from sglang_dsl.patterns import REGEX_IPV4


@sgl.function
def tool_use(s, question):
    s += "Q: What is 10 + 12?\nTool: calculator\nQ: What is 10 + 12?\nA: 10 + 12 = 22\n"
    s += "Q: What is 35 + 7?\nTool: calculator\nQ: What is 35 + 7?\nA: 35 + 7 = 42\n"
    s += "Q: " + question + "\nTool: " + sgl.gen("tool", choices=["calculator", "search engine"]) + "\n"
    s += "Q: " + question + "\n"
    if s["tool"] == "calculator":
        s += "A:" + sgl.gen("expression", max_tokens=24, stop="\n")
    elif s["tool"] == "search engine":
        s += "A:" + sgl.gen("fact", max_tokens=24, stop="\n")


@sgl.function
def portrait(s):
    s += "Here are two facts about Ostrel: 1. Its river. 2. Its ruler.\n"
    forks = s.fork(2)
    for i, fork in enumerate(forks):
        fork += f"Q: Tell me the {('river', 'ruler')[i]} of Ostrel.\nA:"
        fork += sgl.gen("detail", max_tokens=24, stop="\n")
    # A fork can be read without a join.
    s += "Fact 1:" + forks[0]["detail"] + "\n"
    s += "Fact 2:" + forks[1]["detail"] + "\n"
    s += "Q: Describe Ostrel.\nA:" + sgl.gen("summary", max_tokens=40, stop="\n")


@sgl.function
def address(s):
    s += "Q: What is the IP address of the name server?\n"
    s += "A: " + sgl.gen("answer", temperature=0, regex=REGEX_IPV4)


@sgl.function
def text_qa(s, question):
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", stop="\n")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    sgl.set_default_backend(shared.backend(argv))

    used = tool_use.run(question="What is 31 + 24?", temperature=0)
    print(used.text(), "\n")
    facts = portrait.run(temperature=0)
    print(facts.text(), "\n")
    found = address.run()
    print(found.text(), "\n")

    questions = [{"question": f"What is the capital of {land}?"} for land in ("Karsk", "Zembla", "Ithary")]
    states = text_qa.run_batch(questions, temperature=0, progress_bar=True)
    for state in states:
        print(state.text())

    streamed = ""
    for out in text_qa.run(question="Who rules Ostrel?", temperature=0, stream=True).text_iter():
        print(out, end="", flush=True)
        streamed += out
    print()
    return {
        "tool": used["tool"],
        "known": {name: used[name] for name in ("expression", "fact") if name in used},
        "summary": facts.text(),
        "address": found["answer"],
        "answers": [state["answer"] for state in states],
        "streamed": streamed,
    }


if __name__ == "__main__":
    main()

"""The same question answered n times, side by side; joining makes a list of each variable.

The program's own parameter is called `n`, as a word of sampling is: the program's parameters come first.

    python examples/usage/parallel_sample.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import shared

import sglang_dsl as sgl


@sgl.function
def parallel_sample(s, question, n):
    s += "Q: What is 10 + 12?\nTool: calculator\nQ: What is 10 + 12?\nA: 10 + 12 = 22\n"
    s += "Q: What is 35 + 7?\nTool: calculator\nQ: What is 35 + 7?\nA: 35 + 7 = 42\n"
    s += "Q: " + question + "\n"
    forks = s.fork(n)
    forks += "Tool: " + sgl.gen("tool", choices=["calculator", "browser"]) + "\n"
    forks += "Q: " + question + "\nA:" + sgl.gen("answer", max_tokens=24, stop="\n") + "\n"
    forks.join()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    sgl.set_default_backend(shared.backend(argv))
    state = parallel_sample.run(question="What is 31 + 24?", n=5, temperature=1.0, seed=2)
    for number in range(5):
        print(f"[{number}]", {"tool": state["tool"][number], "answer": state["answer"][number]})
    return {"tool": state["tool"], "answer": state["answer"]}


if __name__ == "__main__":
    main()

"""Which template writes the turns: the server's own, or another one that is set on the endpoint.

python examples/usage/chat_template.py http://127.0.0.1:30000
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import shared

import sglang_dsl as sgl
from sglang_dsl.lang.chat_template import ChatTemplate, get_chat_template


@sgl.function
def ask(s, question):
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=24))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    runtime = None
    if not argv and not shared.sys.argv[1:]:
        runtime = sgl.Runtime(model_path="pocket")
        endpoint = runtime.endpoint
    else:
        endpoint = shared.backend(argv)
    sgl.set_default_backend(endpoint)
    try:
        own = ask.run(question="Who rules Ostrel?", temperature=0)
        print(f"{endpoint.chat_template.name}: {own['answer']}")

        endpoint.chat_template = get_chat_template("chatml")
        named = ask.run(question="Who rules Ostrel?", temperature=0)
        print(f"{endpoint.chat_template.name}: {named['answer']}")

        # Plain questions and answers, which the bundled model has seen, too.
        roles = {"user": ("Q: ", "\n"), "assistant": ("A:", "\n")}
        endpoint.chat_template = ChatTemplate("questions", None, roles, stop_str=("\n",))
        plain = ask.run(question="Who rules Ostrel?", temperature=0)
        print(f"{endpoint.chat_template.name}: {plain['answer']}")
    finally:
        endpoint.chat_template = None
        if runtime is not None:
            runtime.shutdown()
    return {"own": own["answer"], "named": named["answer"], "plain": plain["answer"]}


if __name__ == "__main__":
    main()

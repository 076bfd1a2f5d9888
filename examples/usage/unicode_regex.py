"""An expression beyond ASCII: Chinese keys and values, kept to byte by byte whatever the model's vocabulary.

Pocket knows no Chinese: the form is kept, and what fills it is made up.

    python examples/usage/unicode_regex.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import shared

import sglang_dsl as sgl

CARD = (
    r'\{"姓名": "[^"\n\\]{1,8}", "学院": "(狮院|鹰院|蛇院)", '
    r'"长度": [1-9][0-9]\.[0-9], "存活": (true|false)\}'
)


@sgl.function
def card(s, name):
    s += name + " 是一名学生。请填写以下信息。\n"
    s += sgl.gen("json_output", max_tokens=128, regex=CARD)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    sgl.set_default_backend(shared.backend(argv))
    state = card.run(name="李雷", temperature=0)
    print(state.text())
    meta = state.get_meta_info("json_output")
    print(f"{meta['jumped_tokens']} of {meta['completion_tokens']} tokens were jumped over")
    return {"card": json.loads(state["json_output"])}


if __name__ == "__main__":
    main()

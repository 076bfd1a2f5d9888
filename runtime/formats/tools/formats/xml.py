"""MiniMax M2 and Step 3: tags for each argument."""

from __future__ import annotations

from runtime.formats.tools.tagged import TaggedCalls

MINIMAX_M2 = TaggedCalls(
    begin="<minimax:tool_call>\n",
    end="\n</minimax:tool_call>",
    block=True,
    opener='<invoke name="',
    name_end='">',
    closer="</invoke>",
    key_open='<parameter name="',
    key_end='">',
    value_end="</parameter>",
    gap="\n",
)
STEP_3 = TaggedCalls(
    begin="<｜tool_calls_begin｜>\n",
    end="\n<｜tool_calls_end｜>",
    block=True,
    call="<｜tool_call_begin｜>function<｜tool_sep｜>",
    opener='<steptml:invoke name="',
    name_end='">',
    closer="</steptml:invoke>",
    key_open='<steptml:parameter name="',
    key_end='">',
    value_end="</steptml:parameter>",
    tail="<｜tool_call_end｜>",
)

"""Formats that write a JSON object or a list of them in marks of their own, and nothing else."""

from __future__ import annotations

from runtime.formats.tools.json_calls import JsonCalls
from runtime.formats.tools.values import PYTHON

LLAMA_3 = JsonCalls("<|python_tag|>", separator=";", bare="{", arguments="parameters", dialect=PYTHON)
INTERN_S1 = JsonCalls(
    "<|action_start|> <|plugin|>\n",
    "<|action_end|>",
    separator="\n",
    arguments="parameters",
    older='{"name": {}, "parameters": ',
)
GIGACHAT_3 = JsonCalls("<|message_sep|>\n\nfunction call<|role_sep|>\n", "</s>", older="")
HUNYUAN = JsonCalls("<tool_calls>[", "]</tool_calls>", listed=True)
COMMAND = JsonCalls(
    "<|START_ACTION|>[", "]<|END_ACTION|>", listed=True, name="tool_name", arguments="parameters"
)
GRANITE = JsonCalls("<|tool_call|>[", "]", listed=True, aliases=("<tool_call>",))
PHI_4 = JsonCalls("<|tool_call|>[", "]<|/tool_call|>", listed=True, aliases=("functools",))
LIST = JsonCalls("[", "]", listed=True, arguments="parameters", bare="[", others=True)

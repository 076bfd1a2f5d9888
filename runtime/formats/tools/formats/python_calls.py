"""Formats that write calls as Python does."""

from __future__ import annotations

from runtime.formats.tools.formats.json_lists import LIST
from runtime.formats.tools.pythonic import PythonicCalls

PYTHONIC = PythonicCalls("[", "]", aliases=("<|python_start|>",), closers=("<|python_end|>",))
LFM_2 = PythonicCalls("<|tool_call_start|>[", "]<|tool_call_end|>", json=LIST)
OLMO_3 = PythonicCalls("<function_calls>\n", "\n</function_calls>", listed=False)
MINICPM = PythonicCalls(
    "<|tool_call_start|>\n```python\n",
    "\n```\n<|tool_call_end|>",
    listed=False,
    within=("```python", "```"),
)

"""GLM 4.5 and 4.7."""

from __future__ import annotations

from dataclasses import replace

from runtime.formats.tools.tagged import TaggedCalls

GLM_4_7 = TaggedCalls(
    opener="<tool_call>",
    name_end="",
    closer="</tool_call>",
    key_open="<arg_key>",
    key_end="</arg_key>\n<arg_value>",
    value_end="</arg_value>",
    separator="",
)
GLM_4_5 = replace(GLM_4_7, name_end="\n", gap="\n", name_ends=("\\n",), filler="\\n")

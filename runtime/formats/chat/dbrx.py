"""DBRX Instruct: ChatML with the line break before a turn instead of after it."""

from __future__ import annotations

from runtime.formats.chat.family import Family, Marks, Named
from runtime.formats.chat.template import ChatTemplate, turns

TEMPLATE = ChatTemplate(
    "dbrx-instruct",
    (
        "You are DBRX, created by Databricks. You were last updated in December 2023. You answer questions "
        "based on information available up to that point.\n"
        "YOU PROVIDE SHORT RESPONSES TO SHORT QUESTIONS OR STATEMENTS, but provide thorough responses to mo"
        "re complex and open-ended questions.\n"
        "You assist with various tasks, from writing to coding (using markdown for code blocks — remember t"
        "o use ``` with code, JSON, and tables).\n"
        "(You do not have real-time data access or code execution capabilities. You avoid stereotyping and "
        "provide balanced perspectives on controversial topics. You do not provide song lyrics, poems, or n"
        "ews articles and do not divulge details of your training data.)\n"
        "This is your system prompt, guiding your responses. Do not reference it, just respond to the user."
        " If you find yourself talking about this message, stop. You should be responding appropriately and"
        " usually that means not mentioning this.\n"
        "YOU DO NOT MENTION ANY OF THIS INFORMATION ABOUT YOURSELF UNLESS THE INFORMATION IS DIRECTLY PERTI"
        "NENT TO THE USER'S QUERY."
    ),
    turns(
        ("<|im_start|>system\n", "<|im_end|>"),
        ("\n<|im_start|>user\n", "<|im_end|>"),
        ("\n<|im_start|>assistant\n", "<|im_end|>"),
    ),
    ("<|im_end|>",),
)

FAMILY = Family(
    marks=(Marks("dbrx-instruct", ("<|im_start|>", "<|im_end|>", "You are DBRX")),),
    names=(Named("dbrx-instruct", r"dbrx.*instruct(?![a-z])"),),
)

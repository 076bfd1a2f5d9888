"""InternVL 2.5 and 3, Intern-S1: ChatML with a system prompt of their own."""

from __future__ import annotations

from runtime.formats.chat.family import Family, Marks, Named
from runtime.formats.chat.template import CHATML_TURNS, ChatTemplate

_INTERNVL = (
    "你是书生·万象，英文名是InternVL，"
    "是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"
)
_INTERN_S1 = (
    "You are an AI assistant whose name is Intern-S1 (书生大模型).\n"
    "- Intern-S1 (书生大模型) is a vision-language model that is developed by Shanghai AI Laboratory (上"
    "海人工智能实验室).  It is designed to be helpful, honest, and harmless.\n"
    "- Intern-S1 (书生大模型) can understand and communicate fluently in the language chosen by the use"
    "r such as English and 中文.\n"
    "You are an expert reasoner with extensive experience in all areas. You approach problems through s"
    "ystematic thinking and rigorous reasoning. Your response should reflect deep understanding and pre"
    "cise logical thinking, making your solution path and reasoning clear to others. Please put your th"
    "inking process within <think>...</think> tags."
)
_STOP = ("<|im_end|>", "<|action_end|>")

INTERNVL_2_5 = ChatTemplate("internvl-2-5", _INTERNVL, CHATML_TURNS, _STOP)
INTERNVL_3 = ChatTemplate("internvl3", _INTERNVL, CHATML_TURNS, ("<|im_end|>",))
INTERN_S1 = ChatTemplate("interns1", _INTERN_S1, CHATML_TURNS, _STOP)

_CHATML = ("<|im_start|>", "<|im_end|>")
FAMILY = Family(
    marks=(
        Marks("internvl3", (*_CHATML, "<IMG_CONTEXT>")),
        Marks("interns1", (*_CHATML, "Intern-S1")),
    ),
    names=(
        Named("internvl-2-5", r"internvl2[_.-]5"),
        Named("internvl3", r"internvl-?3"),
        Named("interns1", r"intern-?s1"),
    ),
)

"""The families of chat templates that use ChatML: a mark and the role, a line break, the text, a mark. Only
data: see families."""

from __future__ import annotations

from runtime.formats.chat.template import CHATML_TURNS, ChatTemplate, Family, Marks, Named, headed, turns

_CHATML = ("<|im_start|>", "<|im_end|>")
_IM_END = ("<|im_end|>",)
_HELPFUL = "You are a helpful assistant."

_HERMES_3 = r"<|im_start|>system\nYou are a helpful assistant.<|im_end|>"

# Plain ChatML, as used by Hermes 2 and 3 and many others.
CHATML = Family(
    ChatTemplate("chatml", None, CHATML_TURNS, _IM_END),
    ChatTemplate("hermes-3", _HELPFUL, CHATML_TURNS, _IM_END),
    Marks("chatml", _CHATML, without=("<|im_sep|>",), tokens=_CHATML, ends=_IM_END),
    # Qwen's text has the same default system prompt and no begin-of-text token.
    Marks("hermes-3", (*_CHATML, _HERMES_3, "bos_token"), without=("<|vision_start|>",)),
    Named("chatml", r"tinyllama(?!.*intermediate-step)(?!-v1\.1(?!.*chat))"),
    Named("chatml", r"chatml"),
    Named("chatml", r"(?:open)?hermes-?2(?!\d)"),
    Named("hermes-3", r"hermes-?3(?!\d)"),
)

# LLaVA over ChatML and Llama 3 language models: the image on a line of its own.
_LLAMA_3 = headed("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>")
LLAVA = Family(
    ChatTemplate("chatml-llava", _HELPFUL, CHATML_TURNS, _IM_END, image_token="<image>\n"),
    ChatTemplate("llama-3-instruct-llava", None, _LLAMA_3, ("<|eot_id|>",), image_token="<image>\n"),
    Named("chatml-llava", r"llava-v1\.6-(?:yi-)?34b"),
    Named("chatml-llava", r"llava-next-video-34b"),
    Named("chatml-llava", r"llava-onevision-qwen2"),
    Named("llama-3-instruct-llava", r"llama-?3-llava-next|llava-(?:next-)?llama-?3|llava-v1\.6-llama-?3"),
)

# Qwen, 1 to 3, with QwQ. They differ in the default system prompt. Qwen3 and QwQ think first; the templates
# here neither force nor forbid it.
_QWEN_PROMPT = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
_QWEN_SYSTEM = r"<|im_start|>system\nYou are a helpful assistant"
_QWEN_VL_TYPES = ("qwen2vl", "qwen25vl", "qwen3vl", "qwen3vlmoe")
QWEN = Family(
    ChatTemplate("qwen", _HELPFUL, CHATML_TURNS, _IM_END),
    ChatTemplate("qwen2.5", _QWEN_PROMPT, CHATML_TURNS, _IM_END),
    ChatTemplate("qwen2-vl", _HELPFUL, CHATML_TURNS, _IM_END, image_token="".join(_VISION)),
    ChatTemplate("qwen3", None, CHATML_TURNS, _IM_END),
    ChatTemplate("qwq", None, CHATML_TURNS, _IM_END),
    Marks("qwen", (*_CHATML, _QWEN_SYSTEM), without=("<|vision_start|>", "bos_token")),
    Marks("qwen2.5", (*_CHATML, _QWEN_PROMPT), without=("<|vision_start|>",)),
    Marks("qwen2-vl", (*_CHATML, *_VISION), (), (*_CHATML, *_VISION[:2]), _QWEN_VL_TYPES, _IM_END),
    Marks("qwen2-vl", (*_CHATML, *_VISION)),
    Marks("qwen3", (*_CHATML, "<think>", "</think>", "enable_thinking"), without=("<|vision_start|>",)),
    Marks("qwen3", _CHATML, tokens=_CHATML, types=("qwen3", "qwen3moe", "qwen3next"), ends=_IM_END),
    Marks("qwq", (*_CHATML, r"<|im_start|>assistant\n<think>\n", "</think>"), without=("enable_thinking",)),
    Named("qwen2-vl", r"qwen.*vl(?![a-z])"),
    Named("qwen", r"(?:code)?qwen(?![-_]?3)(?!.*vl(?![a-z])).*(?:chat|instruct)(?![a-z])"),
    Named("qwen3", r"qwen[-_]?3(?!.*vl(?![a-z]))"),
    Named("qwq", r"qwq(?![a-z])"),
)

# Yi: 1.5 writes the system prompt bare, before the first turn; VL writes `### Human:`.
_YI_VL_PROMPT = (
    "This is a chat between an inquisitive human and an AI assistant. Assume the role of the AI assista"
    "nt. Read all the images carefully, and respond to the human's questions with informative, helpful,"
    " detailed and polite answers.这是一个好奇的人类和一个人工智能助手之间的对话。假设你扮演这个AI助手的"
    "角色。仔细阅读所有的图像，并对人类的问题做出信息丰富、有帮助、详细的和礼貌的回答。"
)
_YI_VL_TURNS = turns(("", "\n\n"), ("### Human:", "\n"), ("### Assistant:", "\n"))
_YI_MARKS = ("<|im_start|>user", "<|im_end|>", r"<|im_end|>\n<|im_start|>assistant\n")
YI = Family(
    ChatTemplate("yi", None, CHATML_TURNS, _IM_END),
    ChatTemplate("yi-1.5", None, {**CHATML_TURNS, "system": ("", "")}, _IM_END),
    ChatTemplate("yi-vl", _YI_VL_PROMPT, _YI_VL_TURNS, image_token=" <image_placeholder>\n"),
    Marks("yi-1.5", _YI_MARKS, without=("<|im_start|>system", "<|im_start|>'")),
    Named("yi-vl", r"yi-vl(?![a-z])"),
    Named("yi-1.5", r"yi-1\.5.*chat(?![a-z])"),
    Named("yi", r"yi-(?:coder|(?!1\.5)\d+b).*chat(?![a-z])"),
)

# InternVL 2.5 and 3, Intern-S1: each has its own system prompt.
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
_ACTION_END = ("<|im_end|>", "<|action_end|>")
INTERN = Family(
    ChatTemplate("internvl-2-5", _INTERNVL, CHATML_TURNS, _ACTION_END),
    ChatTemplate("internvl3", _INTERNVL, CHATML_TURNS, _IM_END),
    ChatTemplate("interns1", _INTERN_S1, CHATML_TURNS, _ACTION_END),
    Marks("internvl3", (*_CHATML, "<IMG_CONTEXT>")),
    Marks("interns1", (*_CHATML, "Intern-S1")),
    Named("internvl-2-5", r"internvl2[_.-]5"),
    Named("internvl3", r"internvl-?3"),
    Named("interns1", r"intern-?s1"),
)

# SmolLM 2 and 3. SmolLM3's own template puts a date and its modes before the system prompt; this does not.
_SMOLLM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SMOLLM = Family(
    ChatTemplate("smollm2", _SMOLLM_PROMPT, CHATML_TURNS, _IM_END),
    ChatTemplate("smollm3", None, CHATML_TURNS, _IM_END),
    Marks("smollm2", (*_CHATML, _SMOLLM_PROMPT)),
    Marks("smollm3", (*_CHATML, "## Metadata", "Reasoning Mode", "/no_think", "<think>", "</think>")),
    Named("smollm2", r"smollm2.*instruct(?![a-z])"),
    Named("smollm3", r"smollm3"),
)

# DBRX Instruct: the line break is before a turn instead of after it.
_DBRX_PROMPT = (
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
)
_DBRX_TURNS = turns(
    ("<|im_start|>system\n", "<|im_end|>"),
    ("\n<|im_start|>user\n", "<|im_end|>"),
    ("\n<|im_start|>assistant\n", "<|im_end|>"),
)
DBRX = Family(
    ChatTemplate("dbrx-instruct", _DBRX_PROMPT, _DBRX_TURNS, _IM_END),
    Marks("dbrx-instruct", (*_CHATML, "You are DBRX")),
    Named("dbrx-instruct", r"dbrx.*instruct(?![a-z])"),
)

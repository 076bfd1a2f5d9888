"""The families of chat templates of Llama's chat models and models derived from Llama. Only data: see
families."""

from __future__ import annotations

from runtime.formats.chat.template import ChatTemplate, ChatTemplateStyle, Family, Marks, Named, headed, turns

# Vicuna 1.1 and the first LLaVA models: user and assistant on one line.
VICUNA = Family(
    templates=(
        ChatTemplate(
            "vicuna_v1.1",
            "A chat between a curious user and an artificial intelligence assistant. "
            "The assistant gives helpful, detailed, and polite answers to the user's questions.",
            turns(("", " "), ("USER:", " "), ("ASSISTANT:", "</s>")),
            image_token=" <image>\n",
        ),
    ),
    marks=(Marks("vicuna_v1.1", ("'USER: ' + message['content']", "'ASSISTANT: ' + message['content']")),),
    names=(Named("vicuna_v1.1", r"vicuna|llava-v1\.5|llava-next-video-7b"),),
)

# Zephyr: the role on a line, the text, the end-of-text token. TinyLlama Chat 1.0 and StableLM Zephyr use it
# too.
ZEPHYR = Family(
    templates=(ChatTemplate("zephyr", None, headed("<|", "|>\n", "</s>\n"), ("</s>",)),),
    marks=(Marks("zephyr", (r"'<|user|>\n' + message['content'] + eos_token",)),),
    names=(Named("zephyr", r"zephyr-7b"),),
)

# Llama 2 Chat: the system prompt is inside the first user turn.
LLAMA_2 = Family(
    templates=(
        ChatTemplate(
            "llama-2-chat",
            None,
            turns(("<<SYS>>\n", "\n<</SYS>>\n\n"), ("[INST] ", " [/INST]"), ("", " </s><s>")),
            style=ChatTemplateStyle.LLAMA2,
        ),
    ),
    marks=(Marks("llama-2-chat", ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")),),
    names=(Named("llama-2-chat", r"llama-?2(?![.\d]).*chat(?![a-z])|codellama.*instruct(?![a-z])"),),
)

# Llama 3 Instruct: a header with the role, an empty line, the text, a mark. The tokenizer adds the BOS.
_LLAMA_3_MARKS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA_3 = Family(
    templates=(
        ChatTemplate(
            "llama-3-instruct",
            None,
            headed("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"),
            ("<|eot_id|>",),
            image_token="<|image|>",
        ),
    ),
    marks=(Marks("llama-3-instruct", _LLAMA_3_MARKS, tokens=_LLAMA_3_MARKS, ends=("<|eot_id|>",)),),
    names=(Named("llama-3-instruct", r"llama-?3(?!\d).*instruct(?![a-z])"),),
)

# Llama 4: as Llama 3, with shorter marks.
_LLAMA_4_MARKS = ("<|header_start|>", "<|header_end|>", "<|eot|>")
LLAMA_4 = Family(
    templates=(
        ChatTemplate(
            "llama-4",
            None,
            headed("<|header_start|>", "<|header_end|>\n\n", "<|eot|>"),
            ("<|eot|>",),
            image_token="<|image|>",
        ),
    ),
    marks=(Marks("llama-4", _LLAMA_4_MARKS, tokens=_LLAMA_4_MARKS),),
    names=(Named("llama-4", r"llama-?4(?!\d).*instruct(?![a-z])"),),
)

# Mistral: brackets around the user's text. Versions differ in spaces, and in the position of the system
# prompt. v1 (7B v0.1-0.2, Mixtral; a space before each bracket) and v3 (7B v0.3): before the first user's
# text; v7 (Large 2411) and its tekken form without spaces (Small 2501 and later, Magistral): in its own
# brackets. `mistral` is the usual mix.
_INST = ("[INST]", "[/INST]")
_OLD_MISTRAL = ("[SYSTEM_PROMPT]", "<<SYS>>")
_BEFORE_FIRST = ("", "\n\n")
_V7_TEKKEN = turns(("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), ("[INST]", "[/INST]"), ("", "</s>"))
MISTRAL = Family(
    templates=(
        ChatTemplate(
            "mistral",
            None,
            turns(("[SYSTEM_PROMPT] ", " [/SYSTEM_PROMPT]"), ("[INST] ", " [/INST]"), ("", " </s><s>")),
            ("</s>",),
            image_token="[IMG]",
        ),
        ChatTemplate(
            "mistral-v1",
            None,
            turns(_BEFORE_FIRST, (" [INST] ", " [/INST]"), ("", "</s>")),
            ("</s>",),
            style=ChatTemplateStyle.LLAMA2,
        ),
        ChatTemplate(
            "mistral-v3",
            None,
            turns(_BEFORE_FIRST, ("[INST] ", "[/INST]"), ("", "</s>")),
            ("</s>",),
            style=ChatTemplateStyle.LLAMA2,
        ),
        ChatTemplate(
            "mistral-v3-tekken",
            None,
            turns(_BEFORE_FIRST, ("[INST]", "[/INST]"), ("", "</s>")),
            ("</s>",),
            image_token="[IMG]",
            style=ChatTemplateStyle.LLAMA2,
        ),
        ChatTemplate(
            "mistral-v7",
            None,
            turns(("[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"), ("[INST] ", "[/INST]"), ("", "</s>")),
            ("</s>",),
            image_token="[IMG]",
        ),
        ChatTemplate("mistral-v7-tekken", None, _V7_TEKKEN, ("</s>",), image_token="[IMG]"),
        ChatTemplate("magistral", None, _V7_TEKKEN, ("</s>",), image_token="[IMG]"),
    ),
    marks=(
        Marks("mistral-v1", (*_INST, "[INST] ", " [/INST]"), without=_OLD_MISTRAL),
        Marks("mistral-v3", (*_INST, "[INST] "), without=(*_OLD_MISTRAL, " [/INST]")),
        Marks("mistral-v3-tekken", _INST, without=(*_OLD_MISTRAL, "[INST] ", " [/INST]")),
        Marks("mistral-v7", (*_INST, "[SYSTEM_PROMPT] ")),
        Marks(
            "mistral-v7-tekken",
            (*_INST, "[SYSTEM_PROMPT]"),
            without=("[SYSTEM_PROMPT] ", "[THINK]"),
            tokens=(*_INST, "[SYSTEM_PROMPT]"),
        ),
        Marks("magistral", (*_INST, "[SYSTEM_PROMPT]", "[THINK]"), without=("[SYSTEM_PROMPT] ",)),
    ),
    names=(
        Named(
            "mistral",
            r"(?:mistral(?!-nemo|-small-(?:3|2501|2503|2506)|-small-.*(?:2501|2503|2506)|-large-.*2411)"
            r"|mixtral).*instruct(?![a-z])|pixtral",
        ),
        Named("mistral-v3-tekken", r"mistral-nemo.*instruct(?![a-z])|ministral-8b.*instruct(?![a-z])"),
        Named("mistral-v7", r"mistral-large-.*2411"),
        Named(
            "mistral-v7-tekken",
            r"mistral-small-(?=.*instruct(?![a-z]))(?:3|.*(?:2501|2503|2506))|devstral-small",
        ),
        Named("magistral", r"magistral(?![a-z])"),
    ),
)

"""The built-in chat templates, family by family, with the marks and names by which a checkpoint of each is
recognised. To add a family, add an entry to FAMILIES.

Only data; `registry` finds a template by its name, `matching` finds the template of a checkpoint.
"""

from __future__ import annotations

from runtime.formats.chat import chatml_families as chatml
from runtime.formats.chat.template import ChatTemplate, ChatTemplateStyle, Family, Marks, Named, headed, turns

# Formats without control tokens: the default one, and that of early Claude models.
_PLAIN = Family(
    ChatTemplate("default", None, turns(("SYSTEM:", "\n"), ("USER:", "\n"), ("ASSISTANT:", "\n"))),
    ChatTemplate("claude", None, turns(("", ""), ("\n\nHuman: ", ""), ("\n\nAssistant:", ""))),
    Named("claude", r"orion-\d+b.*chat(?![a-z])"),
)

# Vicuna 1.1 and the first LLaVA models: user and assistant on one line.
_VICUNA_PROMPT = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_VICUNA_TURNS = turns(("", " "), ("USER:", " "), ("ASSISTANT:", "</s>"))
_VICUNA = Family(
    ChatTemplate("vicuna_v1.1", _VICUNA_PROMPT, _VICUNA_TURNS, image_token=" <image>\n"),
    Marks("vicuna_v1.1", ("'USER: ' + message['content']", "'ASSISTANT: ' + message['content']")),
    Named("vicuna_v1.1", r"vicuna|llava-v1\.5|llava-next-video-7b"),
)

# Zephyr: the role on a line, the text, the end-of-text token. TinyLlama Chat 1.0 and StableLM Zephyr use it
# too.
_ZEPHYR = Family(
    ChatTemplate("zephyr", None, headed("<|", "|>\n", "</s>\n"), ("</s>",)),
    Marks("zephyr", (r"'<|user|>\n' + message['content'] + eos_token",)),
    Named("zephyr", r"zephyr-7b"),
)

# Llama 2 Chat: the system prompt is inside the first user turn.
_LLAMA_2_TURNS = turns(("<<SYS>>\n", "\n<</SYS>>\n\n"), ("[INST] ", " [/INST]"), ("", " </s><s>"))
_LLAMA_2 = Family(
    ChatTemplate("llama-2-chat", None, _LLAMA_2_TURNS, style=ChatTemplateStyle.LLAMA2),
    Marks("llama-2-chat", ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")),
    Named("llama-2-chat", r"llama-?2(?![.\d]).*chat(?![a-z])|codellama.*instruct(?![a-z])"),
)

# Llama 3 Instruct: a header with the role, an empty line, the text, a mark. The tokenizer adds the BOS.
_LLAMA_3_MARKS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_LLAMA_3_TURNS = headed("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>")
_LLAMA_3 = Family(
    ChatTemplate("llama-3-instruct", None, _LLAMA_3_TURNS, ("<|eot_id|>",), image_token="<|image|>"),
    Marks("llama-3-instruct", _LLAMA_3_MARKS, tokens=_LLAMA_3_MARKS, ends=("<|eot_id|>",)),
    Named("llama-3-instruct", r"llama-?3(?!\d).*instruct(?![a-z])"),
)

# Llama 4: as Llama 3, with shorter marks.
_LLAMA_4_MARKS = ("<|header_start|>", "<|header_end|>", "<|eot|>")
_LLAMA_4_TURNS = headed("<|header_start|>", "<|header_end|>\n\n", "<|eot|>")
_LLAMA_4 = Family(
    ChatTemplate("llama-4", None, _LLAMA_4_TURNS, ("<|eot|>",), image_token="<|image|>"),
    Marks("llama-4", _LLAMA_4_MARKS, tokens=_LLAMA_4_MARKS),
    Named("llama-4", r"llama-?4(?!\d).*instruct(?![a-z])"),
)

# Mistral: brackets around the user's text. Versions differ in spaces, and in the position of the system
# prompt. v1 (7B v0.1-0.2, Mixtral; a space before each bracket) and v3 (7B v0.3): before the first user's
# text; v7 (Large 2411) and its tekken form without spaces (Small 2501 and later, Magistral): in its own
# brackets. `mistral` is the usual mix.
_INST = ("[INST]", "[/INST]")
_INST_SYSTEM = ("[INST]", "[/INST]", "[SYSTEM_PROMPT]")
_OLD_MISTRAL = ("[SYSTEM_PROMPT]", "<<SYS>>")
_BEFORE_FIRST = ("", "\n\n")
_IN_USER = ChatTemplateStyle.LLAMA2
_USUAL = turns(("[SYSTEM_PROMPT] ", " [/SYSTEM_PROMPT]"), ("[INST] ", " [/INST]"), ("", " </s><s>"))
_V1 = turns(_BEFORE_FIRST, (" [INST] ", " [/INST]"), ("", "</s>"))
_V3 = turns(_BEFORE_FIRST, ("[INST] ", "[/INST]"), ("", "</s>"))
_V3_TEKKEN = turns(_BEFORE_FIRST, ("[INST]", "[/INST]"), ("", "</s>"))
_V7 = turns(("[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"), ("[INST] ", "[/INST]"), ("", "</s>"))
_V7_TEKKEN = turns(("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), ("[INST]", "[/INST]"), ("", "</s>"))
_MISTRAL = Family(
    ChatTemplate("mistral", None, _USUAL, ("</s>",), image_token="[IMG]"),
    ChatTemplate("mistral-v1", None, _V1, ("</s>",), style=_IN_USER),
    ChatTemplate("mistral-v3", None, _V3, ("</s>",), style=_IN_USER),
    ChatTemplate("mistral-v3-tekken", None, _V3_TEKKEN, ("</s>",), image_token="[IMG]", style=_IN_USER),
    ChatTemplate("mistral-v7", None, _V7, ("</s>",), image_token="[IMG]"),
    ChatTemplate("mistral-v7-tekken", None, _V7_TEKKEN, ("</s>",), image_token="[IMG]"),
    ChatTemplate("magistral", None, _V7_TEKKEN, ("</s>",), image_token="[IMG]"),
    Marks("mistral-v1", (*_INST, "[INST] ", " [/INST]"), without=_OLD_MISTRAL),
    Marks("mistral-v3", (*_INST, "[INST] "), without=(*_OLD_MISTRAL, " [/INST]")),
    Marks("mistral-v3-tekken", _INST, without=(*_OLD_MISTRAL, "[INST] ", " [/INST]")),
    Marks("mistral-v7", (*_INST, "[SYSTEM_PROMPT] ")),
    Marks("mistral-v7-tekken", _INST_SYSTEM, without=("[SYSTEM_PROMPT] ", "[THINK]"), tokens=_INST_SYSTEM),
    Marks("magistral", (*_INST_SYSTEM, "[THINK]"), without=("[SYSTEM_PROMPT] ",)),
    Named(
        "mistral",
        r"(?:mistral(?!-nemo|-small-(?:3|2501|2503|2506)|-small-.*(?:2501|2503|2506)|-large-.*2411)"
        r"|mixtral).*instruct(?![a-z])|pixtral",
    ),
    Named("mistral-v3-tekken", r"mistral-nemo.*instruct(?![a-z])|ministral-8b.*instruct(?![a-z])"),
    Named("mistral-v7", r"mistral-large-.*2411"),
    Named(
        "mistral-v7-tekken", r"mistral-small-(?=.*instruct(?![a-z]))(?:3|.*(?:2501|2503|2506))|devstral-small"
    ),
    Named("magistral", r"magistral(?![a-z])"),
)

# DeepSeek: V2's words, V3's full-width marks, V3.1's closed thought before a reply; and Janus, which uses
# V3's format.
_EOS = "<｜end▁of▁sentence｜>"
_DEEPSEEK_USER = ("<｜User｜>", "")
_V3_TURNS = turns(("", ""), _DEEPSEEK_USER, ("<｜Assistant｜>", _EOS))
_V3_1_TURNS = turns(("", ""), _DEEPSEEK_USER, ("<｜Assistant｜></think>", _EOS))
_DEEPSEEK_MARKS = ("<｜User｜>", "<｜Assistant｜>")
_DEEPSEEK = Family(
    ChatTemplate("deepseek-v2", None, turns(("", "\n\n"), ("User: ", "\n\n"), ("Assistant:", _EOS)), (_EOS,)),
    ChatTemplate("deepseek-v3", None, _V3_TURNS, (_EOS,)),
    ChatTemplate("deepseek-v3.1", None, _V3_1_TURNS, (_EOS,)),
    ChatTemplate("deepseek-r1-distill", None, _V3_TURNS, (_EOS,)),
    ChatTemplate("janus", None, _V3_TURNS, (_EOS,), image_token="<image_placeholder>\n"),
    ChatTemplate("janus-pro", None, _V3_TURNS, (_EOS,), image_token="<image_placeholder>\n"),
    Marks(
        "deepseek-v2", ("'User: ' + message['content'] +", "'Assistant: ' + message['content'] + eos_token")
    ),
    Marks("deepseek-v3", _DEEPSEEK_MARKS, without=("</think>",), tokens=_DEEPSEEK_MARKS),
    Marks("deepseek-v3", (*_DEEPSEEK_MARKS, "</think>"), without=("thinking",), types=("deepseekv3",)),
    Marks("deepseek-v3.1", (*_DEEPSEEK_MARKS, "</think>", "thinking")),
    Marks("deepseek-r1-distill", (*_DEEPSEEK_MARKS, "</think>"), without=("thinking",)),
    Marks("janus-pro", _DEEPSEEK_MARKS, tokens=_DEEPSEEK_MARKS, types=("multimodality", "januspro")),
    Named(
        "deepseek-v2",
        r"deepseek-(?:coder-)?v2.*(?:chat|instruct)(?![a-z])|deepseek-v2\.5|deepseek-llm.*chat(?![a-z])",
    ),
    Named("deepseek-v3", r"deepseek-(?:v3(?!\.?\d)|r1(?!.*distill|.*qwen|.*llama))"),
    Named("deepseek-v3.1", r"deepseek-v3\.[12]"),
    Named("deepseek-r1-distill", r"deepseek-r1.*(?:distill|qwen|llama).*"),
    Named("janus-pro", r"janus(?![a-z])"),
)

# MiniCPM-V and MiniCPM-o: Vicuna's turns in lower case, the image and the sound in brackets.
_MINICPM_TURNS = turns(("", " "), ("user:", " "), ("assistant:", "</s>"))
_MINICPM_STOP = ("<|im_end|>", "<|endoftext|>")
_IMAGE, _AUDIO = "(<image>./</image>)", "(<audio>./</audio>)"
_MINICPM = Family(
    ChatTemplate("minicpmv", None, _MINICPM_TURNS, _MINICPM_STOP, _IMAGE),
    ChatTemplate("minicpmo", None, _MINICPM_TURNS, _MINICPM_STOP, _IMAGE, _AUDIO),
    Named("minicpmv", r"minicpm-v(?![a-z])"),
    Named("minicpmo", r"minicpm-o(?![a-z])"),
)

# Gemma: the reply's role is called model; Gemma 4 has shorter marks. Gemma 3 puts the system prompt into
# the first user turn. The template known as `gemma-4-it` has replies as `assistant` and a bare system prompt,
# unlike the checkpoints' own template; `gemma-4` equals that one, so models are matched to it.
_GEMMA_TURN = ("<start_of_turn>", "<end_of_turn>")
_GEMMA_END = ("<end_of_turn>",)
_GEMMA_USER = ("<start_of_turn>user\n", "<end_of_turn>\n")
_GEMMA_MODEL = ("<start_of_turn>model\n", "<end_of_turn>\n")
_GEMMA_TURNS = turns(("", ""), _GEMMA_USER, _GEMMA_MODEL)
_GEMMA_3_TURNS = turns(("", "\n\n"), _GEMMA_USER, _GEMMA_MODEL)
_GEMMA_4_TURNS = headed("<|turn>", "\n", "<turn|>\n", assistant="model")
_GEMMA_4_BARE = turns(("", ""), ("<|turn>user\n", "<turn|>\n"), ("<|turn>assistant\n", "<turn|>\n"))
_GEMMA_MEDIA = ("<start_of_image>", "<start_of_audio>")
_GEMMA = Family(
    ChatTemplate("gemma-it", None, _GEMMA_TURNS, (), *_GEMMA_MEDIA),
    ChatTemplate("gemma-3-it", None, _GEMMA_3_TURNS, _GEMMA_END, *_GEMMA_MEDIA, style=_IN_USER),
    ChatTemplate("gemma-4", None, _GEMMA_4_TURNS, ("<turn|>",), "<|image|>", "<|audio|>"),
    ChatTemplate("gemma-4-it", None, _GEMMA_4_BARE),
    Marks("gemma-it", (*_GEMMA_TURN, "System role not supported"), tokens=_GEMMA_TURN, ends=_GEMMA_END),
    Marks("gemma-3-it", (*_GEMMA_TURN, "<start_of_image>")),
    Marks("gemma-3-it", _GEMMA_TURN, (), _GEMMA_TURN, ("gemma3", "gemma3text", "gemma3n"), _GEMMA_END),
    Marks("gemma-4", ("<|turn>", "<turn|>"), tokens=("<|turn>", "<turn|>"), ends=("<turn|>",)),
    Named("gemma-4", r"gemma-?4(?![a-z0-9]).*(?<![a-z0-9])it(?![a-z])"),
    Named("gemma-3-it", r"(?:gemma-?3n?(?![a-z0-9]).*|medgemma.*(?<![a-z0-9])it(?![a-z]).*)"),
    Named("gemma-it", r"(?!medgemma)[a-z]*gemma(?!-?[34](?![a-z0-9])|-?3n).*(?<![a-z0-9])it(?![a-z])"),
)

# Cohere Command: a token for the turn and one for the role; Command A marks the response as well.
_START, _END = "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"
_SYSTEM, _USER = (f"{_START}<|SYSTEM_TOKEN|>", _END), (f"{_START}<|USER_TOKEN|>", _END)
_CHATBOT = f"{_START}<|CHATBOT_TOKEN|>"
_RESPONSE = (f"{_CHATBOT}<|START_RESPONSE|>", f"<|END_RESPONSE|>{_END}")
_COMMAND_R = (_START, "<|CHATBOT_TOKEN|>")
_COMMAND_A = (*_COMMAND_R, "<|START_RESPONSE|>")
_COMMAND = Family(
    ChatTemplate("c4ai-command-r", None, turns(_SYSTEM, _USER, (_CHATBOT, _END))),
    ChatTemplate("command-a", None, turns(_SYSTEM, _USER, _RESPONSE), ("<|END_RESPONSE|>", _END)),
    Marks("c4ai-command-r", _COMMAND_R, ("<|START_RESPONSE|>",), _COMMAND_R, ends=(_END,)),
    Marks("command-a", _COMMAND_A, tokens=_COMMAND_A, ends=(_END,)),
    Named("c4ai-command-r", r"c4ai-command-r(?!7b)"),
    Named("command-a", r"(?:c4ai-)?command-(?:a(?![a-z])|r7b)"),
)

# IBM Granite: the role between two marks; Granite 4 breaks the line after a turn. Granite 3's checkpoints
# break it as well and write a dated system prompt; the template known as `granite-3-instruct` does not, so
# models are matched to it only by name.
_SAFE = "You are a helpful assistant. Please ensure responses are professional, accurate, and safe."
_GRANITE_ROLE = ("<|start_of_role|>", "<|end_of_role|>")
_GRANITE = Family(
    ChatTemplate("granite-3-instruct", None, headed(*_GRANITE_ROLE, "<|end_of_text|>"), ("<|end_of_text|>",)),
    ChatTemplate("granite-4", _SAFE, headed(*_GRANITE_ROLE, "<|end_of_text|>\n"), ("<|end_of_text|>",)),
    Marks("granite-4", (*_GRANITE_ROLE, _SAFE)),
    Marks("granite-4", (*_GRANITE_ROLE, _SAFE), tokens=_GRANITE_ROLE, types=("granitemoehybrid",)),
    Named("granite-3-instruct", r"granite(?!-4).*instruct(?![a-z])"),
    Named("granite-4", r"granite-4"),
)

# GLM: the role, a line break, the text; the next turn's mark ends a turn. GLM-4.5 and later write their
# thoughts into the reply; the templates here write the closed, empty thought, as in the history.
# GLM-4.7 has no line breaks, and writes only the end of the empty thought. The vision models' template
# breaks the line after a turn.
_GLM_STOP = ("<|user|>", "<|endoftext|>", "<|observation|>")
_GLM_TURNS = headed("<|", "|>\n", "")
_GLM_4_5_TURNS = {**_GLM_TURNS, "assistant": ("<|assistant|>\n<think></think>\n", "")}
_GLM_4_7_TURNS = {**headed("<|", "|>", ""), "assistant": ("<|assistant|></think>", "")}
_GLM_START = ("[gMASK]", "<sop>")
_GLM_IMAGE = "<|begin_of_image|>"
_GLM = Family(
    ChatTemplate("glm-4", None, _GLM_TURNS, _GLM_STOP),
    ChatTemplate("glm-4.5", None, _GLM_4_5_TURNS, _GLM_STOP),
    ChatTemplate("glm-4.7", None, _GLM_4_7_TURNS, _GLM_STOP),
    ChatTemplate("glm-4v", None, headed("<|", "|>\n", "\n"), _GLM_STOP, image_token="<|image|>"),
    Marks("glm-4", _GLM_START, ("</think>", _GLM_IMAGE), (*_GLM_START, "<|observation|>")),
    Marks("glm-4.5", (*_GLM_START, "</think>", "/nothink"), without=(_GLM_IMAGE,)),
    Marks(
        "glm-4.7", (*_GLM_START, "</think>", "clear_thinking"), ("/nothink", "<think></think>", _GLM_IMAGE)
    ),
    Marks("glm-4v", (*_GLM_START, _GLM_IMAGE)),
    Named("glm-4v", r"glm[-_]?4(?:\.\d+)?v"),
    Named("glm-4", r"glm[-_]?4[-_](?:\d+b[-_](?:chat|0414)|air|flash)|glm-z1"),
    Named("glm-4.5", r"glm[-_]?4\.[56](?![\dv])"),
    Named("glm-4.7", r"glm[-_]?4\.7(?![\dv])"),
)

# gpt-oss, in the harmony format: messages with a channel; a system prompt is the developer's instructions.
# The template opens the final channel, so there is no thought before the reply. The model's identity and the
# date, which the checkpoint's own template writes first, are omitted.
_HARMONY = ("<|start|>", "<|message|>", "<|channel|>")
_HARMONY_TURNS = turns(
    ("<|start|>developer<|message|># Instructions\n\n", "\n\n<|end|>"),
    ("<|start|>user<|message|>", "<|end|>"),
    ("<|start|>assistant<|channel|>final<|message|>", "<|end|>"),
)
_GPT_OSS = Family(
    ChatTemplate("gpt-oss", None, _HARMONY_TURNS, ("<|end|>", "<|return|>", "<|call|>")),
    Marks("gpt-oss", _HARMONY, tokens=_HARMONY, ends=("<|return|>", "<|call|>")),
    Named("gpt-oss", r"gpt-oss(?![a-z])"),
)

# Phi: 3 and 3.5 break lines around the text, 4-mini does not, 4 has ChatML's marks with a separator.
_SEPARATED = ("<|im_start|>", "<|im_sep|>", "<|im_end|>")
_PHI = Family(
    ChatTemplate("phi-3.5", None, headed("<|", "|>\n", "<|end|>\n"), ("<|end|>",)),
    ChatTemplate("phi-4", None, headed(*_SEPARATED), ("<|im_end|>",)),
    ChatTemplate("phi-4-mini", None, headed("<|", "|>", "<|end|>"), ("<|end|>",)),
    Marks("phi-3.5", ("<|end|>", "<|assistant|>", r"<|assistant|>\n"), without=("<|start|>", "[gMASK]")),
    Marks("phi-4", _SEPARATED, tokens=_SEPARATED, ends=("<|im_end|>",)),
    Marks("phi-4-mini", ("<|end|>", "<|assistant|>"), without=(r"<|assistant|>\n", "<|start|>", "[gMASK]")),
    Named("phi-3.5", r"phi-?3(?:\.5)?-.*instruct(?![a-z])"),
    Named("phi-4-mini", r"phi-?4-(?:mini|multimodal)"),
    Named("phi-4", r"phi-?4(?!-mini|-multimodal)(?!\d)"),
)

# Kimi K2: a mark for the kind of turn, its name, and a mark before the text. The thinking model writes its
# thoughts into the reply; the template here writes the closed, empty thought, as in the history. So a reply
# that it opens has no thought.
_KIMI_PROMPT = "You are Kimi, an AI assistant created by Moonshot AI."
_KIMI_END = "<|im_end|>"
_KIMI_SYSTEM = ("<|im_system|>system<|im_middle|>", _KIMI_END)
_KIMI_USER = ("<|im_user|>user<|im_middle|>", _KIMI_END)
_KIMI_REPLY = "<|im_assistant|>assistant<|im_middle|>"
_KIMI_TURNS = turns(_KIMI_SYSTEM, _KIMI_USER, (_KIMI_REPLY, _KIMI_END))
_KIMI_CLOSED = turns(_KIMI_SYSTEM, _KIMI_USER, (f"{_KIMI_REPLY}<think></think>", _KIMI_END))
_KIMI_TOKENS = ("<|im_user|>", "<|im_assistant|>", "<|im_middle|>")
_KIMI_MARKS = ("<|im_middle|>", _KIMI_END)
_KIMI = Family(
    ChatTemplate("kimi-k2", _KIMI_PROMPT, _KIMI_TURNS, (_KIMI_END,)),
    ChatTemplate("kimi-k2-thinking", _KIMI_PROMPT, _KIMI_CLOSED, (_KIMI_END,)),
    Marks("kimi-k2", _KIMI_MARKS, without=("<think>",), tokens=_KIMI_TOKENS, ends=(_KIMI_END,)),
    # A later model has a switch for thoughts.
    Marks("kimi-k2-thinking", (*_KIMI_MARKS, "<think></think>"), without=("thinking is defined",)),
    Named("kimi-k2", r"kimi-k2(?!\.?\d|-thinking)"),
    Named("kimi-k2-thinking", r"kimi-k2-thinking"),
)

# MiniMax M2: a mark and the role, a line break, the text, a mark. The tokenizer adds the first one of all.
_MINIMAX_MARKS = ("]~b]", "[e~[")
_MINIMAX_TURNS = headed("]~b]", "\n", "[e~[\n", assistant="ai")
_MINIMAX = Family(
    ChatTemplate("minimax-m2", "You are a helpful assistant.", _MINIMAX_TURNS, ("[e~[",)),
    Marks("minimax-m2", _MINIMAX_MARKS, tokens=_MINIMAX_MARKS, ends=("[e~[",)),
    Named("minimax-m2", r"minimax-m2"),
)

# OLMo 2: the role, a line break, the text; only a reply ends with a mark.
_OLMO_TURNS = turns(("<|system|>\n", "\n"), ("<|user|>\n", "\n"), ("<|assistant|>\n", "<|endoftext|>\n"))
_NOT_OLMO = ("<|end|>", "[gMASK]", "</s>", "<|im_start|>")
_OLMO_2 = Family(
    ChatTemplate("olmo-2", None, _OLMO_TURNS, ("<|endoftext|>",)),
    Marks("olmo-2", ("<|assistant|>", "bos_token", "eos_token"), without=_NOT_OLMO, types=("olmo2",)),
    Named("olmo-2", r"olmo-2.*(?:instruct|sft|dpo)(?![a-z])"),
)

# Baichuan 2 Chat: two reserved tokens, one before each side's text.
_BAICHUAN_MARKS = ("<reserved_106>", "<reserved_107>")
_BAICHUAN_TURNS = turns(("", ""), ("<reserved_106>", ""), ("<reserved_107>", ""))
_BAICHUAN_2 = Family(
    ChatTemplate("baichuan2", None, _BAICHUAN_TURNS, (*_BAICHUAN_MARKS, "</s>")),
    Marks("baichuan2", _BAICHUAN_MARKS, tokens=_BAICHUAN_MARKS),
    Named("baichuan2", r"baichuan-?2.*chat(?![a-z])"),
)

# Grok 2: names and a separator between turns.
_AFTER = "<|separator|>\n\n"
_GROK_TURNS = turns(("System: ", _AFTER), ("Human: ", _AFTER), ("Assistant:", _AFTER))
_GROK_2 = Family(
    ChatTemplate("grok-2", None, _GROK_TURNS, ("<|separator|>",)),
    Marks("grok-2", ("Human: ", "Assistant:", "<|separator|>")),
    Named("grok-2", r"grok-2(?!\d)"),
)

FAMILIES: tuple[Family, ...] = (
    _PLAIN, chatml.CHATML, chatml.LLAVA, _VICUNA, _ZEPHYR, chatml.QWEN, _LLAMA_2, _LLAMA_3, _LLAMA_4,
    _MISTRAL, _DEEPSEEK, _MINICPM, chatml.YI, _GEMMA, chatml.DBRX, _COMMAND, chatml.INTERN, _GRANITE, _GLM,
    _GPT_OSS, _PHI, _KIMI, _MINIMAX, chatml.SMOLLM, _OLMO_2, _BAICHUAN_2, _GROK_2,
)  # fmt: skip

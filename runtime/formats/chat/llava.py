"""LLaVA over ChatML and Llama 3 language models: the image on a line of its own."""

from __future__ import annotations

from runtime.formats.chat.family import Family, Named
from runtime.formats.chat.template import CHATML_TURNS, ChatTemplate, headed

CHATML_LLAVA = ChatTemplate(
    "chatml-llava", "You are a helpful assistant.", CHATML_TURNS, ("<|im_end|>",), image_token="<image>\n"
)
LLAMA_3_LLAVA = ChatTemplate(
    "llama-3-instruct-llava",
    None,
    headed("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"),
    ("<|eot_id|>",),
    image_token="<image>\n",
)

FAMILY = Family(
    names=(
        Named("chatml-llava", r"llava-v1\.6-(?:yi-)?34b"),
        Named("chatml-llava", r"llava-next-video-34b"),
        Named("chatml-llava", r"llava-onevision-qwen2"),
        Named("llama-3-instruct-llava", r"llama-?3-llava-next|llava-(?:next-)?llama-?3|llava-v1\.6-llama-?3"),
    )
)

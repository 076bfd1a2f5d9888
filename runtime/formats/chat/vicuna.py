"""Vicuna 1.1 and the first LLaVA models: `USER:` and `ASSISTANT:` on one line."""

from __future__ import annotations

from runtime.formats.chat.family import Family, Marks, Named
from runtime.formats.chat.template import ChatTemplate, turns

TEMPLATE = ChatTemplate(
    "vicuna_v1.1",
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    turns(("", " "), ("USER:", " "), ("ASSISTANT:", "</s>")),
    image_token=" <image>\n",
)

FAMILY = Family(
    marks=(Marks("vicuna_v1.1", ("'USER: ' + message['content']", "'ASSISTANT: ' + message['content']")),),
    names=(Named("vicuna_v1.1", r"vicuna|llava-v1\.5|llava-next-video-7b"),),
)

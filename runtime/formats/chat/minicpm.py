"""MiniCPM-V and MiniCPM-o: Vicuna's turns in lower case, the image and the sound in brackets."""

from __future__ import annotations

from runtime.formats.chat.family import Family, Named
from runtime.formats.chat.template import ChatTemplate, turns

_TURNS = turns(("", " "), ("user:", " "), ("assistant:", "</s>"))
_STOP = ("<|im_end|>", "<|endoftext|>")

V = ChatTemplate("minicpmv", None, _TURNS, _STOP, image_token="(<image>./</image>)")
O = ChatTemplate(  # noqa: E741 - the model's own name
    "minicpmo", None, _TURNS, _STOP, image_token="(<image>./</image>)", audio_token="(<audio>./</audio>)"
)

FAMILY = Family(
    names=(Named("minicpmv", r"minicpm-v(?![a-z])"), Named("minicpmo", r"minicpm-o(?![a-z])")),
)

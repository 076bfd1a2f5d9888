"""Crusoe: managed inference of open models behind OpenAI's API (docs.crusoecloud.com, "Serverless
Inference"). Knows only where it is and which key it wants.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_dsl.backends.openai import OpenAI

BASE_URL = "https://api.inference.crusoecloud.com/v1"


class Crusoe(OpenAI):
    """`model_name` at Crusoe. api_key None: the environment's CRUSOE_API_KEY. Other words as for OpenAI."""

    name = "crusoe"

    def __init__(
        self, model_name: str, api_key: str | None = None, base_url: str | None = None, **words: Any
    ) -> None:
        key = os.environ.get("CRUSOE_API_KEY", "") if api_key is None else api_key
        words.setdefault("is_chat_model", True)
        super().__init__(model_name, api_key=key, base_url=base_url or BASE_URL, **words)

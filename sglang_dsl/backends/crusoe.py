"""Crusoe: managed inference of open models behind an OpenAI-compatible API (docs.crusoecloud.com, "Serverless
Inference"). Knows only its address and which key it needs."""

from __future__ import annotations

import os
from typing import Any

from sglang_dsl.backends.openai import OpenAI

BASE_URL = "https://api.inference.crusoecloud.com/v1"


class Crusoe(OpenAI):
    """The model `model_name` at Crusoe. api_key None: CRUSOE_API_KEY from the environment. Other keyword
    arguments as for OpenAI."""

    name = "crusoe"

    def __init__(
        self, model_name: str, api_key: str | None = None, base_url: str | None = None, **kwargs: Any
    ) -> None:
        key = os.environ.get("CRUSOE_API_KEY", "") if api_key is None else api_key
        kwargs.setdefault("is_chat_model", True)
        super().__init__(model_name, api_key=key, base_url=base_url or BASE_URL, **kwargs)

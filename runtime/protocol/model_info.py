"""ModelInfo: facts about the served model. Loads nothing."""

from __future__ import annotations

from typing import Any

import msgspec


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """path: of the checkpoint; served_name: for clients. is_generation: False for encoders. Lengths in
    tokens.

    context_length           the most for prompt and output of one request together
    max_prompt_length        the most for its prompt: less than the context if the KV pool is small
    max_total_tokens         size of the KV pool
    takes_adapters           LoRA adapters can be loaded, and named by requests
    template_source, template_name, template_reason  the chat template, see TemplateChoice
    force_reasoning          every reply begins inside the model's reasoning
    tool_parser, reasoning_parser  names of the model's formats for tool calls and reasoning
    tool_parser_reason       why this format, or why none
    default_sampling         sampling parameters of the checkpoint's generation_config
    """

    path: str
    served_name: str
    tokenizer_path: str = ""
    architecture: str = ""
    model_type: str = ""
    is_generation: bool = True
    is_multimodal: bool = False
    vocab_size: int = 0
    hidden_size: int = 0
    context_length: int = 0
    max_prompt_length: int = 0
    max_total_tokens: int = 0
    max_running_requests: int = 0
    takes_adapters: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    template_source: str = "none"
    template_name: str | None = None
    template_reason: str = ""
    force_reasoning: bool = False
    tool_parser: str | None = None
    tool_parser_reason: str = ""
    reasoning_parser: str | None = None
    weight_version: str = "default"
    default_sampling: dict[str, Any] = {}

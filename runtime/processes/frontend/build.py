"""Builds the frontend of a loaded checkpoint. The same for an engine in this process and for an HTTP
worker."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from runtime.config.engine import EngineConfig
from runtime.config.fields import Fields
from runtime.config.model import ModelSpec
from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.formats.tools.parser import detector_of
from runtime.formats.tools.table import tool_format_of
from runtime.ipc.mailbox import Outbox
from runtime.processes.checkpoint.model import Model, left_on, model_reasoning
from runtime.processes.frontend.images.pictures import PictureReader
from runtime.processes.frontend.prepare import Preparer
from runtime.processes.frontend.prompt import Limits
from runtime.processes.frontend.tokenizer_manager import TokenizerManager
from runtime.protocol.errors import BadRequest
from runtime.protocol.model_info import ModelInfo

SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def build_tokenizer_manager(
    config: EngineConfig,
    model: Model,
    slots: int,
    outbox: Outbox,
    *,
    served_name: str | None = None,
    **options: Any,
) -> TokenizerManager:
    """slots: size of the KV pool. served_name: the model's name for clients; None: that of its directory.
    options: of TokenizerManager."""
    limits = Limits(
        model.spec.vocab_size,
        config.context(model.spec),
        slots,
        auto_truncate=config.allow_auto_truncate,
        top_logprobs=config.max_top_logprobs,
        token_ids_logprob=config.max_token_ids_logprob,
        bootstrap_port=(
            None if config.disaggregation_mode == "null" else config.disaggregation_bootstrap_port
        ),
        adapters=config.takes_adapters,
    )
    marks, vision = None, None
    if isinstance(model.spec, ModelSpec):
        marks, vision = model_reasoning(config, model), model.spec.vision
    preparer = Preparer(
        model.tokenizer,
        model.template_choice.renderer,
        limits,
        allow_control_tokens=config.allow_control_tokens,
        pictures=None if vision is None else PictureReader(vision, config),
        completion_template=config.completion_template,
        marks=marks,
        thinks=left_on(model, marks),
    )
    return TokenizerManager(preparer, outbox, model=describe(config, model, limits, served_name), **options)


def describe(config: EngineConfig, model: Model, limits: Limits, served_name: str | None) -> ModelInfo:
    spec, choice = model.spec, model.template_choice
    tool_parser, why = tool_parser_of(config, model)
    return ModelInfo(
        path=str(model.path),
        served_name=served_name or Path(config.model).name or str(model.path),
        tokenizer_path=str(model.path),
        architecture=spec.architecture,
        is_generation=isinstance(spec, ModelSpec),
        is_multimodal=isinstance(spec, ModelSpec) and spec.vision is not None,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        context_length=limits.context,
        max_prompt_length=limits.prompt,
        max_total_tokens=limits.slots,
        max_running_requests=config.max_running_requests,
        takes_adapters=limits.adapters,
        bos_id=model.tokenizer.bos,
        eos_ids=tuple(sorted(model.tokenizer.eos)),
        template_source=choice.source,
        template_name=choice.name,
        template_reason=choice.reason,
        force_reasoning=choice.force_reasoning,
        tool_parser=tool_parser,
        tool_parser_reason=why,
        reasoning_parser=config.reasoning_parser,
        default_sampling=default_sampling(model.path),
    )


def tool_parser_of(config: EngineConfig, model: Model) -> tuple[str | None, str]:
    """The format of the model's tool calls, and the reason. Raises BadRequest for an unknown name."""
    option = config.tool_call_parser
    if option == "none":
        return None, "tool_call_parser is none"
    if option != "auto":
        try:
            detector_of(option)
        except ValueError as error:
            raise BadRequest(str(error), where="tool_call_parser") from error
        return option, "asked for"
    template = model.template_choice.template
    shown = tool_format_of(template.sources.values()) if isinstance(template, JinjaChatTemplate) else None
    if shown is None:
        return None, "the chat template shows no known format of tool calls"
    return shown[0], f"the chat template shows {shown[1]}"


def default_sampling(path: Path) -> dict[str, Any]:
    """The sampling parameters in generation_config.json. Raises ModelLoadError for a broken file."""
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    values = Fields.read(file).values
    params = {
        name: values[name]
        for name in SAMPLING_NAMES
        if type(values.get(name)) in (int, float) and math.isfinite(values[name])
    }
    if "top_k" in params:
        # There 0 stands for "all", here -1 does.
        params["top_k"] = int(params["top_k"]) if params["top_k"] >= 1 else -1
    if values.get("do_sample") is False:
        params["temperature"] = 0.0
    return params

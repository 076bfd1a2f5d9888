"""Model: a checkpoint without its weights, for processes without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtime.config.encoder import AnySpec, EncoderSpec
from runtime.config.engine import EngineConfig
from runtime.processes.checkpoint.templates import NO_TEMPLATE, TemplateChoice, choose_template
from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.protocol.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint without its weights."""

    path: Path
    spec: AnySpec
    tokenizer: Tokenizer
    template_choice: TemplateChoice = NO_TEMPLATE


def load_model(config: EngineConfig, *, turns: bool = True) -> Model:
    """turns: whether to load the chat template. Raises ModelLoadError, and BadRequest for options that do not
    fit the model."""
    path, spec = config.locate()
    tokenizer = load_tokenizer(path, spec)
    if isinstance(spec, EncoderSpec) and config.chat_template is not None:
        raise BadRequest("this model gives embeddings only: it reads no turns", where="chat_template")
    if not turns or isinstance(spec, EncoderSpec):
        return Model(path, spec, tokenizer)
    choice = choose_template(
        config.chat_template, path, tokenizer, config.hf_chat_template_name, config.model
    )
    return Model(path, spec, tokenizer, choice)


def load_tokenizer(path: Path, spec: AnySpec) -> Tokenizer:
    """Raises ModelLoadError."""
    generates = not isinstance(spec, EncoderSpec)
    return Tokenizer.load(path, spec.vocab_size, spec.eos_ids, generates=generates)

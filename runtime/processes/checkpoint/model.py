"""Model: a checkpoint without its weights, for processes without torch; and the marks of its reasoning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from runtime.config.checkpoints import AnySpec
from runtime.config.encoder import EncoderSpec
from runtime.config.engine import EngineConfig
from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.formats.reasoning.marks import (
    AUTO,
    KNOWN,
    SWITCHES,
    ReasoningMarks,
    ReasoningType,
    marks_of,
    reasoning_type,
)
from runtime.processes.checkpoint.templates import NO_TEMPLATE, TemplateChoice, choose_template
from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.protocol.errors import BadRequest, TemplateError
from runtime.protocol.registry import UnknownName


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint without its weights."""

    path: Path
    spec: AnySpec
    tokenizer: Tokenizer
    template_choice: TemplateChoice = NO_TEMPLATE


def load_model(config: EngineConfig, *, turns: bool = True) -> Model:
    """turns: load the chat template. Raises ModelLoadError, BadRequest for options that do not fit."""
    path, spec = config.locate()
    tokenizer = load_tokenizer(path, spec)
    if isinstance(spec, EncoderSpec) and config.chat_template is not None:
        raise BadRequest("this model gives embeddings only: it reads no turns", where="chat_template")
    if not turns or isinstance(spec, EncoderSpec):
        return Model(path, spec, tokenizer)
    return Model(path, spec, tokenizer, _template(config, path, tokenizer))


def _template(config: EngineConfig, path: Path, tokenizer: Tokenizer) -> TemplateChoice:
    return choose_template(config.chat_template, path, tokenizer, config.hf_chat_template_name, config.model)


def load_tokenizer(path: Path, spec: AnySpec) -> Tokenizer:
    """Raises ModelLoadError."""
    generates = not isinstance(spec, EncoderSpec)
    return Tokenizer.load(path, spec.vocab_size, spec.eos_ids, generates=generates)


def model_reasoning(config: EngineConfig, model: Model) -> ReasoningMarks | None:
    """The marks of the model's reasoning, by the option `reasoning_end`; None if it has none. The same in
    every process. Raises BadRequest for a bad option, ModelLoadError for a bad template."""
    tokenizer = model.tokenizer
    kind = reasoning_kind(config.reasoning_parser)
    return marks_of(
        kind.marks if kind is not None and config.reasoning_end == AUTO else config.reasoning_end,
        tokenizer.added_id,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        _templates(config, model),
    )


def reasoning_kind(name: str | None) -> ReasoningType | None:
    """The family that the option reasoning_parser names. Raises BadRequest."""
    if name is None:
        return None
    try:
        return reasoning_type(name)
    except UnknownName as error:
        raise BadRequest(str(error), where="reasoning_parser") from error


def _templates(config: EngineConfig, model: Model) -> Iterator[str]:
    """Texts of the chat template. A process that renders no turns loads it only if no known mark decides."""
    if any(model.tokenizer.added_id(marks.close) is not None for marks in KNOWN):
        return
    choice = model.template_choice
    if choice.source == "none":
        choice = _template(config, model.path, model.tokenizer)
    if isinstance(choice.template, JinjaChatTemplate):
        yield from choice.template.sources.values()


def left_on(model: Model, marks: ReasoningMarks | None) -> Callable[[Mapping[str, Any]], bool]:
    """A function of the chat template's variables: whether the model begins with reasoning although the
    prompt does not open it. It does if they switch it on, or if the template, switched off, would close
    it."""
    template = model.template_choice.template
    if marks is None or not isinstance(template, JinjaChatTemplate):
        return lambda variables: False

    @lru_cache(maxsize=1)
    def switchable() -> bool:
        if not any(name in template.reads for name in SWITCHES):
            return False
        try:
            off = template.render(
                [{"role": "user", "content": "?"}],
                add_generation_prompt=True,
                template_kwargs={SWITCHES[0]: False},
            )
        except TemplateError:
            return False
        return marks.closed_by(off)

    def thinks(variables: Mapping[str, Any]) -> bool:
        switches = [variables[name] for name in SWITCHES if name in variables]
        return bool(switches[0]) if switches else switchable()

    return thinks

"""Chooses the chat template of a checkpoint. The templates and their rendering are in runtime.formats."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from runtime.config.fields import Fields
from runtime.formats.chat import files, matching
from runtime.formats.chat.derive import Derivation, derive_chat_template
from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.formats.chat.registry import get_chat_template
from runtime.formats.chat.render import TextTemplate
from runtime.formats.chat.template import ChatTemplate
from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.protocol.errors import ModelLoadError, TemplateError

log = logging.getLogger("runtime.processes.templates")  # the name that the tutorials give

Source = Literal["asked", "checkpoint jinja", "checkpoint marks", "model name", "none"]
_PROCESSOR_FILE = "chat_template.json"


@dataclass(frozen=True)
class TemplateChoice:
    """The template of a model's turns.

    source    how it was chosen
    name      of the registered template, or of the family that Jinja text is recognised as; None: unknown
    reason    why this one, or why none, for people
    template  None if there is none
    """

    source: Source = "none"
    name: str | None = None
    reason: str = "no chat template was given"
    template: ChatTemplate | TextTemplate | None = field(default=None, repr=False)

    @property
    def renderer(self) -> ChatTemplate | TextTemplate:
        """The template, or one that refuses every turn with the reason."""
        return NoTemplate(self.reason) if self.template is None else self.template

    @cached_property
    def force_reasoning(self) -> bool:
        """Whether the template opens the model's reasoning before every reply."""
        return isinstance(self.template, JinjaChatTemplate) and self.template.force_reasoning

    @cached_property
    def derivation(self) -> Derivation | None:
        """The Jinja template as prefixes and suffixes; None without one, or if it cannot be parsed."""
        if not isinstance(self.template, JinjaChatTemplate):
            return None
        try:
            return derive_chat_template(self.template, name=self.name or "derived")
        except TemplateError:
            return None  # requests with turns get the error

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The template as prefixes and suffixes, if they describe it completely."""
        if isinstance(self.template, ChatTemplate):
            return self.template
        return None if self.derivation is None else self.derivation.template

    def describe(self) -> dict[str, Any]:
        """Plain values for people and for the wire: source, name, reason; `shape`: "prefixes" (prefixes and
        suffixes describe the template completely), "jinja" or None; and its properties."""
        described: dict[str, Any] = {"source": self.source, "name": self.name, "reason": self.reason}
        derived = self.derivation
        if derived is not None:
            shape = "jinja" if derived.template is None else "prefixes"
            return described | {"shape": shape, **derived.facts()}
        if not isinstance(self.template, ChatTemplate):
            return described | {"shape": None}
        facts = {"append_only": True, "keeps_reasoning": True, "reuses_replies": True}
        return described | {"shape": "prefixes", **facts}


@dataclass(frozen=True)
class NoTemplate:
    """In place of a chat template: refuses turns with the reason, and a hint."""

    reason: str
    bos_token: str = ""
    opening: str = ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        raise TemplateError(
            f"the messages have turns, and this model has no chat template: {self.reason}",
            where="messages",
            hint=f"start the engine with {matching.WAYS_TO_CHOOSE}; or prompt it with plain text",
        )


NO_TEMPLATE = TemplateChoice()


def choose_template(
    option: str | dict[str, str] | None,
    path: Path,
    tokenizer: Tokenizer,
    name: str | None = None,
    called: str | None = None,
) -> TemplateChoice:
    """The template of the checkpoint in `path`, which the user may have `called` by another path (a link, or
    a hub id). The first of these that has an answer decides:

    1. the `option`: a registered name, the path of a .jinja or .json file, Jinja text, Jinja texts by name;
    2. the checkpoint's own Jinja text (`name`: which of several named ones);
    3. a registered matching function for this path;
    4. its marks: special tokens and model type, confirmed by its end tokens or names (see match_checkpoint);
    5. its name: as the user called it, its directory's, then `_name_or_path` of its config.json;
    6. none: turns are refused, with the reason.

    Raises ModelLoadError: the option's template does not exist, or has the wrong form.
    """
    choice = _choose(option, path, tokenizer, name, called)
    log.info("chat template of %s: %s (%s): %s", path, choice.name, choice.source, choice.reason)
    return choice


def _choose(
    option: str | dict[str, str] | None,
    path: Path,
    tokenizer: Tokenizer,
    name: str | None,
    called: str | None,
) -> TemplateChoice:
    file = path / "config.json"
    config = Fields.read(file).values if file.is_file() else {}
    kind = _kind(config)
    if option is not None:
        # A text that cannot be parsed harms turns only: plain prompts need no template.
        template = files.load_chat_template(
            option, variables=tokenizer.tokens, hf_chat_template_name=name, check=False
        )
        return TemplateChoice(
            "asked", _recognised(template, kind), f"chat_template={_short(option)}", template
        )
    sources, origin = _checkpoint_jinja(path, tokenizer)
    if sources:
        named = files.named_templates(sources, tokenizer.tokens, name)
        which = f"{name!r} of " if name is not None else ""
        return TemplateChoice("checkpoint jinja", _recognised(named, kind), f"{which}{origin}", named)
    files.refuse_name(name, "the checkpoint")
    return _by_rules([called or str(path), str(path)], tokenizer, config, kind)


def _by_rules(
    paths: Sequence[str], tokenizer: Tokenizer, config: Mapping[str, Any], kind: str
) -> TemplateChoice:
    """The template of a checkpoint without Jinja text."""
    for path in dict.fromkeys(paths):
        registered = matching.ask_functions(path)
        if registered is not None:
            return _registered("model name", registered, f"a registered matching function says so of {path}")
    earlier = config.get("_name_or_path")
    names = list(
        dict.fromkeys([*paths, *([earlier] if isinstance(earlier, str) and earlier.strip() else [])])
    )
    held = [token for token in sorted(matching.mark_tokens()) if tokenizer.added_id(token) is not None]
    ends = [token for token in held if tokenizer.added_id(token) in tokenizer.eos]
    marked = matching.match_checkpoint(None, held, kind)
    if matching.match_checkpoint(None, held, kind, eos_tokens=ends, model_names=names) is not None and marked:
        borne_out = f"generations end with {', '.join(ends)}" if ends else "a name says that it chats"
        return _registered("checkpoint marks", marked, f"its special tokens are this format's; {borne_out}")
    for known in names:
        family = matching.match_model_path(known)
        if family is not None:
            return _registered("model name", family, f"a model called {matching.model_name(known)!r}")
    called = " or ".join(dict.fromkeys(repr(matching.model_name(known)) for known in names))
    reason = f"the checkpoint has none of its own, and no rule knows a model called {called}"
    if marked is not None:
        reason += (
            f"; its special tokens are those of {marked!r}, but neither an end-of-turn token among the "
            "end-of-sequence ids nor its name says that it was trained on it"
        )
    return TemplateChoice("none", None, reason)


def _registered(source: Source, name: str, reason: str) -> TemplateChoice:
    try:
        return TemplateChoice(source, name, reason, get_chat_template(name))
    except KeyError as error:
        raise ModelLoadError(f"{reason}, and {error}", where="chat_template") from error


def _checkpoint_jinja(path: Path, tokenizer: Tokenizer) -> tuple[dict[str, str], str]:
    """The checkpoint's Jinja texts by name, and their file: the tokenizer's, else a processor's."""
    sources = files.find_chat_template(path, tokenizer.config)
    if sources:
        file = "chat_template.jinja" if (path / "chat_template.jinja").is_file() else "tokenizer_config.json"
        return sources, file
    processor = path / _PROCESSOR_FILE
    return (files.read_template_sources(processor) if processor.is_file() else {}), _PROCESSOR_FILE


def _kind(config: Mapping[str, Any]) -> str:
    match config:
        case {"model_type": str(kind)} if kind:
            return kind
        case {"architectures": [str(kind), *_]}:
            return kind
        case _:
            return ""


def _recognised(template: ChatTemplate | JinjaChatTemplate, kind: str) -> str | None:
    """The name of the registered template, or of the one whose marks the text has."""
    if isinstance(template, ChatTemplate):
        return template.name
    sources = template.sources
    text = sources.get("default") or next(iter(sources.values()))
    return matching.match_checkpoint(text, (), kind)


def _short(option: str | Mapping[str, str]) -> str:
    shown = repr(option) if isinstance(option, str) else f"{{{', '.join(map(repr, option))}}}"
    return shown if len(shown) <= 60 else f"{shown[:57]}..."

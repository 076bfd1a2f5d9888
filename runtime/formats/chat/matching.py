"""Which chat template a checkpoint writes: by what the checkpoint holds first, by its name second, never by
guess.

The marks and names are data in the families' own files; this searches them. It opens no file.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from functools import cache

from runtime.formats.chat.family import Family, Marks
from runtime.formats.chat.registry import BUILT_IN, get_chat_template
from runtime.formats.chat.template import ChatTemplate
from runtime.protocol.errors import TemplateError

MatchingFunction = Callable[[str], str | None]
"""Takes the whole path or id; returns the name of a registered template, or None."""

_FUNCTIONS: list[MatchingFunction] = []

# Words that say a checkpoint was not trained to chat, whatever its family.
_NO_CHAT = re.compile(
    r"(?<![a-z0-9])(?:base|pt|pretrain(?:ed)?|embed(?:ding)?s?|reranker|reward)(?![a-z0-9])"
)
_CACHED = re.compile(r"models--(?:.+?--)?(?P<name>.+)")


class UnknownChatTemplate(TemplateError, KeyError):
    """No rule knows the model; the message names the ways to choose a format."""


def register_chat_template_matching_function(function: MatchingFunction) -> MatchingFunction:
    """Ask `function(model_path)` before the built-in rules; registered functions are asked in the order of
    their registration, and the first that returns a name wins. Also a decorator.
    """
    if function not in _FUNCTIONS:
        _FUNCTIONS.append(function)
    return function


def get_chat_template_by_model_path(model_path: str) -> ChatTemplate:
    """The template of the model at this path or hub id, by its name: registered functions first, then the
    families' rules on the last component. Raises UnknownChatTemplate; no format is made up.
    """
    name = match_model_path(model_path)
    if name is None:
        raise UnknownChatTemplate(
            f"no chat template is known for the model {model_name(model_path)!r}",
            where=f"model_path {model_path!r}",
            hint='choose one: chat_template="chatml" or another registered name, the path of a .jinja or '
            ".json file, or register_chat_template_matching_function",
        )
    return get_chat_template(name)


def match_model_path(model_path: str) -> str | None:
    """Name of the template, or None. The rule whose match begins first in the model's name wins (a distilled
    or derived model is named after its own family first), then the longest match.
    """
    for function in _FUNCTIONS:
        found = function(model_path)
        if found is not None:
            return found
    name = model_name(model_path).lower()
    if _NO_CHAT.search(name):
        return None
    best: tuple[int, int, str] | None = None
    for family in families():
        for rule in family.names:
            match = rule.search(name)
            if match is not None:
                candidate = (match.start(), -match.end(), rule.template)
                best = candidate if best is None else min(best, candidate)
    return best[2] if best else None


def match_checkpoint(
    jinja: str | None, special_tokens: Iterable[str] = (), architecture: str | None = None
) -> str | None:
    """Name of the template that a checkpoint's own marks name, or None.

    jinja: its chat template's text; special_tokens: their texts, asked only without a Jinja text;
    architecture: its model type or architecture class. The most specific marks win; marks of two templates
    that are equally specific name none.
    """
    tokens = frozenset(special_tokens)
    kind = _kind(architecture)
    scores: dict[str, int] = {}
    for family in families():
        for marks in family.marks:
            score = _score(marks, jinja, tokens, kind)
            if score:
                scores[marks.template] = max(score, scores.get(marks.template, 0))
    if not scores:
        return None
    top = max(scores.values())
    best = [name for name, score in scores.items() if score == top]
    return best[0] if len(best) == 1 else None


def model_name(model_path: str) -> str:
    """The last component of a path or hub id; the model's own in a hub cache (`models--org--name/...`)."""
    parts = [part for part in re.split(r"[/\\]", model_path.strip()) if part not in ("", ".")]
    for part in reversed(parts[-3:]):
        cached = _CACHED.fullmatch(part)
        if cached is not None:
            return cached["name"]
    return parts[-1] if parts else ""


@cache
def families() -> tuple[Family, ...]:
    """What every family file says about itself."""
    modules = dict.fromkeys(target.partition(":")[0] for target in BUILT_IN.values())
    return tuple(importlib.import_module(module).FAMILY for module in modules)


def _score(marks: Marks, jinja: str | None, tokens: frozenset[str], kind: str) -> int:
    """0: not these marks; else how many hold."""
    if marks.types and kind not in marks.types:
        return 0
    known_type = 1 if marks.types else 0
    if not jinja:
        held = len(marks.tokens) if marks.tokens and tokens.issuperset(marks.tokens) else 0
        return held + known_type if held else 0
    if any(text not in jinja for text in marks.jinja) or any(text in jinja for text in marks.without):
        return 0
    return len(marks.jinja) + known_type


def _kind(architecture: str | None) -> str:
    plain = re.sub(r"[^a-z0-9]", "", (architecture or "").lower())
    return re.sub(r"(?:model)?for(?:causallm|conditionalgeneration)$", "", plain)

"""Finds the chat template of a checkpoint: first by its contents, then by its name, never by guessing.

The marks and names are data in `families`; this module searches them. It opens no file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence

from runtime.formats.chat.families import FAMILIES
from runtime.formats.chat.registry import get_chat_template
from runtime.formats.chat.template import ChatTemplate, Marks
from runtime.protocol.errors import TemplateError

MatchingFunction = Callable[[str], str | None]
"""Takes the whole path or id; returns the name of a registered template, or None."""

_FUNCTIONS: list[MatchingFunction] = []

# Words for checkpoints that were not trained to chat, of any family.
_NO_CHAT = re.compile(
    r"(?<![a-z0-9])(?:base|pt|pretrain(?:ed)?|embed(?:ding)?s?|reranker|reward)(?![a-z0-9])"
)
# Words for checkpoints that were, of any family.
_CHAT = re.compile(r"(?<![a-z0-9])(?:instruct|chat|it|sft|dpo|assistant)(?![a-z0-9])")
_CACHED = re.compile(r"models--(?:.+?--)?(?P<name>.+)")
_IN_CACHE = ("snapshots", "refs", "blobs")

WAYS_TO_CHOOSE = (
    'chat_template="chatml" or another registered name, the path of a .jinja or .json file, or '
    "register_chat_template_matching_function"
)
"""Advice for a user whose model no rule matches."""


class UnknownChatTemplate(TemplateError, KeyError):
    """No rule matches the model; the message names the ways to choose a format."""


def register_chat_template_matching_function(function: MatchingFunction) -> MatchingFunction:
    """Call `function(model_path)` before the built-in rules. Registered functions are called in order of
    registration; the first that returns a name wins. Also a decorator."""
    if function not in _FUNCTIONS:
        _FUNCTIONS.append(function)
    return function


def get_chat_template_by_model_path(model_path: str | os.PathLike[str]) -> ChatTemplate:
    """The template of the model at this path or hub id, by its name: registered functions first, then the
    families' rules on the last component. Raises UnknownChatTemplate; never guesses."""
    model_path = os.fspath(model_path)
    name = match_model_path(model_path)
    if name is None:
        raise UnknownChatTemplate(
            f"no chat template is known for the model {model_name(model_path)!r}",
            where=f"model_path {model_path!r}",
            hint=f"choose one: {WAYS_TO_CHOOSE}",
        )
    return get_chat_template(name)


def ask_functions(model_path: str) -> str | None:
    """The first name that a registered function returns for the model, or None."""
    return next((name for function in _FUNCTIONS if (name := function(model_path)) is not None), None)


def match_model_path(model_path: str) -> str | None:
    """Name of the template, or None. The rule whose match begins first in the model's name wins (a distilled
    or derived model is named after its own family first), then the longest match."""
    template_name = ask_functions(model_path)
    if template_name is not None:
        return template_name
    name = _spelled(model_path)
    if _NO_CHAT.search(name):
        return None
    matches = [
        (match.start(), -match.end(), rule.template)
        for family in FAMILIES
        for rule in family.names
        if (match := rule.search(name)) is not None
    ]
    return min(matches)[2] if matches else None


def match_checkpoint(
    jinja: str | None,
    special_tokens: Iterable[str] = (),
    architecture: str | None = None,
    *,
    eos_tokens: Iterable[str] | None = None,
    model_names: Sequence[str] | None = None,
) -> str | None:
    """Name of the template that a checkpoint's own marks indicate, or None.

    jinja: the text of its chat template; special_tokens: their texts, used only without a Jinja text;
    architecture: its model type or architecture class. The most specific marks win; None if the marks of two
    templates are equally specific.

    Special tokens alone show a family's format, not that this checkpoint was trained on it: base Llama 3 has
    every token of Llama 3 Instruct. So if `eos_tokens` (the tokens that end its generations) or `model_names`
    (its paths or ids, best known first) are given, it must also generate until a token that ends a turn
    (`Marks.ends`), or a name must show that it chats; and no earlier name may show that it does not.
    """
    marks = _best_marks(jinja, frozenset(special_tokens), _kind(architecture))
    if marks is None:
        return None
    if not jinja and (eos_tokens is not None or model_names is not None):
        chats = chat_by_name(model_names or ())
        if chats is False or not (chats or set(marks.ends) & set(eos_tokens or ())):
            return None
    return marks.template


def chat_by_name(names: Iterable[str]) -> bool | None:
    """Whether models with these paths or ids chat: the first conclusive one decides; None if none is."""
    for path in names:
        name = _spelled(path)
        if _NO_CHAT.search(name):
            return False
        if _CHAT.search(name) or match_model_path(path) is not None:
            return True
    return None


def mark_tokens() -> frozenset[str]:
    """All tokens in any family's marks."""
    marks = [marks for family in FAMILIES for marks in family.marks]
    return frozenset(token for one in marks for token in (*one.tokens, *one.ends))


def model_name(model_path: str) -> str:
    """The last component of a path or hub id; in a hub cache (`models--org--name/...`) the model's own
    name."""
    parts = [part for part in re.split(r"[/\\]", model_path.strip()) if part not in ("", ".")]
    for index in reversed(range(len(parts))):
        cached = _CACHED.fullmatch(parts[index])
        if cached is not None and (index + 1 == len(parts) or parts[index + 1] in _IN_CACHE):
            return cached["name"]
    return parts[-1] if parts else ""


def _spelled(model_path: str) -> str:
    """The name in the form of the rules: lower case, with words separated by hyphens."""
    return model_name(model_path).lower().replace("_", "-")


def _best_marks(jinja: str | None, tokens: frozenset[str], kind: str) -> Marks | None:
    """The most specific matching marks, unless equally specific ones indicate another template."""
    jinja = jinja and _with_newlines(jinja)
    scored = [(_score(marks, jinja, tokens, kind), marks) for family in FAMILIES for marks in family.marks]
    top = max(score for score, _ in scored)
    best = [marks for score, marks in scored if score == top] if top else []
    return best[0] if len({marks.template for marks in best}) == 1 else None


def _score(marks: Marks, jinja: str | None, tokens: frozenset[str], kind: str) -> int:
    """0 if the marks do not match; else how many there are."""
    if marks.types and kind not in marks.types:
        return 0
    if not jinja:
        matched = len(marks.tokens) if tokens.issuperset(marks.tokens) else 0
    elif any(_with_newlines(text) in jinja for text in marks.without):
        matched = 0
    else:
        matched = len(marks.jinja) if all(_with_newlines(text) in jinja for text in marks.jinja) else 0
    return matched + 1 if matched and marks.types else matched


def _with_newlines(text: str) -> str:
    r"""A newline in a Jinja string may be spelled `\n`."""
    return text.replace("\\n", "\n")


def _kind(architecture: str | None) -> str:
    plain = re.sub(r"[^a-z0-9]", "", (architecture or "").lower())
    return re.sub(r"(?:model)?for(?:causallm|conditionalgeneration)$", "", plain)

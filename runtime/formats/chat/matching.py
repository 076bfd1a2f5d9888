"""Which chat template a checkpoint writes: by what the checkpoint holds first, by its name second, never by
guess.

The marks and names are data in `families`; this searches them. It opens no file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence

from runtime.formats.chat.families import FAMILIES
from runtime.formats.chat.family import Marks
from runtime.formats.chat.registry import get_chat_template
from runtime.formats.chat.template import ChatTemplate
from runtime.protocol.errors import TemplateError

MatchingFunction = Callable[[str], str | None]
"""Takes the whole path or id; returns the name of a registered template, or None."""

_FUNCTIONS: list[MatchingFunction] = []

# Words that say a checkpoint was not trained to chat, whatever its family.
_NO_CHAT = re.compile(
    r"(?<![a-z0-9])(?:base|pt|pretrain(?:ed)?|embed(?:ding)?s?|reranker|reward)(?![a-z0-9])"
)
# Words that say it was, whatever its family.
_CHAT = re.compile(r"(?<![a-z0-9])(?:instruct|chat|it|sft|dpo|assistant)(?![a-z0-9])")
_CACHED = re.compile(r"models--(?:.+?--)?(?P<name>.+)")
_IN_CACHE = ("snapshots", "refs", "blobs")

WAYS_TO_CHOOSE = (
    'chat_template="chatml" or another registered name, the path of a .jinja or .json file, or '
    "register_chat_template_matching_function"
)
"""What to tell a user whose model no rule knows."""


class UnknownChatTemplate(TemplateError, KeyError):
    """No rule knows the model; the message names the ways to choose a format."""


def register_chat_template_matching_function(function: MatchingFunction) -> MatchingFunction:
    """Ask `function(model_path)` before the built-in rules; registered functions are asked in the order of
    their registration, and the first that returns a name wins. Also a decorator.
    """
    if function not in _FUNCTIONS:
        _FUNCTIONS.append(function)
    return function


def get_chat_template_by_model_path(model_path: str | os.PathLike[str]) -> ChatTemplate:
    """The template of the model at this path or hub id, by its name: registered functions first, then the
    families' rules on the last component. Raises UnknownChatTemplate; no format is made up.
    """
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
    """What the registered functions say of the model, in the order of their registration."""
    return next((name for function in _FUNCTIONS if (name := function(model_path)) is not None), None)


def match_model_path(model_path: str) -> str | None:
    """Name of the template, or None. The rule whose match begins first in the model's name wins (a distilled
    or derived model is named after its own family first), then the longest match.
    """
    found = ask_functions(model_path)
    if found is not None:
        return found
    name = _spelled(model_path)
    if _NO_CHAT.search(name):
        return None
    best: tuple[int, int, str] | None = None
    for family in FAMILIES:
        for rule in family.names:
            match = rule.search(name)
            if match is not None:
                candidate = (match.start(), -match.end(), rule.template)
                best = candidate if best is None else min(best, candidate)
    return best[2] if best else None


def match_checkpoint(
    jinja: str | None,
    special_tokens: Iterable[str] = (),
    architecture: str | None = None,
    *,
    eos_tokens: Iterable[str] | None = None,
    model_names: Sequence[str] | None = None,
) -> str | None:
    """Name of the template that a checkpoint's own marks name, or None.

    jinja: its chat template's text; special_tokens: their texts, asked only without a Jinja text;
    architecture: its model type or architecture class. The most specific marks win; marks of two templates
    that are equally specific name none.

    Special tokens alone say which format a family writes, not that this checkpoint was trained on it: base
    Llama 3 has every token of Llama 3 Instruct. So where `eos_tokens` (what ends its generations, from all of
    its files) or `model_names` (paths or ids it is known by, best known first) are given, something else must
    bear the tokens out:

    - it generates until a token that ends a turn (`Marks.ends`), such as `<|eot_id|>`, or
    - a name says that it chats: a family's rule knows it, or it has a word such as instruct or chat in it;
    - and no name says before that that it does not (base, pretrained, embedding, reward, ...).

    With neither given, the tokens are believed.
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
    """Whether models of these paths or ids chat: the first that says anything decides; None: none does."""
    for path in names:
        name = _spelled(path)
        if _NO_CHAT.search(name):
            return False
        if _CHAT.search(name) or match_model_path(path) is not None:
            return True
    return None


def mark_tokens() -> frozenset[str]:
    """All tokens that any family's marks speak of."""
    marks = [marks for family in FAMILIES for marks in family.marks]
    return frozenset(token for one in marks for token in (*one.tokens, *one.ends))


def model_name(model_path: str) -> str:
    """The last component of a path or hub id; the model's own in a hub cache (`models--org--name/...`)."""
    parts = [part for part in re.split(r"[/\\]", model_path.strip()) if part not in ("", ".")]
    for index in reversed(range(len(parts))):
        cached = _CACHED.fullmatch(parts[index])
        if cached is not None and (index + 1 == len(parts) or parts[index + 1] in _IN_CACHE):
            return cached["name"]
    return parts[-1] if parts else ""


def _spelled(model_path: str) -> str:
    """The name as the rules are written for: lower case, and words apart by hyphens."""
    return model_name(model_path).lower().replace("_", "-")


def _best_marks(jinja: str | None, tokens: frozenset[str], kind: str) -> Marks | None:
    """The most specific marks that hold, unless as specific ones name another template."""
    jinja = jinja and _with_newlines(jinja)
    scored = [(_score(marks, jinja, tokens, kind), marks) for family in FAMILIES for marks in family.marks]
    top = max(score for score, _ in scored)
    best = [marks for score, marks in scored if score == top] if top else []
    return best[0] if len({marks.template for marks in best}) == 1 else None


def _score(marks: Marks, jinja: str | None, tokens: frozenset[str], kind: str) -> int:
    """0: not these marks; else how many hold."""
    if marks.types and kind not in marks.types:
        return 0
    known_type = 1 if marks.types else 0
    if not jinja:
        held = len(marks.tokens) if marks.tokens and tokens.issuperset(marks.tokens) else 0
        return held + known_type if held else 0
    if not all(_with_newlines(text) in jinja for text in marks.jinja):
        return 0
    if any(_with_newlines(text) in jinja for text in marks.without):
        return 0
    return len(marks.jinja) + known_type


def _with_newlines(text: str) -> str:
    r"""A newline in Jinja's string may be spelled `\n`; that says the same."""
    return text.replace("\\n", "\n")


def _kind(architecture: str | None) -> str:
    plain = re.sub(r"[^a-z0-9]", "", (architecture or "").lower())
    return re.sub(r"(?:model)?for(?:causallm|conditionalgeneration)$", "", plain)

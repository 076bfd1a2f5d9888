"""What both faces of a state do when a variable is read: which one is meant, of which type it is, what a
select said of it; and how a model is asked again for one that does not fit. Knows variables and nodes, no
states.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import msgspec

from runtime.protocol.messages import Message
from sglang_dsl.choices import Choice
from sglang_dsl.errors import BadProgram, InvalidValue
from sglang_dsl.feed import Variable
from sglang_dsl.ir import Gen, Select
from sglang_dsl.requests import Prompt
from sglang_dsl.typed import must_be

T = TypeVar("T")
_CUE = 400
"""Characters of a line that are said again, at most."""


def name_of(node: object) -> str:
    """The variable that a gen or select sets. Raises BadProgram for one without a name, and anything else."""
    if not isinstance(node, Gen | Select):
        raise BadProgram(
            f"a variable is read by its name, or the gen or select that sets it; got {node!r:.80}"
        )
    if node.name is None:
        raise BadProgram("this generation has no name, so there is no variable to read")
    return node.name


def checked(variable: Variable, value: Any, kind: type[T]) -> T:
    """`value`, if it is of the type `kind`. Raises InvalidValue. While a program is traced, what stands for a
    value passes for one of any type."""
    if variable.typed is None or variable.typed.name != "placeholder":
        try:
            must_be(value, kind)
        except ValueError as error:
            hint = "gen(name, type) reads it as one"
            raise InvalidValue(f"it is no such value: {error}", variable=variable.name, hint=hint) from error
    return cast(T, value)


def corrected(prompt: Prompt, text: str, kind: str, fault: str, hint: str | None) -> Prompt:
    """The prompt that asks again for a `kind` after the model said `text`: in an assistant's turn by a turn
    of the user behind it, elsewhere by words in the text, and the prompt's last line once more."""
    *before, last = prompt.messages
    said = f"That is no valid {kind}: {fault}."
    if hint is not None:
        said += " It was cut at its limit of tokens: say less."
    failed = _behind(last.content, text)
    if last.role == "assistant":
        asked = Message("user", f"{said} Answer again, with a valid {kind} and nothing else.")
        return Prompt((*before, msgspec.structs.replace(last, content=failed, open=False), asked, last))
    line = _behind(last.content, "")
    cue = (line if isinstance(line, str) else str(line[-1]["text"])).rsplit("\n", 1)[-1][-_CUE:]
    again = _behind(failed, f"\n\n({said} Once more, valid:)\n\n{cue}")
    return Prompt((*before, msgspec.structs.replace(last, content=again)))


def _behind(content: str | list[dict[str, Any]], text: str) -> str | list[dict[str, Any]]:
    """A message's content with text behind it."""
    if isinstance(content, str):
        return content + text
    if content and content[-1]["type"] == "text":
        return [*content[:-1], {"type": "text", "text": content[-1]["text"] + text}]
    return [*content, {"type": "text", "text": text}]


def choice_of(name: str, meta: dict[str, Any]) -> Choice:
    """Raises BadProgram."""
    try:
        return Choice.of(meta)
    except KeyError as error:
        raise BadProgram(f"{name!r} was not set by select(...), or by gen with choices") from error

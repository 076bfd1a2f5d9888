"""What both kinds of state do when a variable is read: which variable is meant, its type, the result of a
select. Knows variables and nodes, no states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from sglang_dsl.choices import Choice
from sglang_dsl.errors import BadProgram, InvalidValue
from sglang_dsl.interpreter.run import Variable
from sglang_dsl.ir import Gen, Select
from sglang_dsl.ir.typed import must_be

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")


def name_of(node: object) -> str:
    """The variable that a gen or select sets. Raises BadProgram for a node without a name, and for anything
    else."""
    if not isinstance(node, Gen | Select):
        raise BadProgram(
            f"read a variable by its name, or by the gen or select that sets it; got {node!r:.80}"
        )
    if node.name is None:
        raise BadProgram("this generation has no name, so there is no variable to read")
    return node.name


def checked(variable: Variable, value: Any, kind: TypeForm[T]) -> T:
    """`value`, if it is of the type `kind`. Raises InvalidValue. While a program is traced, a placeholder
    passes for a value of any type."""
    if variable.typed is None or variable.typed.name != "placeholder":
        try:
            must_be(value, kind)
        except ValueError as error:
            hint = "gen(name, type) reads it as one"
            raise InvalidValue(
                f"the value has another type: {error}", variable=variable.name, hint=hint
            ) from error
    return cast(T, value)


def choice_of(name: str, meta: dict[str, Any]) -> Choice:
    """Raises BadProgram."""
    try:
        return Choice.of(meta)
    except KeyError as error:
        raise BadProgram(f"{name!r} was not set by select(...), or by gen with choices") from error

"""The sandbox in which chat templates run: no access to the interpreter, and a budget for one rendering.

A template is untrusted code. Jinja's immutable sandbox keeps it from the interpreter. Here, an operation
whose result may be much larger than its input spends the size from the budget first. Other operations spend
the size of their result. Each iteration of a loop and each call spends a little. It knows Jinja, not chats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.formats.chat.budget import BUDGET, ITEM, MAX_INT_BITS, OBJECT, Budget, Limit, Rounds
from runtime.formats.chat.sandbox_filters import (
    METHOD_GROWTH,
    SANDBOX_FILTERS,
    SANDBOX_GLOBALS,
    SANDBOX_TESTS,
    finalize,
    growth_of_braces,
    growth_of_percents,
)
from runtime.formats.chat.sandbox_source import Bounded, Generation, check_source


def run(template: jinja2.Template, context: Mapping[str, Any], budget: Budget) -> str:
    """The template's output. Raises the template's errors, including Limit."""
    token = BUDGET.set(budget)
    try:
        return Sandbox.concat(template.generate(context))
    finally:
        BUDGET.reset(token)


class Sandbox(ImmutableSandboxedEnvironment):
    """Templates see values, but no attribute that begins with an underscore, and nothing that changes a
    value."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, loopcontrols],
            finalize=finalize,
        )
        self.filters = dict(SANDBOX_FILTERS)
        self.tests = dict(SANDBOX_TESTS)
        self.globals.update(SANDBOX_GLOBALS)
        # These can create any amount of text from nothing.
        for name in ("lipsum", "cycler"):
            self.globals.pop(name, None)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """The text of a template, a macro, a block or a `set`."""
        listed = list(pieces)
        BUDGET.get().spend(sum(map(len, listed)))
        return "".join(listed)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        check_source(self, source)
        tree: nodes.Template = Bounded().visit(super()._parse(source, name, filename))
        return tree

    def wrap_str_format(self, value: Any) -> Any:
        """`format` of a text, which jinja2 replaces by its own; `format_map` is refused."""
        formatted = super().wrap_str_format(value)
        if formatted is None or value.__name__ == "format_map":
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            BUDGET.get().spend(growth_of_braces(BUDGET.get(), value.__self__, *args, **kwargs))
            return str(formatted(*args, **kwargs))

        return bounded

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _REFUSED and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = BUDGET.get()
        match operator, left, right:
            case "*", (str() | list() | tuple()) as many, int(times):
                budget.spend(_repeated(budget, many, times))
            case "*", int(times), (str() | list() | tuple()) as many:
                budget.spend(_repeated(budget, many, times))
            case "*", int(one), int(other) if one.bit_length() + other.bit_length() > MAX_INT_BITS:
                raise Limit("the template multiplies numbers that are too big")
            case "**", int(base), int(power) if base.bit_length() * max(0, power) > MAX_INT_BITS:
                raise Limit("the template makes a power that is too big")
            case "%", str(form), _:
                budget.spend(growth_of_percents(budget, form, right))
            case _:
                pass
        return budget.new(super().call_binop(context, operator, left, right))

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = BUDGET.get()
        if isinstance(__obj, LoopContext) and args:  # a recursive loop over its own children
            args = (Rounds(args[0], OBJECT, budget), *args[1:])
        else:
            owner = getattr(__obj, "__self__", None)
            growth = METHOD_GROWTH.get(__obj.__name__) if isinstance(owner, str) else None
            if growth is not None:
                own = {key: value for key, value in kwargs.items() if not key.startswith("_")}  # not jinja2's
                budget.spend(growth(budget, owner, *args, **own))
        budget.spend(OBJECT)
        return budget.new(super().call(__context, __obj, *args, **kwargs))


def _repeated(budget: Budget, many: str | list[Any] | tuple[Any, ...], times: int) -> int:
    return max(0, times) * (len(many) if isinstance(many, str) else ITEM * len(many))


_REFUSED = frozenset({"translate", "maketrans", "format_map", "encode", "decode", "to_bytes", "expandtabs"})

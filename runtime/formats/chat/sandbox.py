"""The sandbox in which chat templates run: Jinja's immutable sandbox, and a budget for one rendering.

An operation whose result may be much larger than its input spends the size from the budget first; other
operations spend the size of their result, each iteration of a loop and each call a little.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import loopcontrols
from jinja2.filters import FILTERS
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Joiner, Namespace
from markupsafe import Markup

from runtime.formats.chat.sandbox_bounds import (
    ESCAPED,
    GROWING,
    GROWING_METHODS,
    ITEM,
    LISTING,
    OBJECT,
    Bounded,
    Generation,
    Limit,
    check_source,
    growth,
)

TIME_LIMIT_S = 0.8
"""CPU time of the thread."""
TIME_PER_INPUT_CHARACTER_S = 5e-7
UNITS = 24 << 20
"""For one rendering, in addition to UNITS_PER_INPUT_CHARACTER."""
UNITS_PER_INPUT_CHARACTER = 16
FIRST_LOOK_S = 0.01
"""Elapsed time before the first check. Reading the CPU time is a system call, which most renderings avoid."""
LITTLE = 1 << 14
"""Units. If less was spent, the elapsed time was a pause of the machine and not the template's work."""
MAX_INT_BITS = 4096
MAX_RANGE = 100_000


class Budget:
    """The budget of one rendering: work and memory as a single number of units, and CPU time. values: its
    input, whose texts increase it.

    No value may grow beyond the whole budget. So a single operation of Python on it (printing, comparing,
    sorting) takes a fraction of a second, and the time is checked between operations.
    """

    def __init__(self, values: Any = None, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._values, self._limit_s = values, time_limit_s
        self._left = self._whole = UNITS
        self._look_at = time.monotonic() + FIRST_LOOK_S
        self._busy_until = 0.0
        # id -> (the container, kept alive so that its id is not reused; its size). Containers never change.
        self._sizes: dict[int, tuple[Any, int]] = {}

    def spend(self, units: int) -> None:
        """Called before an operation that needs `units`. Raises Limit."""
        self._left -= units
        if self._left < 0 or time.monotonic() > self._look_at:
            self._look()

    def _look(self) -> None:
        """Check the limits. CPU time never grows faster than elapsed time."""
        if self._values is not None:
            # Only now: counting the input takes as long as a usual rendering.
            characters, self._values = len(repr(self._values)), None
            self._limit_s += TIME_PER_INPUT_CHARACTER_S * characters
            self._whole += UNITS_PER_INPUT_CHARACTER * characters
            self._left += UNITS_PER_INPUT_CHARACTER * characters
        if self._left < 0:
            size = f"{self._whole >> 20} MiB"
            raise Limit(f"the template does too much work: it makes more than {size} of text")
        now = time.thread_time()
        self._busy_until = self._busy_until or now + self._limit_s
        if now > self._busy_until and self._whole - self._left > LITTLE:
            raise Limit(f"the template does too much work: it took more than {self._limit_s:.2g} s")
        self._look_at = time.monotonic() + max(self._busy_until - now, FIRST_LOOK_S)

    def size(self, value: Any) -> int:
        """Approximate units of `value` when printed. A value that it contains twice counts twice. Raises
        Limit if it exceeds the whole budget."""
        if isinstance(value, str):
            return OBJECT + len(value)
        if not isinstance(value, (list, tuple, dict, set, frozenset)):
            return OBJECT
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        size = OBJECT
        items = (part for pair in value.items() for part in pair) if isinstance(value, dict) else value
        for item in items:
            size += self.size(item) + ITEM
            if size > self._whole:
                self.spend(size)
        self._sizes[id(value)] = (value, size)
        return size

    def new(self, value: Any) -> Any:
        """Account for `value`, the result of an operation. Raises Limit."""
        if isinstance(value, str):
            self.spend(OBJECT + len(value))
        elif isinstance(value, (list, tuple, dict, set, frozenset)):
            self.size(value)
            self.spend(OBJECT + ITEM * len(value))
        elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise Limit(f"the template makes a number of more than {MAX_INT_BITS} bits")
        else:
            self.spend(1)
        return value


BUDGET: ContextVar[Budget] = ContextVar("sglang_dsl_template_budget")
"""The budget of the current rendering."""


# -- filters, tests and globals ------------------------------------------------------------------------------


_PASSED: Mapping[str, Callable[[Context], Any]] = {
    "context": lambda context: context,
    "eval_context": lambda context: context.eval_ctx,
    "environment": lambda context: context.environment,
}
"""Kind of a filter -> what jinja2 passes it before its input."""


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Jinja's filter `function`, which spends the size of its result."""
    passed = _PASSED.get(getattr(getattr(function, "jinja_pass_arg", None), "name", ""))
    sized = (list, tuple, dict, jinja2.Undefined, *([str] if name in ("reverse", "join") else []))

    @pass_context
    def bounded(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = BUDGET.get()
        if name in LISTING and not isinstance(value, sized):
            value = list(_rounds(context, value, 2 * OBJECT))
        if name in GROWING:
            budget.spend(growth(budget.size, name, value, args, kwargs))
        first = (value,) if passed is None else (passed(context), value)
        return budget.new(function(*first, *args, **kwargs))

    return bounded


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Called before a value is printed."""
    if not isinstance(value, str):
        budget = BUDGET.get()
        budget.spend(budget.size(value))
    return value


@pass_context
def _new(context: Context, value: Any) -> Any:
    return BUDGET.get().new(value)


@pass_context
def _rounds(context: Context, values: Iterable[Any], units: int) -> Iterator[Any]:
    """The values for a loop. Each iteration spends `units`."""
    spend = BUDGET.get().spend
    for value in values:
        spend(units)
        yield value


@pass_context
def _text(context: Context, values: tuple[Any, ...]) -> str:
    """`a ~ b ~ c`."""
    budget = BUDGET.get()
    budget.spend(sum(map(budget.size, values)))
    return "".join(map(str, values))


@pass_context
def _sum(context: Context, values: tuple[Any, ...]) -> Any:
    """`a + b + c`."""
    budget = BUDGET.get()
    if set(map(type, values)) == {str}:
        budget.spend(OBJECT + sum(map(len, values)))
        return "".join(values)

    return functools.reduce(functools.partial(context.environment.call_binop, context, "+"), values)  # type: ignore[attr-defined]


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes: a prompt is not a web page."""
    budget = BUDGET.get()
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > 64 or any(len(text) > 64 for text in separators or ()):
        raise Limit("the template indents JSON by more than 64 characters")
    budget.spend((ESCAPED if ensure_ascii else 2) * budget.size(value))
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        text = encoder.encode(value)
    else:
        # Indented JSON is written piece by piece, in Python, and may be much longer than its values.
        text = "".join(map(budget.new, encoder.iterencode(value)))
    if ensure_ascii:
        text = _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text)
    return str(budget.new(text))


_NOT_ASCII = re.compile("[^\\x00-\\x7f\\ue000-\\uf8ff]+")
"""Private-use characters are not escaped: they are placeholders for texts that are inserted later."""


def _raise(message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_RANGE:
        raise Limit(f"the template does too much work: a range of more than {MAX_RANGE}")
    return numbers


def strftime_at(now: Callable[[], datetime]) -> Callable[[str], str]:
    """The templates' `strftime_now` with the clock `now`."""

    def strftime_now(form: str) -> str:
        if len(form) > 200 or re.search(r"[0-9]{3}", form):
            raise Limit("the template asks for a date in a format that is too long")
        return now().astimezone().strftime(form)

    return strftime_now


class SealedNamespace(Namespace):
    """Does not print its contents: namespaces may contain one another."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _counted(test: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def counted(context: Context, *args: Any) -> Any:
        BUDGET.get().spend(1)
        return test(*args)

    return counted


_COMPARING = ("eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<=", "gt", ">", "greaterthan",
              "ge", ">=", "in")  # fmt: skip
_FILTERS: Mapping[str, Callable[..., Any]] = {
    **{name: _bounded(name, function) for name, function in FILTERS.items()},
    "tojson": _tojson,
    "sandbox_new": _new,
    "sandbox_rounds": _rounds,
    "sandbox_text": _text,
    "sandbox_sum": _sum,
}
_TESTS: Mapping[str, Callable[..., Any]] = {
    name: _counted(test) if name in _COMPARING else test
    for name, test in cast(Mapping[str, Callable[..., Any]], TESTS).items()
}
_GLOBALS: Mapping[str, Any] = {
    "dict": dict,
    "joiner": Joiner,
    "namespace": SealedNamespace,
    "raise_exception": _raise,
    "range": _range,
    "strftime_now": strftime_at(datetime.now),
}
"""Without jinja2's `lipsum` and `cycler`, which can create any amount of text from nothing."""
_REFUSED = frozenset({"translate", "maketrans", "format_map", "encode", "decode", "to_bytes", "expandtabs"})
"""Methods whose results may be of any size."""


# -- the environment -----------------------------------------------------------------------------------------


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
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], finalize=_finalize
        )
        self.filters, self.tests, self.globals = dict(_FILTERS), dict(_TESTS), dict(_GLOBALS)

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
            budget = BUDGET.get()
            budget.spend(growth(budget.size, "str.format", value.__self__, args, kwargs))
            return str(formatted(*args, **kwargs))

        return bounded

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _REFUSED and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = BUDGET.get()
        match operator, left, right:
            case ("*", str() | list() | tuple() as many, int(times)) | (
                "*", int(times), str() | list() | tuple() as many
            ):  # fmt: skip
                budget.spend(max(0, times) * len(many) * (1 if isinstance(many, str) else ITEM))
            case "*", int(one), int(other) if one.bit_length() + other.bit_length() > MAX_INT_BITS:
                raise Limit("the template multiplies numbers that are too big")
            case "**", int(base), int(power) if base.bit_length() * max(0, power) > MAX_INT_BITS:
                raise Limit("the template makes a power that is too big")
            case "%", str(form), _:
                budget.spend(growth(budget.size, "format", form, [right], {}))
            case "+", _, _ if isinstance(left, Markup) or isinstance(right, Markup):
                budget.spend(ESCAPED * (len(left) + len(right)))
        return budget.new(super().call_binop(context, operator, left, right))

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = BUDGET.get()
        if isinstance(__obj, LoopContext) and args:  # a recursive loop over its own children
            args = (_rounds(__context, args[0], OBJECT), *args[1:])
        else:
            owner = getattr(__obj, "__self__", None)
            name = __obj.__name__ if isinstance(owner, str) else ""
            if name in GROWING_METHODS:
                options = {key: value for key, value in kwargs.items() if not key.startswith("_")}
                value, others = (args[0], [owner]) if name == "join" and args else (owner, args)
                budget.spend(growth(budget.size, name, value, others, options))
        budget.spend(OBJECT)
        return budget.new(super().call(__context, __obj, *args, **kwargs))

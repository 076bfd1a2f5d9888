"""The filters, tests and globals of the sandbox. Those whose result may be much larger than their input spend
its size first.

It knows Jinja's own filters and the budget of the current rendering.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import pass_context
from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from markupsafe import Markup

from runtime.formats.chat.budget import BUDGET, ITEM, OBJECT, Budget, Limit, Rounds

MAX_RANGE = 100_000
SLOW_INPUT = 100_000
_ESCAPED = 6
"""The most characters that escaping makes of one."""


class SealedNamespace(Namespace):
    """Does not print its contents: namespaces may contain one another."""

    def __repr__(self) -> str:
        return "<Namespace>"


# -- the size of an operation's result, if that may be much larger than its input ------------------------

_WIDTH = re.compile(r"\d{5}")  # digits of any script: str.format reads them all
_NUMBER = re.compile(r"\d+")
_PERCENT_STAR = re.compile(r"%[-#0 +]*(?:\*|\d*\.\*)")
_NESTED_FIELD = re.compile(r"\{[^{}]*:[^{}]*\{")


def growth_of_percents(budget: Budget, form: Any, *args: Any, **kwargs: Any) -> int:
    """Units of `form % args` or `form % kwargs`: each placeholder may print all values."""
    text = str(form)
    if _WIDTH.search(text) or _PERCENT_STAR.search(text):
        raise Limit("the template formats to a width that is too big")
    return text.count("%") * (budget.size(kwargs or args) + _widest(text)) * _escaped(form)


def growth_of_braces(budget: Budget, form: str, *args: Any, **kwargs: Any) -> int:
    """Units of `form.format(*args, **kwargs)`."""
    if _WIDTH.search(form) or _NESTED_FIELD.search(form):
        raise Limit("the template formats to a width that is too big")
    return form.count("{") * (budget.size(args) + budget.size(kwargs) + _widest(form)) * _escaped(form)


def _widest(form: str) -> int:
    """The largest number in a format; nothing is padded to more."""
    return max((int(digits) for digits in _NUMBER.findall(form)), default=0)


def _escaped(text: Any) -> int:
    """Markup escapes inserted text."""
    return _ESCAPED if isinstance(text, Markup) else 1


def _replaced(budget: Budget, s: Any, old: Any, new: Any, count: Any = None) -> int:
    return str(s).count(str(old)) * len(str(new)) * _escaped(s)


def _joined(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> int:
    return (budget.size(value) + len(str(d)) * len(value)) * _escaped(d)


def _joined_by(budget: Budget, text: str, values: Any) -> int:
    return _joined(budget, values if isinstance(values, (str, list, tuple, dict)) else (), text)


def _split(budget: Budget, text: str, sep: Any = None, maxsplit: int = -1) -> int:
    return OBJECT * (text.count(sep) if isinstance(sep, str) and sep else len(text))


def _padded(budget: Budget, text: Any, width: Any = 80, fillchar: str = " ") -> int:
    return _number(width)


def _indented(budget: Budget, s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> int:
    return (len(str(s).splitlines()) + 1) * (len(width) if isinstance(width, str) else _number(width))


def _batched(budget: Budget, value: Any, count: Any, fill_with: Any = None) -> int:
    return 2 * OBJECT * _number(count)


def _rounded(budget: Budget, value: Any, precision: Any = 0, method: str = "common") -> int:
    return _number(precision)


def _escaping(budget: Budget, value: Any) -> int:
    return _ESCAPED * budget.size(value)


def _slow(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> int:
    """For filters that process a text with Python loops or regular expressions, and may insert other
    texts."""
    size = budget.size(value)
    if size > SLOW_INPUT:
        raise Limit(f"the template hands more than {SLOW_INPUT} characters to a filter that is slow")
    return size * sum(len(option) for option in (*args, *kwargs.values()) if isinstance(option, str))


def _number(value: Any) -> int:
    return max(0, value) if isinstance(value, int) else 0


_SLOW_FILTERS = ("urlize", "striptags", "pprint", "wordwrap", "wordcount", "title", "xmlattr", "urlencode",
                 "truncate", "int")  # fmt: skip
_FILTER_GROWTH: Mapping[str, Callable[..., int]] = {
    "replace": _replaced,
    "join": _joined,
    "format": growth_of_percents,
    "center": _padded,
    "indent": _indented,
    "batch": _batched,
    "slice": _batched,
    "round": _rounded,
    **dict.fromkeys(("escape", "e", "forceescape"), _escaping),
    **dict.fromkeys(_SLOW_FILTERS, _slow),
}
METHOD_GROWTH: Mapping[str, Callable[..., int]] = {
    "replace": _replaced,
    "join": _joined_by,
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
    **dict.fromkeys(("split", "rsplit", "splitlines"), _split),
}
"""The growth of methods of texts."""
_LISTING = frozenset({"list", "batch", "slice", "sort", "reverse", "unique", "groupby", "join"})
"""Filters that turn their input into a list."""


# -- filters ---------------------------------------------------------------------------------------------


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Jinja's filter `function`, which spends the size of its result."""
    passes = getattr(function, "jinja_pass_arg", None)
    first = passes.name if passes is not None else None
    growth = _FILTER_GROWTH.get(name)
    sized = (list, tuple, dict, jinja2.Undefined, *([str] if name in ("reverse", "join") else []))

    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = BUDGET.get()
        if name in _LISTING and not isinstance(value, sized):
            value = list(Rounds(value, 2 * OBJECT, budget))
        if growth is not None:
            budget.spend(growth(budget, value, *args, **kwargs))
        match first:
            case "context":
                return budget.new(function(context, value, *args, **kwargs))
            case "eval_context":
                return budget.new(function(context.eval_ctx, value, *args, **kwargs))
            case "environment":
                return budget.new(function(context.environment, value, *args, **kwargs))
            case _:
                return budget.new(function(value, *args, **kwargs))

    return bounded


@pass_context
def finalize(context: Context, value: Any) -> Any:
    """Called before a value is printed."""
    if not isinstance(value, str):
        budget = BUDGET.get()
        budget.spend(budget.size(value))
    return value


@pass_context
def _new(context: Context, value: Any) -> Any:
    return BUDGET.get().new(value)


@pass_context
def _rounds(context: Context, value: Any, units: int) -> Any:
    if isinstance(value, jinja2.Undefined):
        iter(value)  # strict and plain undefined values behave differently here
        return value
    if not isinstance(value, Iterable):
        raise TypeError(f"{type(value).__name__!r} object is not iterable")
    return Rounds(value, units, BUDGET.get())


@pass_context
def _text(context: Context, values: tuple[Any, ...]) -> str:
    """`a ~ b ~ c`."""
    budget = BUDGET.get()
    budget.spend(sum(map(budget.size, values)))
    return "".join(map(str, values))


@pass_context
def _sum_of(context: Context, values: tuple[Any, ...]) -> Any:
    """`a + b + c`."""
    budget = BUDGET.get()
    if set(map(type, values)) == {str}:
        budget.spend(OBJECT + sum(map(len, values)))
        return "".join(values)
    return functools.reduce(lambda one, other: _added(budget, one, other), values)


def _added(budget: Budget, one: Any, other: Any) -> Any:
    if isinstance(one, Markup) or isinstance(other, Markup):
        budget.spend(_ESCAPED * (len(one) + len(other)))
    return budget.new(one + other)


@pass_context
def _sum(context: Context, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    budget = BUDGET.get()
    if attribute is not None:
        value = FILTERS["map"](context, value, attribute=attribute)
    return functools.reduce(lambda one, other: _added(budget, one, other), value, start)


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
    budget.spend((_ESCAPED if ensure_ascii else 2) * budget.size(value))
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        text = encoder.encode(value)
    else:
        # Indented JSON is written piece by piece, in Python, and may be much longer than its values.
        pieces: list[str] = []
        for piece in encoder.iterencode(value):
            budget.spend(ITEM + len(piece))
            pieces.append(piece)
        text = "".join(pieces)
    if ensure_ascii:
        text = _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text)
    return str(budget.new(text))


_NOT_ASCII = re.compile("[^\\x00-\\x7f\\ue000-\\uf8ff]+")
"""Private-use characters are not escaped: they are placeholders for texts that are inserted later."""


# -- globals ---------------------------------------------------------------------------------------------


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


_COMPARING = ("eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<=", "gt", ">", "greaterthan",
              "ge", ">=", "in")  # fmt: skip


def _counted_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def counted(context: Context, *args: Any) -> Any:
        BUDGET.get().spend(1)
        return function(*args)

    return counted


SANDBOX_FILTERS: Mapping[str, Callable[..., Any]] = {
    **{name: _bounded(name, function) for name, function in FILTERS.items()},
    "sum": _sum,
    "tojson": _tojson,
    "sandbox_new": _new,
    "sandbox_rounds": _rounds,
    "sandbox_text": _text,
    "sandbox_sum": _sum_of,
}
_TESTS = cast(Mapping[str, Callable[..., Any]], TESTS)
SANDBOX_TESTS: Mapping[str, Callable[..., Any]] = {
    **_TESTS,
    **{name: _counted_test(_TESTS[name]) for name in _COMPARING},
}
SANDBOX_GLOBALS: Mapping[str, Any] = {
    "raise_exception": _raise,
    "strftime_now": strftime_at(datetime.now),
    "range": _range,
    "namespace": SealedNamespace,
}

"""The sandbox in which chat templates run: no way out, and a budget of time and memory for one rendering.

A template is code of a stranger. Every loop, call, filter and operator of it passes here; what an operation
would make is reckoned before it is made, so that neither a loop nor a text of a gigabyte gets far. It knows
Jinja, not chats.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

TIME_LIMIT_S = 1.5
MAX_MADE_BYTES = 48 << 20
"""All that one rendering may make, besides MADE_PER_INPUT_BYTE for each byte it was given."""
MADE_PER_INPUT_BYTE = 16
MAX_NUMBER = 1_000_000
"""Largest width, count or length that may be handed to a text's method or to a filter."""
MAX_RANGE = 100_000
MAX_NODES = 1_000_000
"""Values in one list or mapping, those in it counted as often as they would be printed."""
MAX_INT_BITS = 4096
_HEAVY_INPUT = 100_000


class Limit(jinja2.TemplateError):
    """A limit of the sandbox was met."""


class Budget:
    """What one rendering may still spend. `given`: bytes of its input, roughly."""

    def __init__(self, given: int = 0, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._limit_s = time_limit_s
        self._deadline = time.monotonic() + time_limit_s
        self._left = self._whole = MAX_MADE_BYTES + MADE_PER_INPUT_BYTE * given
        # id -> (the value, so that the id stays its own; bytes; nodes). Containers never change in here.
        self._known: dict[int, tuple[Any, int, int]] = {}

    def check(self) -> None:
        if time.monotonic() > self._deadline:
            raise Limit(f"the template does too much work: it took more than {self._limit_s:g} s")

    def charge(self, size: int) -> None:
        """Account for `size` bytes about to be made."""
        self._left -= size
        if self._left < 0:
            raise Limit(
                f"the template does too much work: it makes more than {self._whole >> 20} MiB of text"
            )

    def size(self, value: Any) -> int:
        """Bytes of `value` when printed, roughly and from above. Raises Limit for what is nested too much."""
        return self._measure(value, 0)[0]

    def _measure(self, value: Any, depth: int) -> tuple[int, int]:
        if isinstance(value, str):
            return _bytes_of(value), 1
        if not isinstance(value, (list, tuple, dict, set, frozenset)):
            return 64, 1
        known = self._known.get(id(value))
        if known is not None:
            return known[1], known[2]
        if depth > 200:
            raise Limit("the template nests values more than 200 deep")
        size, count = 64, 1
        items = (part for pair in value.items() for part in pair) if isinstance(value, dict) else iter(value)
        for item in items:
            more, inner = self._measure(item, depth + 1)
            size, count = size + more + 8, count + inner
            if count > MAX_NODES:
                raise Limit(f"the template makes a value with more than {MAX_NODES} values in it")
        self.check()
        self._known[id(value)] = (value, size, count)
        return size, count

    def made(self, value: Any) -> Any:
        """`value`, accounted for as new."""
        self.check()
        if isinstance(value, str):
            self.charge(_bytes_of(value))
        elif isinstance(value, (list, tuple, dict, set, frozenset)):
            self.size(value)
            self.charge(64 + 16 * len(value))
        elif isinstance(value, bytes):
            self.charge(len(value))
        return value


_BUDGET: ContextVar[Budget] = ContextVar("sglang_dsl_template_budget")


def run(template: jinja2.Template, context: Mapping[str, Any], budget: Budget) -> str:
    """The template's output. Raises what it raises, Limit among it."""
    token = _BUDGET.set(budget)
    try:
        return "".join(template.generate(context))
    finally:
        _BUDGET.reset(token)


class Sandbox(ImmutableSandboxedEnvironment):
    """Templates see values, no attribute that begins with an underscore, and nothing that changes a value."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_finalize,
        )
        self.filters = {name: _guarded(name, function) for name, function in FILTERS.items()}
        self.filters.update(tojson=_tojson, sum=_sum, join=_join, string=_string, format=_format,
                            sandbox_made=_made, sandbox_joined=_joined, sandbox_counted=_counted)  # fmt: skip
        self.globals.update(
            raise_exception=_raise, strftime_now=_strftime_now, range=_range, namespace=_Namespace
        )
        # These can make any amount of text out of nothing.
        for name in ("lipsum", "cycler"):
            self.globals.pop(name, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Reckon().visit(super()._parse(source, name, filename))
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _REFUSED and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _BUDGET.get()
        budget.check()
        match operator, left, right:
            case "*", (str() | bytes() | list() | tuple()) as many, int(times):
                _repeat(budget, many, times)
            case "*", int(times), (str() | bytes() | list() | tuple()) as many:
                _repeat(budget, many, times)
            case "*", int(one), int(other) if one.bit_length() + other.bit_length() > MAX_INT_BITS:
                raise Limit("the template multiplies numbers that are too big")
            case "**", int(base), int(power) if base.bit_length() * max(0, power) > MAX_INT_BITS:
                raise Limit("the template makes a power that is too big")
            case "+", str(), str():
                factor = 6 if isinstance(left, Markup) or isinstance(right, Markup) else 1
                budget.charge((_bytes_of(left) + _bytes_of(right)) * factor)
            case "+", (list() | tuple()), (list() | tuple()):
                budget.charge(64 + 8 * (len(left) + len(right)))
            case "%", (str() | bytes()), _:
                _formatted(budget, left, right)
            case _:
                pass
        return budget.made(super().call_binop(context, operator, left, right))

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        budget.check()
        if isinstance(__obj, LoopContext) and args:  # a recursive loop over its own children
            args = (_Counted(args[0], 0, budget), *args[1:])
        elif isinstance(__obj, Macro):
            budget.charge(1024)
        else:
            args = _reckon_method(budget, __obj, args, kwargs)
        return budget.made(super().call(__context, __obj, *args, **kwargs))


_REFUSED = frozenset({"translate", "maketrans", "format_map", "encode", "decode", "to_bytes", "expandtabs"})


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant wrote; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Reckon(NodeTransformer):
    """Puts the sandbox's own filters around what jinja2 compiles to bare Python."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        weight = sum(len(data.data) for part in node.body for data in _literals(part))
        self.generic_visit(node)
        node.iter = _filter(
            cast(nodes.Expr, node.iter), "sandbox_counted", nodes.Const(weight, lineno=node.lineno)
        )
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        weight = sum(len(data.data) for part in node.body for data in _literals(part))
        self.generic_visit(node)
        # A body's own text counts each time that it is written.
        line = node.lineno
        counted = _filter(
            nodes.Tuple([], "load", lineno=line), "sandbox_made", nodes.Const(weight, lineno=line)
        )
        node.body.insert(0, nodes.ExprStmt(counted, lineno=line))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "sandbox_joined")

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "sandbox_made")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "sandbox_made")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "sandbox_made") if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "sandbox_made") if isinstance(node.arg, nodes.Slice) else node


def _literals(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    yield from node.find_all(nodes.TemplateData)


def _filter(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


class _Counted:
    """What a loop runs over; every round is checked and pays for the text of the loop's body."""

    def __init__(self, values: Iterable[Any], weight: int, budget: Budget) -> None:
        self._values, self._weight, self._budget = values, weight, budget

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type] # a TypeError tells jinja2 that it must count

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._budget.check()
            self._budget.charge(self._weight)
            yield value


class _Namespace(Namespace):
    """Prints no content: namespaces may hold one another."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _bytes_of(text: str) -> int:
    return sys.getsizeof(text) if len(text) > 64 else 128


def _repeat(budget: Budget, many: Any, times: int) -> None:
    if times > 0:
        each = _bytes_of(many) if isinstance(many, str) else 8 * len(many)
        budget.charge(each * times if each > 128 else (each if len(many) == 0 else 4 * len(many) * times))


_WIDTH = re.compile(r"[1-9][0-9]{4,}")
_PERCENT_STAR = re.compile(r"%[-#0 +]*(?:\*|[0-9]*\.\*)")
_NESTED_FIELD = re.compile(r"\{[^{}]*:[^{}]*\{")


def _formatted(budget: Budget, form: str | bytes, values: Any) -> None:
    """`form % values`: no width that makes text of its own, and each place may print all values."""
    text = form if isinstance(form, str) else form.decode("latin-1")
    budget.charge(_bytes_of(text))
    if _WIDTH.search(text) or _PERCENT_STAR.search(text):
        raise Limit("the template formats to a width that is too big")
    budget.charge(
        (budget.size(values) + 10_000) * min(text.count("%"), 1) + budget.size(values) * text.count("%")
    )


def _reckon_method(
    budget: Budget, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Account for what a text's method will make; the arguments, with lists for generators."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if not isinstance(owner, (str, bytes, int, float)):
        if getattr(function, "__module__", None) == "jinja2.sandbox" or name in ("format", "wrapper"):
            owner = getattr(getattr(function, "__wrapped__", None), "__self__", None)
            if isinstance(owner, str):
                name = "format"
        if not isinstance(owner, str):
            return args
    numbers = [value for value in (*args, *kwargs.values()) if isinstance(value, int)]
    if name != "format" and any(abs(number) > MAX_NUMBER for number in numbers):
        raise Limit(f"the template hands a number above {MAX_NUMBER} to {name}")
    if not isinstance(owner, str):
        return args
    match name, args:
        case "replace", (str(old), str(new), *_):
            budget.charge(_replaced(owner, old, new))
        case "join", (values, *rest):
            listed = values if isinstance(values, (str, list, tuple)) else list(_Counted(values, 64, budget))
            budget.charge(_bytes_of(owner) * len(listed) + (8 * len(listed)) + budget.size(listed))
            return (listed, *rest)
        case "format", _:
            if _WIDTH.search(owner) or _NESTED_FIELD.search(owner):
                raise Limit("the template formats to a width that is too big")
            each = budget.size(list(args)) + budget.size(dict(kwargs))
            budget.charge((each + 64) * (owner.count("{") + 1))
        case (("split" | "rsplit"), (str(mark), *_)) if mark:
            budget.charge(64 * (owner.count(mark) + 1) + _bytes_of(owner))
        case (("split" | "rsplit" | "splitlines"), _):
            budget.charge(32 * len(owner) + 64)
        case (("center" | "ljust" | "rjust" | "zfill"), (int(width), *_)):
            budget.charge(4 * max(0, width) + 4 * len(owner))
        case _:
            budget.charge(_bytes_of(owner))
    return args


def _replaced(text: str, old: str, new: str) -> int:
    times = text.count(old)
    return _bytes_of(text) + times * len(new) * 4


# -- filters ---------------------------------------------------------------------------------------------

_LISTING = frozenset({"list", "batch", "slice", "sort", "reverse", "unique", "groupby", "dictsort", "items"})
_HEAVY = frozenset(
    {"urlize", "striptags", "pprint", "wordwrap", "wordcount", "title", "xmlattr", "urlencode", "truncate"}
)
_GROWING = frozenset({"escape", "e", "forceescape"})
_LITERAL = frozenset({"default", "d", "map", "select", "reject", "selectattr", "rejectattr", "int", "float"})


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `function`, its work and what it makes accounted for."""
    wants = getattr(function, "jinja_pass_arg", None)
    before: dict[str, Callable[[Context], tuple[Any, ...]]] = {
        "context": lambda context: (context,),
        "eval_context": lambda context: (context.eval_ctx,),
        "environment": lambda context: (context.environment,),
    }
    lead = before.get(wants.name, _nothing) if wants is not None else _nothing

    @pass_context
    def guarded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        budget.check()
        _reckon_filter(budget, name, value, args, kwargs)
        if name in _LISTING and not isinstance(value, (str, list, tuple, dict, range)):
            value = _listed(value, budget)
        return budget.made(function(*lead(context), value, *args, **kwargs))

    return guarded


def _nothing(context: Context) -> tuple[Any, ...]:
    return ()


def _listed(value: Any, budget: Budget) -> Any:
    try:
        values = iter(value)
    except TypeError:
        return value  # the filter says what is wrong
    return list(_Counted(values, 64, budget))


def _reckon_filter(
    budget: Budget, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    options = (*args, *kwargs.values())
    if name not in _LITERAL and any(isinstance(one, int) and abs(one) > MAX_NUMBER for one in options):
        raise Limit(f"the template hands a number above {MAX_NUMBER} to the filter {name}")
    if name in _HEAVY and budget.size(value) > _HEAVY_INPUT:
        raise Limit(f"the template hands more than {_HEAVY_INPUT} characters to the filter {name}")
    numbers = sum(max(0, one) for one in options if isinstance(one, int))
    if name in _LISTING:
        budget.charge(64 * len(value) if isinstance(value, (str, list, tuple, dict, range)) else 64)
        budget.charge(8 * numbers)
    elif name in _GROWING:
        budget.charge(6 * budget.size(value))
    elif name == "replace":
        old, new = _pair(args, kwargs)
        text = value if isinstance(value, str) else _printed(value, budget)
        budget.charge(
            6 * _replaced(text, old, new) if isinstance(value, Markup) else _replaced(text, old, new)
        )
    elif name == "indent":
        text = value if isinstance(value, str) else ""
        width = max((len(one) for one in options if isinstance(one, str)), default=numbers + 4)
        budget.charge(4 * (text.count("\n") + text.count("\r") + 1) * width + _bytes_of(text))
    elif name == "center":
        budget.charge(4 * max(80, numbers))
    elif name not in _LITERAL and isinstance(value, (str, list, tuple, dict)):
        budget.charge(_bytes_of(value) if isinstance(value, str) else 8 * len(value))
        if name in ("trim", "upper", "lower", "capitalize", "round"):
            budget.charge(budget.size(value))


def _pair(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, str]:
    values = [*args, *(kwargs[key] for key in ("old", "new") if key in kwargs)]
    old, new = [*values, "", ""][:2]
    return str(old) if isinstance(old, (str, int)) else "", str(new) if isinstance(new, (str, int)) else ""


def _printed(value: Any, budget: Budget) -> str:
    """str(value), its size reckoned first."""
    if isinstance(value, str):
        return value
    budget.charge(budget.size(value))
    return str(value)


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    budget = _BUDGET.get()
    budget.check()
    budget.charge(budget.size(value))
    return value


@pass_context
def _made(context: Context, value: Any, weight: int = 0) -> Any:
    budget = _BUDGET.get()
    budget.charge(weight)
    return budget.made(value)


@pass_context
def _counted(context: Context, value: Any, weight: int = 0) -> Any:
    if isinstance(value, jinja2.Undefined):
        iter(value)  # a strict or plain undefined decides for itself
        return value
    if not isinstance(value, Iterable):
        raise TypeError(f"{type(value).__name__!r} object is not iterable")
    return _Counted(value, weight, _BUDGET.get())


@pass_context
def _joined(context: Context, values: tuple[Any, ...]) -> str:
    budget = _BUDGET.get()
    budget.check()
    texts = [_printed(value, budget) for value in values]
    budget.charge(sum(_bytes_of(text) for text in texts))
    return "".join(texts)


@pass_context
def _join(context: Context, value: Any, d: Any = "", attribute: Any = None) -> Any:
    budget = _BUDGET.get()
    budget.check()
    if attribute is not None:
        value = FILTERS["map"](context, value, attribute=attribute)
    listed = value if isinstance(value, str) else list(_Counted(value, 64, budget))
    mark = _printed(d, budget)
    budget.charge(budget.size(listed) + (_bytes_of(mark) + 8) * len(listed) if len(mark) > 64 else
                  budget.size(listed) + 4 * (len(mark) + 2) * len(listed))  # fmt: skip
    return budget.made(mark.join([str(item) for item in listed]))


@pass_context
def _string(context: Context, value: Any) -> Any:
    return _printed(value, _BUDGET.get())


@pass_context
def _format(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
    if args and kwargs:
        raise jinja2.TemplateError("the filter format takes either positional or keyword values")
    budget, form = _BUDGET.get(), _printed(value, _BUDGET.get())
    _formatted(budget, form, kwargs or args)
    return budget.made(form % (kwargs or args))


@pass_context
def _sum(context: Context, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    budget = _BUDGET.get()
    if attribute is not None:
        value = FILTERS["map"](context, value, attribute=attribute)
    total = start
    for item in _Counted(value, 0, budget):
        if isinstance(total, (list, tuple)):
            budget.charge(64 + 8 * len(total))
        total = budget.made(total + item)
    return total


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes: a prompt is no web page."""
    budget = _BUDGET.get()
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > 64 or any(len(text) > 64 for text in separators or ()):
        raise Limit("the template indents JSON by more than 64 characters")
    budget.check()
    budget.charge(2 * budget.size(value))
    return str(
        budget.made(
            json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )
        )
    )


# -- globals ---------------------------------------------------------------------------------------------


def _raise(message: Any) -> NoReturn:
    raise jinja2.TemplateError(_printed(message, _BUDGET.get()))


def _range(*bounds: int) -> range:
    made = range(*bounds)
    if len(made) > MAX_RANGE:
        raise Limit(f"the template does too much work: a range of more than {MAX_RANGE}")
    return made


def _strftime_now(form: str) -> str:
    if len(form) > 200 or re.search(r"[0-9]{3}", form):
        raise Limit("the template asks for a date in a format that is too long")
    return datetime.now().astimezone().strftime(form)

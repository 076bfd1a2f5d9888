"""A plugin for mypy: run, stream, arun, astream and a program's call take its function's parameters and run's
words side by side, and all are checked. In the settings of mypy: plugins = ["sglang_dsl.mypy_plugin"].

A ParamSpec cannot have keywords added to it, so that without it each word is an overload of its own
(checked.Runs), in which the function's own parameters are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.nodes import ARG_NAMED_OPT, ARG_STAR2, TypeInfo
from mypy.plugin import AttributeContext, Plugin
from mypy.types import CallableType, Instance, Parameters, Type, get_proper_type

_PROGRAM = "sglang_dsl.function.SglFunction"
_METHODS = frozenset({"__call__", "run", "stream", "arun", "astream"})
_RUNS, _WORDS = "sglang_dsl.frontend.static_types.Runs", "sglang_dsl.frontend.static_types.RunWords"


class RunWordsPlugin(Plugin):
    """See the module."""

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        owner, _, name = fullname.rpartition(".")
        return self._with_words if owner == _PROGRAM and name in _METHODS else None

    def _with_words(self, context: AttributeContext) -> Type:
        """The method of a program whose parameters are known; else what it was."""
        found = get_proper_type(context.default_attr_type)
        if not (isinstance(found, Instance) and found.type.fullname == _RUNS and len(found.args) == 2):
            return found
        own, made = get_proper_type(found.args[0]), found.args[1]
        told = self.lookup_fully_qualified(_WORDS)
        words = told.node.typeddict_type if told is not None and isinstance(told.node, TypeInfo) else None
        if words is None or not isinstance(own, Parameters) or own.is_ellipsis_args:
            return found
        more = {name: kind for name, kind in words.items.items() if name not in own.arg_names}
        last = len(own.arg_kinds) - (ARG_STAR2 in own.arg_kinds)  # its own **words come last
        return CallableType(
            [*own.arg_types[:last], *more.values(), *own.arg_types[last:]],
            [*own.arg_kinds[:last], *(ARG_NAMED_OPT for _ in more), *own.arg_kinds[last:]],
            [*own.arg_names[:last], *more, *own.arg_names[last:]],
            made,
            context.api.named_generic_type("builtins.function", []),
        )


def plugin(version: str) -> type[Plugin]:
    """What mypy asks for."""
    return RunWordsPlugin

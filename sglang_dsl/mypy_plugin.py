"""A mypy plugin: run, stream, arun, astream and a program's call take its function's parameters and run's
keyword arguments together, and all are checked. In mypy's settings: plugins = ["sglang_dsl.mypy_plugin"].

No keywords can be added to a ParamSpec. Without the plugin each keyword is an overload of its own
(static_types.Runs), in which the function's own parameters are not checked.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.nodes import ARG_NAMED_OPT, ARG_STAR2, TypeInfo
from mypy.plugin import AttributeContext, Plugin
from mypy.types import CallableType, Instance, Parameters, Type, get_proper_type

_PROGRAM = "sglang_dsl.function.SglFunction"
_METHODS = frozenset({"__call__", "run", "stream", "arun", "astream"})
_RUNS, _KEYWORDS = "sglang_dsl.frontend.static_types.Runs", "sglang_dsl.frontend.static_types.RunArguments"


class RunKeywordsPlugin(Plugin):
    """See the module."""

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        owner, _, name = fullname.rpartition(".")
        return self._with_keywords if owner == _PROGRAM and name in _METHODS else None

    def _with_keywords(self, context: AttributeContext) -> Type:
        """The method with run's keywords, if the program's parameters are known; else unchanged."""
        default = get_proper_type(context.default_attr_type)
        if not (isinstance(default, Instance) and default.type.fullname == _RUNS and len(default.args) == 2):
            return default
        function, result = get_proper_type(default.args[0]), default.args[1]
        symbol = self.lookup_fully_qualified(_KEYWORDS)
        node = None if symbol is None else symbol.node
        keywords = node.typeddict_type if isinstance(node, TypeInfo) else None
        if keywords is None or not isinstance(function, Parameters) or function.is_ellipsis_args:
            return default
        types, kinds, names = function.arg_types, function.arg_kinds, function.arg_names
        more = {name: kind for name, kind in keywords.items.items() if name not in names}
        last = len(kinds) - (ARG_STAR2 in kinds)  # **kwargs come last
        return CallableType(
            [*types[:last], *more.values(), *types[last:]],
            [*kinds[:last], *(ARG_NAMED_OPT for _ in more), *kinds[last:]],
            [*names[:last], *more, *names[last:]],
            result,
            context.api.named_generic_type("builtins.function", []),
        )


def plugin(version: str) -> type[Plugin]:
    """Called by mypy."""
    return RunKeywordsPlugin

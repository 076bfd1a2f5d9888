"""A plugin for mypy: run, stream, arun, astream and a program's call take its function's parameters together
with run's keyword arguments, and all are checked. In mypy's settings: plugins = ["sglang_dsl.mypy_plugin"].

A ParamSpec cannot have keywords added to it, so without the plugin each keyword argument is an overload of
its own (static_types.Runs), in which the function's parameters are not checked.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.nodes import ARG_NAMED_OPT, ARG_STAR2, TypeInfo
from mypy.plugin import AttributeContext, Plugin
from mypy.types import CallableType, Instance, Parameters, Type, get_proper_type

_PROGRAM = "sglang_dsl.function.SglFunction"
_METHODS = frozenset({"__call__", "run", "stream", "arun", "astream"})
_RUNS, _ARGUMENTS = "sglang_dsl.frontend.static_types.Runs", "sglang_dsl.frontend.static_types.RunArguments"


class RunArgumentsPlugin(Plugin):
    """See the module."""

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        owner, _, name = fullname.rpartition(".")
        return self._with_run_arguments if owner == _PROGRAM and name in _METHODS else None

    def _with_run_arguments(self, context: AttributeContext) -> Type:
        """The method of a program whose parameters are known; else its default type."""
        default = get_proper_type(context.default_attr_type)
        if not (isinstance(default, Instance) and default.type.fullname == _RUNS and len(default.args) == 2):
            return default
        parameters, result = get_proper_type(default.args[0]), default.args[1]
        symbol = self.lookup_fully_qualified(_ARGUMENTS)
        arguments = (
            symbol.node.typeddict_type if symbol is not None and isinstance(symbol.node, TypeInfo) else None
        )
        if arguments is None or not isinstance(parameters, Parameters) or parameters.is_ellipsis_args:
            return default
        more = {name: kind for name, kind in arguments.items.items() if name not in parameters.arg_names}
        last = len(parameters.arg_kinds) - (ARG_STAR2 in parameters.arg_kinds)  # its own **kwargs come last
        return CallableType(
            [*parameters.arg_types[:last], *more.values(), *parameters.arg_types[last:]],
            [*parameters.arg_kinds[:last], *(ARG_NAMED_OPT for _ in more), *parameters.arg_kinds[last:]],
            [*parameters.arg_names[:last], *more, *parameters.arg_names[last:]],
            result,
            context.api.named_generic_type("builtins.function", []),
        )


def plugin(version: str) -> type[Plugin]:
    """What mypy asks for."""
    return RunArgumentsPlugin

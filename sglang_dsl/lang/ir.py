"""`lang.ir`: nodes, patterns and the program's type under the names that sglang's programs use."""

from __future__ import annotations

from sglang_dsl.api import separate_reasoning
from sglang_dsl.backends.blocking import SglSamplingParams
from sglang_dsl.function import SglFunction
from sglang_dsl.ir import Fork as SglFork
from sglang_dsl.ir import Gen as SglGen
from sglang_dsl.ir import Node as SglExpr
from sglang_dsl.ir import RoleBegin as SglRoleBegin
from sglang_dsl.ir import RoleEnd as SglRoleEnd
from sglang_dsl.ir import ScopeBegin as SglVarScopeBegin
from sglang_dsl.ir import ScopeEnd as SglVarScopeEnd
from sglang_dsl.ir import Select as SglSelect
from sglang_dsl.ir import Seq as SglExprList
from sglang_dsl.ir import Text as SglConstantText
from sglang_dsl.ir import leaves
from sglang_dsl.patterns import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR

__all__ = [
    "REGEX_BOOL", "REGEX_FLOAT", "REGEX_INT", "REGEX_STR", "SglConstantText", "SglExpr", "SglExprList",
    "SglFork", "SglFunction", "SglGen", "SglRoleBegin", "SglRoleEnd", "SglSamplingParams", "SglSelect",
    "SglSeparateReasoning", "SglVarScopeBegin", "SglVarScopeEnd",
]  # fmt: skip


class SglSeparateReasoning(SglExprList):
    """separate_reasoning(expr, model_type), as a class. Raises BadProgram."""

    def __init__(self, model_type: str, expr: SglExpr) -> None:
        super().__init__(leaves(separate_reasoning(expr, model_type)))

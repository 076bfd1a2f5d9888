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
from sglang_dsl.patterns import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR
from sglang_dsl.utils import SglSeparateReasoning

__all__ = [
    "REGEX_BOOL", "REGEX_FLOAT", "REGEX_INT", "REGEX_STR", "SglConstantText", "SglExpr", "SglExprList",
    "SglFork", "SglFunction", "SglGen", "SglRoleBegin", "SglRoleEnd", "SglSamplingParams", "SglSelect",
    "SglSeparateReasoning", "SglVarScopeBegin", "SglVarScopeEnd",
]  # fmt: skip

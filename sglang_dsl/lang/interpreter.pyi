from sglang_dsl.interpreter.executor import Executor as StreamExecutor
from sglang_dsl.state.program_state import ProgramState, ProgramStateGroup

__all__ = ["ProgramState", "ProgramStateGroup", "StreamExecutor"]

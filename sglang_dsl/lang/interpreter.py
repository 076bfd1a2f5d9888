"""`lang.interpreter`: the running state under the names that sglang's programs use. Holds no code of its
own."""

from __future__ import annotations

from sglang_dsl.interpreter.executor import Executor as StreamExecutor
from sglang_dsl.state.program_state import ProgramState, ProgramStateGroup

__all__ = ["ProgramState", "ProgramStateGroup", "StreamExecutor"]

"""The attributes that programs written for sglang read from `state.stream_executor`. The state has all of
them, under other names."""

from __future__ import annotations

from typing import Any

from sglang_dsl.concurrency.streams import blocking, run_here
from sglang_dsl.interpreter.run import Variable


class Awaited:
    """A value of `variable_event`: whether a variable is set."""

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def is_set(self) -> bool:
        return self._variable.done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the variable is set or has failed, for at most `timeout` seconds. Returns whether it
        is."""
        return self._variable.wait_for(self.is_set, timeout)


class ExecutorView:
    """Returned by `state.stream_executor`. `state`: a ProgramState."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.get_var, self.set_var = state.get_var, state.set_var
        self.text, self.messages = state.text, state.messages
        self.error, self.sync, self.fork = state.error, state.sync, state.fork

    @property
    def text_(self) -> str:
        return str(self._state.text())

    @property
    def messages_(self) -> list[dict[str, Any]]:
        return list(self._state.messages())

    @property
    def variables(self) -> dict[str, Any]:
        """name -> value. Waits for all of them."""
        return {name: self._state[name] for name in self._state.core.names()}

    @property
    def meta_info(self) -> dict[str, dict[str, Any]]:
        """name -> the backend's metadata. Waits for all of them."""
        return {name: self._state.get_meta_info(name) for name in self._state.core.names()}

    @property
    def variable_event(self) -> dict[str, Awaited]:
        """name -> an event for its value. Does not wait."""
        return {name: Awaited(self._find(name)) for name in self._state.core.names()}

    def _find(self, name: str) -> Variable:
        core = self._state.core
        run_here(core.appears(name, blocking))
        variable: Variable = core.find(name)
        return variable

    def get_meta_info(self, name: str, timeout: float | None = None) -> dict[str, Any] | None:
        """None if no node sets `name`. Raises TimeoutError after `timeout` seconds."""
        if name not in self._state:
            return None
        variable = self._find(name)
        if not variable.wait_for(lambda: variable.done, timeout):
            raise TimeoutError(f"{name!r} was not set within {timeout:g} s")
        return dict(self._state.get_meta_info(name))

    def submit(self, expr: object) -> None:
        self._state += expr

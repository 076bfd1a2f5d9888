"""What both faces of a state have in common: all that does not wait. A face stands on a Core; a group holds
the forks of one state. Knows neither blocking nor `await`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from sglang_dsl.errors import BadProgram
from sglang_dsl.errors.tracebacks import public
from sglang_dsl.interpreter.core import Checkpoint, Core
from sglang_dsl.ir import Node
from sglang_dsl.views.snapshot import Snapshot

T = TypeVar("T", covariant=True)


@public
class Face(ABC, Generic[T]):
    """Of one state; T is what its turns are."""

    _core: Core

    @property
    def core(self) -> Core:
        """What this state stands on; for tools that look at programs."""
        return self._core

    # -- variables -------------------------------------------------------------------------------------------

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a variable; readers of `name` get `value` from now on."""
        self._core.set(name, value)

    def set_var(self, name: str, value: Any) -> None:
        """s[name] = value."""
        self[name] = value

    def __contains__(self, name: object) -> bool:
        """Whether some node sets `name`, done or not; does not wait."""
        return isinstance(name, str) and self._core.known(name)

    # -- turns -----------------------------------------------------------------------------------------------

    @abstractmethod
    def role(self, role: str, expr: Node | str | None = None) -> T:
        """A turn of `role`: added at once with `expr`; without, for a `with`."""

    def system(self, expr: Node | str | None = None) -> T:
        """A turn of the system: added at once with `expr`; without, for a `with`."""
        return self.role("system", expr)

    def user(self, expr: Node | str | None = None) -> T:
        """A turn of the user: added at once with `expr`; without, for a `with`."""
        return self.role("user", expr)

    def assistant(self, expr: Node | str | None = None) -> T:
        """A turn of the assistant: added at once with `expr`; without, for a `with`."""
        return self.role("assistant", expr)

    def developer(self, expr: Node | str | None = None) -> T:
        """A turn of the developer: added at once with `expr`; without, for a `with`."""
        return self.role("developer", expr)

    def tool(self, expr: Node | str | None = None) -> T:
        """A turn of a tool: added at once with `expr`; without, for a `with`."""
        return self.role("tool", expr)

    # -- looking ---------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """How the state stands now, as frozen data: text, variables, forks, calls, the first failure, and
        whether it still runs. Does not wait; safe from any thread."""
        return self._core.snapshot()

    # -- going back, stopping --------------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """This moment, for rollback(). Does not wait."""
        return self._core.checkpoint()

    def rollback(self, checkpoint: Checkpoint) -> None:
        """Go back to a moment of this state: what was said, set and went wrong since is forgotten. What is
        under way is not waited for by readers, but ends before what comes next begins; cancel() first to stop
        it. Raises BadProgram for another state's checkpoint, or in a stream, which cannot be taken back."""
        self._core.rollback(checkpoint)

    def cancel(self) -> None:
        """Stop what is under way, in the branches too; readers get ProgramCancelled."""
        self._core.cancel()


S = TypeVar("S", bound=Face[Any])


@public
class Group(Generic[S]):
    """Forks of one state, in order."""

    _states: Sequence[S]

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, index: int) -> S:
        return self._states[index]

    def __setitem__(self, index: int, state: S) -> None:
        # `forks[i] += x` ends with this assignment.
        if self._states[index] is not state:
            raise BadProgram("a fork cannot be replaced; forks[i] += ... adds to it")

    def __iter__(self) -> Iterator[S]:
        return iter(self._states)

    def cancel(self) -> None:
        """Stop all forks."""
        for state in self._states:
            state.cancel()

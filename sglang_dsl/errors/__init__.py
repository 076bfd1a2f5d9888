"""The language's errors.

    SglError                       everything below
    +-- ProgramError               a program failed while it ran; carries place, variable, backend, cause
    |   +-- MissingVariable        (also KeyError) a variable nobody set was read
    |   +-- InvalidValue           a generated text is no value of the type it is read as
    |   +-- BackendError           the backend answered with an error, or not at all
    |   |   +-- Unsupported        this backend cannot do what the node asks
    |   |   +-- Timeout            it took longer than its deadline
    |   |   +-- ReplayMiss         a run that is repeated from a record makes a call that is not in it
    |   +-- ToolError              a tool that the model called failed
    |   +-- ToolLoopLimit          the model still calls tools after all the steps it was given
    |   +-- BudgetExceeded         the program, or the branch, has used up its budget
    |   +-- NoWinner               no branch was what was looked for
    |   +-- ProgramCancelled       the program, or the branch, was cancelled
    +-- NoBackend                  no backend was given and no default is set
    +-- BadProgram                 (also ValueError) a word was used wrongly: empty choices, bad regex, ...
    +-- StateClosed                text was added to a state that cannot go on

An error is raised where the value is read. It does not hold the state alive. Its traceback shows the user's
own lines (sglang_dsl.errors.tracebacks); err.full_traceback() tells the language's, too.
"""

from __future__ import annotations

import traceback
import warnings
from typing import Any, NamedTuple, TypeVar

from sglang_dsl.errors.source import Source, caller


class Stack(NamedTuple):
    """An exception as text, and the places that it came through, (file, line, function), outermost first."""

    error: str
    places: tuple[tuple[str, int, str], ...]


class SglError(Exception):
    """Base of the language's errors."""

    stacks: tuple[Stack, ...] = ()
    """What it came of, the first cause first, and itself: as it was before its traceback was trimmed."""

    def full_traceback(self) -> str:
        """Itself and all that it came of, with all frames, the language's too, as text."""
        parts = []
        *causes, own = self.stacks or stacks(self)
        shown = own.places if self.__traceback__ is None else (*_places(self), *own.places)
        for stack in (*causes, Stack(headline(self), tuple(dict.fromkeys(shown)))):
            frames = [
                traceback.FrameSummary(file, line, name, lookup_line=False)
                for file, line, name in stack.places
            ]
            lines = traceback.StackSummary.from_list(frames).format()
            parts.append("".join(["Traceback (most recent call last):\n", *lines, stack.error, "\n"]))
        return "\nwhich led to:\n\n".join(parts)


class BadProgram(SglError, ValueError):
    """A word of the language was used wrongly; raised at once, where it was written."""


class NoBackend(SglError):
    """No backend: pass backend=..., or call set_default_backend(...)."""


class StateClosed(SglError):
    """The state cannot take more text."""


class ProgramError(SglError):
    """A program failed.

    program, source (file, line), node, variable, backend, request_id, status, retryable and hint are None
    where unknown; __cause__ is what happened underneath.
    """

    def __init__(
        self,
        message: str,
        *,
        program: str | None = None,
        source: Source | None = None,
        node: str | None = None,
        variable: str | None = None,
        backend: str | None = None,
        request_id: str | None = None,
        status: int | None = None,
        retryable: bool = False,
        hint: str | None = None,
    ) -> None:
        self.message, self.program, self.source, self.node = message, program, source, node
        self.variable, self.backend, self.request_id = variable, backend, request_id
        self.status, self.retryable, self.hint = status, retryable, hint
        super().__init__(message)

    def fields(self) -> dict[str, Any]:
        """All that is known, for logs."""
        known = {k: v for k, v in vars(self).items() if v not in (None, False) and k != "stacks"}
        return known | ({"source": str(self.source)} if self.source else {})

    def __str__(self) -> str:
        place = [
            f"program {self.program!r}" if self.program else "",
            f"at {self.source}" if self.source else "",
            f"variable {self.variable!r}" if self.variable else "",
            f"in {self.node}" if self.node else "",
            f"backend {self.backend}" if self.backend else "",
            f"request {self.request_id}" if self.request_id else "",
            f"status {self.status}" if self.status else "",
        ]
        text = self.message
        if known := ", ".join(part for part in place if part):
            text += f" [{known}]"
        return f"{text}. {self.hint}" if self.hint else text


class MissingVariable(ProgramError, KeyError):
    """A variable was read that no node of the program sets."""

    __str__ = ProgramError.__str__


class InvalidValue(ProgramError):
    """A generated text cannot be read as the type that was asked for, or as JSON; `s.raw(name)` gives it."""


class BackendError(ProgramError):
    """The backend failed."""


class Unsupported(BackendError):
    """The backend cannot do this; nothing was dropped silently."""


class Timeout(BackendError):
    """The deadline passed."""


class ReplayMiss(BackendError):
    """The call is not in the record, and no backend is to be asked."""


class ToolError(ProgramError):
    """A tool that the model called failed, in a loop that was asked to raise it; __cause__ is what the tool
    raised."""


class ToolLoopLimit(ProgramError):
    """The model still calls tools after all the steps it was given; the last calls were not run."""


class BudgetExceeded(ProgramError):
    """The budget of the program, or of the branch, is used up; nothing more is asked of the backend."""


class NoWinner(ProgramError):
    """No branch was accepted, or none has a value."""


class ProgramCancelled(ProgramError):
    """Cancelled before it was done."""


E = TypeVar("E", bound=ProgramError)


def again(error: BaseException) -> BaseException:
    """A copy to raise: one failure may be read in many places, and each raise adds a traceback of its own.
    What a program's function raised is anybody's, and raised as it is."""
    if not isinstance(error, ProgramError):
        return error
    fresh = copied(error)
    if error.__cause__ is not None:  # set to None it would hide what its reader was handling
        fresh.__cause__ = error.__cause__
    return fresh


def copied(error: E) -> E:
    """The same error once more, with no traceback and no cause. Its class may be anybody's, and take other
    arguments than it keeps: it is not called."""
    fresh = type(error).__new__(type(error), *error.args)
    fresh.args = error.args
    vars(fresh).update(vars(error))
    return fresh


# Which warnings were shown, by their text and line (the shape that the warnings module asks for).
_SHOWN: dict[str | tuple[str, type[Warning], int], int] = {}


def warn(message: str) -> None:
    """A UserWarning at the user's line; by Python's default filter each line shows it once."""
    src = caller()
    place = ("<unknown>", 1) if src is None else (src.file, src.line)
    warnings.warn_explicit(message, UserWarning, *place, registry=_SHOWN)


def stacks(error: BaseException) -> tuple[Stack, ...]:
    """An exception and what it came of, the first cause first. Holds no frames."""
    found: list[Stack] = []
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:  # causes may go round in a circle
        seen.add(id(at))
        found.append(Stack(headline(at), _places(at)))
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return tuple(reversed(found))


def _places(error: BaseException) -> tuple[tuple[str, int, str], ...]:
    walked = traceback.walk_tb(error.__traceback__)
    return tuple((frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked)


def headline(error: BaseException) -> str:
    """Its kind and its message, if that can be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - its own __str__ fails
        return type(error).__name__

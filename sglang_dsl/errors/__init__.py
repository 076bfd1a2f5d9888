"""The language's errors.

    SglError                       base of all errors below
    +-- ProgramError               a program failed while it ran; has place, variable, backend, cause
    |   +-- MissingVariable        (also KeyError) a variable was read that nothing sets
    |   +-- InvalidValue           a generated text is not a value of the requested type
    |   +-- BackendError           the backend returned an error, or no answer
    |   |   +-- Unsupported        this backend cannot do what the node requests
    |   |   +-- Timeout            a call took longer than its deadline
    |   |   +-- ReplayMiss         a replayed run makes a call that is not in the record
    |   +-- ToolError              a tool that the model called failed
    |   +-- ToolLoopLimit          the model still calls tools after `max_steps` replies
    |   +-- BudgetExceeded         the program, or the branch, has used up its budget
    |   +-- NoWinner               no branch qualified
    |   +-- ProgramCancelled       the program, or the branch, was cancelled
    +-- NoBackend                  no backend was given and no default is set
    +-- BadProgram                 (also ValueError) a wrong argument: empty choices, bad regex, ...
    |   +-- WrongAttribute         (also AttributeError) s.temperature = 0.2, s.answer, gen("x").strip()
    |   +-- WrongAddition          (also TypeError) s + ... in place of s += ...
    +-- StateClosed                text was added to a state that cannot continue

An error is raised where the value is read. It does not keep the state alive. Its traceback shows only the
user's own lines (sglang_dsl.errors.tracebacks); err.full_traceback() includes those of the language.
"""

from __future__ import annotations

import contextlib
import itertools
import reprlib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from sglang_dsl.errors.tracebacks import SglError as SglError
from sglang_dsl.errors.tracebacks import Source, caller
from sglang_dsl.errors.tracebacks import Stack as Stack
from sglang_dsl.errors.tracebacks import headline as headline
from sglang_dsl.errors.tracebacks import stacks as stacks


class BadProgram(SglError, ValueError):
    """The language was used wrongly, for example with a wrong argument. Raised at once, where the program was
    written."""


class WrongAttribute(BadProgram, AttributeError):
    """A state, or a node, has no such attribute. hasattr() is False for it."""


class WrongAddition(BadProgram, TypeError):
    """`s + ...`, in place of `s += ...`."""


class NoBackend(SglError):
    """There is no backend. Pass backend=..., or call set_default_backend(...)."""


class StateClosed(SglError):
    """The state cannot take more text."""


class ProgramError(SglError):
    """A program failed while it ran.

    message                          what went wrong
    program, source, node, variable  where: the program, the file and line, the node, the variable
    backend, request_id, status      which backend, and what it answered
    retryable                        whether the same call may succeed later
    hint                             what to do about it

    Fields that are not known are None. `__cause__` is the underlying error.
    """

    shows_cause = True

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
        """All known fields, for logs."""
        known = {
            k: v
            for k, v in vars(self).items()
            if v is not None and v is not False and k not in ("stacks", "__notes__")
        }
        return known | ({"source": str(self.source)} if self.source else {})

    def __str__(self) -> str:
        context = [
            f"program {self.program!r}" if self.program else "",
            f"at {self.source}" if self.source else "",
            f"variable {self.variable!r}" if self.variable else "",
            f"in {self.node}" if self.node else "",
            f"backend {self.backend}" if self.backend else "",
            f"request {self.request_id}" if self.request_id else "",
            f"status {self.status}" if self.status else "",
        ]
        text = self.message
        if known := ", ".join(part for part in context if part):
            text += f" [{known}]"
        return f"{text}. {self.hint}" if self.hint else text


class MissingVariable(ProgramError, KeyError):
    """A variable was read that no node of the program sets."""

    __str__ = ProgramError.__str__


class InvalidValue(ProgramError):
    """A generated text cannot be read as the requested type, or as JSON. `s.raw(name)` returns the text."""


class BackendError(ProgramError):
    """The backend failed."""


class Unsupported(BackendError):
    """The backend does not support this. Nothing was dropped silently."""


class Timeout(BackendError):
    """A call took longer than its deadline."""


class ReplayMiss(BackendError):
    """The call is not in the record, and cache="ro" does not call the backend."""


class ToolError(ProgramError):
    """A tool that the model called failed, in a loop with on_error="raise". `__cause__` is the tool's
    exception."""


class ToolLoopLimit(ProgramError):
    """The model still calls tools after `max_steps` replies. The last calls were not run."""


class BudgetExceeded(ProgramError):
    """The budget of the program, or of the branch, is used up. The backend is not called again."""


class NoWinner(ProgramError):
    """No branch was accepted, or no branch has a value."""


class ProgramCancelled(ProgramError):
    """The program, or the branch, was cancelled before it was done."""


def near(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one that is meant, if one is much like it."""
    import difflib  # only for what is wrong

    matches = difflib.get_close_matches(name, [*known], 1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


E = TypeVar("E", bound=ProgramError)


def again(error: BaseException) -> BaseException:
    """A copy to raise. One failure may be read in many places, and each raise adds a traceback. An exception
    of the program's function may be of any class, and is raised as it is."""
    if not isinstance(error, ProgramError):
        return error
    fresh = copied(error)
    if error.__cause__ is not None:  # set to None it would hide what its reader was handling
        fresh.__cause__ = error.__cause__
    return fresh


def copied(error: E) -> E:
    """A copy of the error, without traceback and cause. Its class may be a user's, with other arguments than
    those it keeps, so it is not called."""
    fresh = type(error).__new__(type(error), *error.args)
    fresh.args = error.args
    vars(fresh).update(vars(error))
    if notes := getattr(error, "__notes__", None):
        fresh.__notes__ = list(notes)
    return fresh


def of_item(error: BaseException, index: int, item: object, container: str) -> None:
    """Say in `error` of which item of a batch (or of map) it is: as a note, which tracebacks show, and in the
    attributes `item_index` and `item`. Its class and its message stay."""
    note = f"item {index} of {container}: {_shown(item)}"
    if note in getattr(error, "__notes__", ()):
        return
    with contextlib.suppress(Exception):  # a class of the user's may take no attributes
        error.add_note(note)
        vars(error).update(item_index=index, item=item)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_MOST_SHOWN = 8


def _shown(item: object) -> str:
    """An item's arguments, in one line of bounded length."""
    if isinstance(item, Mapping):
        pairs = list(itertools.islice(item.items(), _MOST_SHOWN))
        shown = ", ".join(f"{name!s:.80}={_SHORT.repr(value)}" for name, value in pairs)
        shown += ", ..." if len(item) > len(pairs) else ""
    else:
        shown = _SHORT.repr(item)
    return " ".join(shown[:1000].split())


# Which warnings were shown, by their text and line (the shape that the warnings module asks for).
_SHOWN: dict[str | tuple[str, type[Warning], int], int] = {}


def warn(message: str, src: Source | None = None) -> None:
    """A UserWarning at a line of the user's, by default the one that is running; by Python's default filter
    each line shows it once."""
    src = src or caller()
    line = ("<unknown>", 1) if src is None else (src.file, src.line)
    warnings.warn_explicit(message, UserWarning, *line, registry=_SHOWN)

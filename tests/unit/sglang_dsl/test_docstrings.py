"""Every public name of the language says what it is: functions, classes, and what classes offer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import sglang_dsl as sgl
from sglang_dsl import budgets, choices, hooks, telemetry
from sglang_dsl.backends.base import Backend
from sglang_dsl.interpreter import record
from sglang_dsl.state.async_state import AsyncProgramStateGroup
from sglang_dsl.state.branches import Vote

ALSO = (
    AsyncProgramStateGroup,
    Backend,
    Vote,
    hooks.CallEvent,
    hooks.Hooks,
    record.Record,
    telemetry.instrument,
)


def offered(kind: type) -> Iterator[tuple[str, object]]:
    """What a class of this package adds to its bases, by name."""
    for base in kind.__mro__:
        if base.__module__.startswith("sglang_dsl"):
            yield from (
                (f"{kind.__name__}.{name}", getattr(kind, name))
                for name, value in vars(base).items()
                if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
            )


def documented() -> dict[str, object]:
    found: dict[str, object] = {}
    for one in (*(getattr(sgl, name) for name in sgl.__all__), *ALSO):
        if inspect.isclass(one):
            found |= {one.__name__: one, **dict(offered(one))}
        elif inspect.isfunction(one):
            found[one.__name__] = one
    return found


def test_every_public_name_says_what_it_is() -> None:
    names = documented()
    assert len(names) > 200
    texts = {name: inspect.getdoc(one) for name, one in names.items()}
    # What dataclasses make up is no docstring.
    assert [name for name, text in texts.items() if not text or text.startswith(f"{name}(")] == []


def test_the_tree_of_errors_lists_all_of_them() -> None:
    from sglang_dsl import errors

    for name, one in vars(errors).items():
        if inspect.isclass(one) and issubclass(one, errors.SglError):
            assert name in (errors.__doc__ or ""), name


def test_the_methods_of_select_are_explained() -> None:
    for name in choices.METHODS:
        assert name in (choices.__doc__ or "")
    assert {"tokens", "calls", "seconds", "cost"} <= set((budgets.Budget.__doc__ or "").split())

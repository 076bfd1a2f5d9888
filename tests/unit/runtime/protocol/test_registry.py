"""Tables of names: unknown names list the known ones, a missing package names its extra."""

from __future__ import annotations

import difflib

import pytest

from runtime.protocol.registry import MissingExtra, Registry, UnknownName, near


def test_names_resolve_when_asked_for() -> None:
    table: Registry[object] = Registry("thing", {"tau": "math:tau", "late": "no_such_module_anywhere:x"})
    assert table.load("tau") == pytest.approx(6.2831853)
    assert table.names() == ["late", "tau"]
    assert "tau" in table
    assert "pi" not in table
    with pytest.raises(ModuleNotFoundError):
        table.load("late")


def test_an_unknown_name_lists_the_known_ones() -> None:
    table: Registry[object] = Registry("thing", {"tau": "math:tau"})
    with pytest.raises(UnknownName, match=r"unknown thing 'pi'; known: tau"):
        table.load("pi")


def test_a_missing_package_names_the_extra() -> None:
    table: Registry[object] = Registry(
        "thing", {"late": "no_such_module_anywhere:x"}, extras={"late": "nice"}
    )
    with pytest.raises(MissingExtra, match=r"pip install 'sglang-dsl\[nice\]'"):
        table.load("late")


def test_lines_are_added_once() -> None:
    table: Registry[object] = Registry("thing", {"tau": "math:tau"})
    table.add("pi", "math:pi")
    assert table.load("pi") == pytest.approx(3.14159265)
    with pytest.raises(ValueError, match="registered already"):
        table.add("tau", "math:e")


def test_a_slip_is_found_and_what_is_none_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ("temperature", "top_p", "stop")
    assert near("temprature", known) == "temperature"
    assert near("stops", ("stop",)) == "stop"
    assert near("nothing_like", known) is None
    assert near("a", ()) is None
    monkeypatch.setattr(difflib, "get_close_matches", lambda *_, **__: pytest.fail("it was compared"))
    assert near("temperature" * 1000, known) is None

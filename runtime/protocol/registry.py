"""Registry: a table of names to "module:object", loaded on first use."""

from __future__ import annotations

import difflib
import importlib
import operator
from collections.abc import Collection, Iterator
from typing import Generic, TypeVar, cast

T = TypeVar("T")
MOST_ADDED = 3
"""A name that is this much longer than all known ones is not compared: that takes quadratic time."""


def near(name: str, known: Collection[str], alike: float = 0.6) -> str | None:
    """The one of `known` that looks most like `name`, if difflib's ratio of one is `alike` or more."""
    if len(name) > max(map(len, known), default=0) + MOST_ADDED:
        return None
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=alike)), None)


class UnknownName(KeyError):
    """A name that is not registered; the message lists the known ones."""

    def __str__(self) -> str:
        return str(self.args[0])


class MissingExtra(ImportError):
    """An optional package is not installed; the message names the extra to install."""


class Registry(Generic[T]):
    """`lines`: name -> "module:object". `extras`: name -> the extra of this distribution that installs its
    needs.

    Third parties add lines through the entry-point group `sglang_dsl.<kind>`, dots for spaces in `kind`.
    """

    def __init__(self, kind: str, lines: dict[str, str], extras: dict[str, str] | None = None) -> None:
        self.kind = kind
        self._lines = dict(lines)
        self._extras = dict(extras or {})
        self._plugged = False

    def _all(self) -> dict[str, str]:
        if not self._plugged:
            from importlib.metadata import entry_points  # slow to import

            self._plugged = True
            for point in entry_points(group=f"sglang_dsl.{self.kind.replace(' ', '.')}"):
                self._lines.setdefault(point.name, point.value)
        return self._lines

    def names(self) -> list[str]:
        return sorted(self._all())

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: object) -> bool:
        return name in self._lines or name in self._all()

    def add(self, name: str, target: str) -> None:
        """Add a line. Raises ValueError for an existing name: no built-in is replaced by accident."""
        if name in self._all():
            raise ValueError(f"{self.kind} {name!r} is registered already ({self._lines[name]})")
        self._lines[name] = target

    def target(self, name: str) -> str | None:
        """The "module:object" of `name`; it is not loaded."""
        return self._lines.get(name) or self._all().get(name)

    def load(self, name: str) -> T:
        """The object behind `name`. Raises UnknownName or MissingExtra."""
        target = self.target(name)
        if target is None:
            raise UnknownName(f"unknown {self.kind} {name!r}; known: {', '.join(self.names()) or 'none'}")
        module, _, attribute = target.partition(":")
        try:
            return cast(T, operator.attrgetter(attribute)(importlib.import_module(module)))
        except ModuleNotFoundError as error:
            extra = self._extras.get(name)
            if extra is None or (error.name or "").partition(".")[0] in ("runtime", "sglang_dsl"):
                raise
            raise MissingExtra(
                f"{self.kind} {name!r} needs the package {error.name!r}: pip install 'sglang-dsl[{extra}]'"
            ) from error

"""Whether a value that is shown while JSON is read may be an earlier one of another."""

from __future__ import annotations

from typing import Any


def is_prefix(partial: Any, final: Any) -> bool:
    """Whether `partial` may be an earlier value of `final`.

    Strings: a prefix. Arrays: the first items, all but the last equal and the last a prefix. Objects: the
    first members, in the same way. Other values: equal, and of the same type. (If a text has a name twice,
    the first value is shown until the second one comes; the last one wins.)
    """
    match partial, final:
        case str(), str():
            return final.startswith(partial)
        case list(), list():
            return _first_ones(partial, final[: len(partial)])
        case dict(), dict():
            some = list(final.items())[: len(partial)]
            return list(partial) == [name for name, _ in some] and _first_ones(
                list(partial.values()), [value for _, value in some]
            )
        case _:
            return type(partial) is type(final) and bool(partial == final)


def _first_ones(partial: list[Any], final: list[Any]) -> bool:
    if len(partial) != len(final) or partial[:-1] != final[:-1]:
        return False
    return not partial or is_prefix(partial[-1], final[-1])

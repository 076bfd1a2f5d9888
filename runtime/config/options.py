"""Options: fields of a config with a help text, read from loosely typed values and handed on to others.

It knows dataclasses, not what any option means.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar

import msgspec

from runtime.protocol.errors import BadRequest

T = TypeVar("T")


def option(default: Any, help: str, *, secret: bool = False, choices: tuple[str, ...] = ()) -> Any:
    """A field of a config. secret: left out of repr and of everything that is printed. choices: the values it
    may have."""
    metadata = {"help": help, "secret": secret, "choices": choices}
    return field(default=default, repr=not secret, metadata=metadata)


def options_of(config: type[Any]) -> list[Field[Any]]:
    """The fields of a config that are options, in their order; those of what it is made of come last."""
    found = [one for one in fields(config) if "help" in one.metadata]
    return sorted(found, key=lambda one: one.name not in config.__annotations__)


def help_of(one: Field[Any]) -> str:
    return str(one.metadata["help"])


def is_secret(one: Field[Any]) -> bool:
    return bool(one.metadata.get("secret"))


def choices_of(one: Field[Any]) -> tuple[str, ...]:
    return tuple(one.metadata.get("choices", ()))


ALIKE = 0.75
"""From here on (difflib's ratio) one name is taken for a slip of another: "prot" for "port"."""


def near(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A hint: the known name that `name` looks like a slip of, or else `otherwise`."""
    found = difflib.get_close_matches(name[:80], list(known), n=1, cutoff=ALIKE)
    return f"did you mean {found[0]!r}?" if found else otherwise


def read(config: type[T], options: Mapping[str, Any], where: str) -> T:
    """The config with these options. Raises BadRequest: an unknown name, a value of the wrong type, or one
    that is not among the choices."""
    known = {one.name: one for one in options_of(config)}
    for name in options:
        if name not in known:
            hint = near(name, known, "`python -m runtime serve --help` lists the options")
            raise BadRequest(f"unknown option {name!r:.80}", where=where, hint=hint)
    for name, one in known.items():
        allowed = choices_of(one)
        if allowed and name in options and options[name] not in allowed:
            raise BadRequest(f"must be one of {', '.join(allowed)}, got {options[name]!r}", where=name)
    try:
        return msgspec.convert(dict(options), config)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise BadRequest(message.replace("`$.", "`"), where=path.rstrip("`") or where) from error


def hand(config: type[T], options: Any, **other: Any) -> T:
    """A smaller config made of the options of the same names; `other`: fields that are named or made
    otherwise. So an option that is added under one name in both needs no line more."""
    names = {one.name for one in fields(options)}
    shared = {one.name: getattr(options, one.name) for one in fields(config) if one.name in names}  # type: ignore[arg-type]
    return config(**{**shared, **other})


def default_of(one: Field[Any]) -> Any:
    return None if one.default is MISSING else one.default

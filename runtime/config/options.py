"""Options: fields of a config with a help text, read from loosely typed values and passed on to other
configs.

It knows dataclasses, not the meaning of any option.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar

import msgspec

from runtime.protocol import registry
from runtime.protocol.errors import BadRequest

T = TypeVar("T")


def option(default: Any, help: str, *, secret: bool = False, choices: tuple[str, ...] = ()) -> Any:
    """A field of a config. secret: excluded from repr and from all output. choices: the allowed values."""
    metadata = {"help": help, "secret": secret, "choices": choices}
    return field(default=default, repr=not secret, metadata=metadata)


def options_of(config: type[Any]) -> list[Field[Any]]:
    """The option fields of a config, in order; those of its base classes come last."""
    options = [one for one in fields(config) if "help" in one.metadata]
    return sorted(options, key=lambda one: one.name not in config.__annotations__)


def help_of(one: Field[Any]) -> str:
    return str(one.metadata["help"])


def is_secret(one: Field[Any]) -> bool:
    return bool(one.metadata.get("secret"))


def choices_of(one: Field[Any]) -> tuple[str, ...]:
    return tuple(one.metadata.get("choices", ()))


ALIKE = 0.75
"""From this similarity on (difflib's ratio) a name counts as a typo of another: "prot" for "port"."""


def near(name: str, known: Iterable[str], otherwise: str) -> str:
    """A hint: the known name that `name` may be a typo of, or else `otherwise`."""
    match = registry.near(name, list(known), ALIKE)
    return f"did you mean {match!r}?" if match else otherwise


def read(config: type[T], options: Mapping[str, Any], where: str) -> T:
    """The config with these options. Raises BadRequest for an unknown name, a value of the wrong type, or one
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
    """Build `config` from the fields of the same names in `options`; `other`: values of fields with other
    names, or computed ones. An option with one name in both configs needs no extra line."""
    names = {one.name for one in fields(options)}
    shared = {one.name: getattr(options, one.name) for one in fields(config) if one.name in names}  # type: ignore[arg-type]
    return config(**{**shared, **other})


def default_of(one: Field[Any]) -> Any:
    return None if one.default is MISSING else one.default

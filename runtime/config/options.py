"""Options: fields of a config with a range and, as the string below each, a help text. They are read from
loosely typed values and passed on to other configs.

It knows dataclasses, not the meaning of any option.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from math import inf
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from runtime.protocol import registry
from runtime.protocol.errors import BadRequest

T = TypeVar("T")


LEADING = ("model", "host", "port", "api_key")
"""Options that come first in the help."""


def option(
    default: Any,
    *,
    secret: bool = False,
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    within: tuple[float, float] | None = None,
    positive: bool = False,
) -> Any:
    """A field of a config; the string below it is its help text. secret: excluded from repr and from all
    output. choices: the allowed values. at_least, within (least, most), positive: the range of a number; None
    is in every range."""
    rules = {"choices": choices, "at_least": at_least, "within": within, "positive": positive}
    return field(default=default, repr=not secret, metadata={"secret": secret, **rules})


def options_of(config: type[Any]) -> list[Field[Any]]:
    """The option fields of a config in the order of the help; those of its base classes come last."""
    options = [one for one in fields(config) if "secret" in one.metadata]
    return sorted(options, key=lambda one: (one.name not in LEADING, one.name not in config.__annotations__))


def check(config: Any) -> None:
    """Raise BadRequest for an option that is not among its choices, or out of its range."""
    for one in fields(config):
        rule = _broken_rule(one, getattr(config, one.name))
        if rule is not None:
            raise BadRequest(f"{rule}, got {getattr(config, one.name)!r}", where=one.name)


def _broken_rule(one: Field[Any], value: Any) -> str | None:
    if value is None or "secret" not in one.metadata:
        return None
    choices = one.metadata["choices"]
    if choices and value not in choices:
        return f"must be one of {', '.join(choices)}"
    least, within = one.metadata["at_least"], one.metadata["within"]
    if one.metadata["positive"] and not 0 < value < inf:
        return "must be a positive number"
    if least is not None and not least <= value < inf:
        return f"must be {'a number of ' if isinstance(value, float) else ''}at least {least:g}"
    if within is not None and not within[0] <= value <= within[1]:
        return f"must be in {within[0]} to {within[1]}"
    return None


@dataclass(frozen=True, kw_only=True)
class Config:
    """A config that consists of options. `of(...)` checks names, types and ranges."""

    label: ClassVar[str]
    """What errors call it."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """The config with these options. Raises BadRequest for an unknown name, or a value of the wrong type
        or out of range."""
        return read(cls, options, cls.label).verify()

    @classmethod
    def help_texts(cls) -> dict[str, str]:
        """Option -> its help text."""
        return {one.name: help_of(cls, one.name) for one in options_of(cls)}

    def verify(self) -> Self:
        """Return self, or raise BadRequest naming an option that does not fit the others."""
        return self


def help_of(config: type[Any], name: str) -> str:
    """The string below the option in the source, of the config or of its base that has the option."""
    kinds = [kind for kind in config.__mro__ if is_dataclass(kind)]
    texts = (_texts(kind.__module__).get((kind.__name__, name)) for kind in kinds)
    return next((text for text in texts if text is not None), "")


@functools.cache
def _texts(module: str) -> dict[tuple[str, str], str]:
    """(class, field) -> the string below the field; empty if the source is not installed."""
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:
        return {}
    classes = [one for one in ast.parse(source).body if isinstance(one, ast.ClassDef)]
    texts = {}
    for one in classes:
        for above, below in itertools.pairwise(one.body):
            match above, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[one.name, name] = " ".join(text.split())
    return texts


TYPO_SIMILARITY = 0.75
"""From this similarity on (difflib's ratio) a name counts as a typo of another: "prot" for "port"."""


def near(name: str, known: Iterable[str], otherwise: str) -> str:
    """A hint: the known name that `name` may be a typo of, or else `otherwise`."""
    match = registry.near(name, list(known), TYPO_SIMILARITY)
    return f"did you mean {match!r}?" if match else otherwise


def read(config: type[T], options: Mapping[str, Any], label: str) -> T:
    """The config with these options. Raises BadRequest for an unknown name, or a value of the wrong type or
    out of range."""
    known = {one.name: one for one in options_of(config)}
    for name in options:
        if name not in known:
            hint = near(name, known, "`python -m runtime serve --help` lists the options")
            raise BadRequest(f"unknown option {name!r:.80}", where=label, hint=hint)
    try:
        config_read = msgspec.convert(dict(options), config)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise BadRequest(message.replace("`$.", "`"), where=path.rstrip("`") or label) from error
    check(config_read)
    return config_read


def config_from(config: type[T], options: Any, **other: Any) -> T:
    """Build `config` from the fields of the same names in `options`; `other`: values of fields with other
    names, or computed ones. An option with one name in both configs needs no extra line."""
    names = {one.name for one in fields(options)}
    shared = {one.name: getattr(options, one.name) for one in fields(config) if one.name in names}  # type: ignore[arg-type]
    return config(**{**shared, **other})

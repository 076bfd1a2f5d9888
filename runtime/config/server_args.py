"""ServerArgs: every option of `serve` in one object, for programs that build, change or parse their options
before they start something. It starts nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.config.engine import EngineConfig
from runtime.config.flags import GROUPS, add_options
from runtime.config.options import options_of, read
from runtime.protocol.server_names import own_options


class ServerArgs(Mapping[str, Any]):
    """`model_path` and any option of `python -m runtime serve`, underscores for dashes; those not given are
    at their defaults. Read them as attributes; `Runtime(**args)` takes all that were given, and
    `Engine(**args.of_engine())` those that an engine has. Raises BadRequest for an unknown or wrong one."""

    def __init__(self, model_path: str = "pocket", **options: Any) -> None:
        self._given: dict[str, Any] = {"model": str(model_path), **own_options(options, str(model_path))}
        self._read: dict[str, Any] = {}
        left = dict(self._given)
        for _, config in GROUPS:
            names = {one.name for one in options_of(config)}
            made = read(config, {name: left.pop(name) for name in names & left.keys()}, "ServerArgs")
            self._read |= {name: getattr(made, name) for name in names}
        if left:
            read(EngineConfig, left, "ServerArgs")  # says what is unknown, and what was meant

    @property
    def model_path(self) -> str:
        return str(self._given["model"])

    def of_engine(self) -> dict[str, Any]:
        """Those given that an Engine takes."""
        names = {one.name for one in options_of(EngineConfig)} - {"model"}
        kept = {name: value for name, value in self._given.items() if name in names}
        return {"model_path": self.model_path, **kept}

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add a flag for every option."""
        add_options(parser)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> ServerArgs:
        """From what such a parser read; flags of other origin, and those not given, are passed over."""
        names = {one.name for _, config in GROUPS for one in options_of(config)}
        given = {name: value for name, value in vars(args).items() if name in names}
        return cls(given.pop("model", "pocket"), **given)

    # -- what was given, as a mapping -----------------------------------------------------------------------

    def _said(self) -> dict[str, Any]:
        return {"model_path" if name == "model" else name: value for name, value in self._given.items()}

    def __getitem__(self, name: str) -> Any:
        return self._said()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._said())

    def __len__(self) -> int:
        return len(self._given)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_read"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no option {name!r}") from None

    def __repr__(self) -> str:
        secret = {one.name for _, config in GROUPS for one in options_of(config) if one.metadata["secret"]}
        shown = (f"{name}={'...' if name in secret else repr(value)}" for name, value in self._said().items())
        return f"ServerArgs({', '.join(shown)})"

"""ServerArgs: every option of `serve` in one object, for programs that build, change or parse their options
before they start something. It starts nothing."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.config.engine import EngineConfig
from runtime.config.flags import GROUPS, add_options
from runtime.config.options import options_of, read
from runtime.protocol.server_names import runtime_options


class ServerArgs(Mapping[str, Any]):
    """`model_path` and any option of `python -m runtime serve`, with underscores for dashes; options not
    given have their defaults. Read them as attributes. `Runtime(**args)` takes all given options, and
    `Engine(**args.of_engine())` those of an engine. Raises BadRequest for an unknown or invalid option."""

    def __init__(self, model_path: str = "pocket", **options: Any) -> None:
        converted = dict(runtime_options(options, str(model_path)))
        model = str(converted.pop("model", model_path))
        self._passed: dict[str, Any] = {"model_path": model, **converted}
        self._read: dict[str, Any] = {}
        left = {"model": model, **converted}
        for _, config in GROUPS:
            names = {one.name for one in options_of(config)}
            values = read(config, {name: left.pop(name) for name in names & left.keys()}, "ServerArgs")
            self._read |= {name: getattr(values, name) for name in names}
        if left:
            read(EngineConfig, left, "ServerArgs")  # raises an error that names the unknown option

    @property
    def model_path(self) -> str:
        return str(self._passed["model_path"])

    def of_engine(self) -> dict[str, Any]:
        """The given options of an Engine."""
        names = {"model_path", *(one.name for one in options_of(EngineConfig))}
        return {name: value for name, value in self._passed.items() if name in names}

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add a flag for every option."""
        add_options(parser)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> ServerArgs:
        """From the namespace of such a parser; other flags are ignored."""
        names = {one.name for _, config in GROUPS for one in options_of(config)}
        options = {name: value for name, value in vars(args).items() if name in names}
        return cls(options.pop("model", "pocket"), **options)

    # -- the given options as a mapping ---------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        return self._passed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._passed)

    def __len__(self) -> int:
        return len(self._passed)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_read"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no option {name!r}") from None

    def __repr__(self) -> str:
        secret = {one.name for _, config in GROUPS for one in options_of(config) if one.metadata["secret"]}
        shown = (f"{name}={'...' if name in secret else repr(value)}" for name, value in self._passed.items())
        return f"ServerArgs({', '.join(shown)})"

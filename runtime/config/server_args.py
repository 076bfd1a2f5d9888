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
        self._options: dict[str, Any] = {
            "model": str(model_path),
            **runtime_options(options, str(model_path)),
        }
        self._read: dict[str, Any] = {}
        left = dict(self._options)
        for _, config in GROUPS:
            names = {one.name for one in options_of(config)}
            values = read(config, {name: left.pop(name) for name in names & left.keys()}, "ServerArgs")
            self._read |= {name: getattr(values, name) for name in names}
        if left:
            read(EngineConfig, left, "ServerArgs")  # raises an error that names the unknown option

    @property
    def model_path(self) -> str:
        return str(self._options["model"])

    def of_engine(self) -> dict[str, Any]:
        """The given options of an Engine."""
        names = {one.name for one in options_of(EngineConfig)} - {"model"}
        kept = {name: value for name, value in self._options.items() if name in names}
        return {"model_path": self.model_path, **kept}

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

    def _as_mapping(self) -> dict[str, Any]:
        return {"model_path" if name == "model" else name: value for name, value in self._options.items()}

    def __getitem__(self, name: str) -> Any:
        return self._as_mapping()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._as_mapping())

    def __len__(self) -> int:
        return len(self._options)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_read"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no option {name!r}") from None

    def __repr__(self) -> str:
        secret = {one.name for _, config in GROUPS for one in options_of(config) if one.metadata["secret"]}
        shown = (
            f"{name}={'...' if name in secret else repr(value)}" for name, value in self._as_mapping().items()
        )
        return f"ServerArgs({', '.join(shown)})"

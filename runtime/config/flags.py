"""Flags: the options of configs from a command line, the environment and a YAML file.

A flag overrides an environment variable, a variable overrides the file, and the file overrides the defaults.
Names, types and help come from the configs. It starts nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from runtime.config.engine import EngineConfig
from runtime.config.options import help_of, near, options_of
from runtime.config.serving.replicas import ReplicasConfig
from runtime.config.serving.router import RouterConfig
from runtime.config.serving.server import ServerConfig
from runtime.protocol import registry
from runtime.protocol.console import DISTRIBUTION, version
from runtime.protocol.errors import BadRequest

C = TypeVar("C", ServerConfig, RouterConfig)
ENV_PREFIX = "SGLANG_DSL_"
Groups = tuple[tuple[str, type[Any]], ...]
"""The options of a command: (title, config), ..."""
GROUPS: Groups = (("server", ServerConfig), ("engine", EngineConfig))
SERVE: Groups = (*GROUPS, ("replicas", ReplicasConfig))
ALL: tuple[type[Any], ...] = (ServerConfig, EngineConfig, ReplicasConfig, RouterConfig)
"""All options with an environment variable: a command ignores the variables of other commands."""
OTHER_VARIABLES = {f"{ENV_PREFIX}{name}" for name in ("CONFIG", "FULL_TRACEBACK", "TRANSFER_FAULTS")}
"""Variables that are not options."""
TYPO_SIMILARITY = 0.8
"""From this similarity on (difflib's ratio) the name of a variable counts as a typo of another."""
MAX_FILE_BYTES = 1 << 20
DESCRIPTION = (
    "Serve a model over HTTP, with the APIs of OpenAI and Anthropic and a native one. Without options: the "
    "bundled model, for this machine only, on http://127.0.0.1:30000. GET /openapi.json lists the paths."
)
ALIASES: Mapping[str, tuple[str, ...]] = {
    "model": ("--model-path",), "tp_size": ("--tp",), "cors_origins": ("--allow-origin",),
    "allowed_hosts": ("--allow-host",),
}  # fmt: skip
"""Other flags for the same option."""
_KEY = ("api_key", "api_key_file")
"""Two ways to give one thing: a stronger source's replaces both of a weaker one."""
_TRUTHS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
_NONE = ("none", "null")


@dataclass(frozen=True)
class Options:
    """The options of `serve`."""

    engine: EngineConfig
    server: ServerConfig
    replicas: ReplicasConfig


class _Parser(argparse.ArgumentParser):
    """Raises BadRequest instead of printing the usage and exiting. Help texts are read only when they are
    shown: that takes longer than everything else."""

    groups: Groups = ()

    def format_help(self) -> str:
        texts = {one.name: _help(config, one) for _, config in self.groups for one in options_of(config)}
        for action in self._actions:
            if not action.help:
                action.help = texts[action.dest]
        return super().format_help()

    def print_help(self, file: Any = None) -> None:
        # argparse itself ignores write errors.
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        raise BadRequest(message, where="command line", hint=f"{self.prog} --help")


class _Several(argparse.Action):
    """An option with several values: after one flag, after several flags, or separated by commas."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any
    ) -> None:
        collected = [*getattr(namespace, self.dest, ()), *(one for part in values for one in part)]
        setattr(namespace, self.dest, collected)


def make_parser(prog: str, description: str = "", groups: Groups = GROUPS) -> argparse.ArgumentParser:
    """A parser of every option. Options that are not given leave no value."""
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [--config FILE] [options]",  # the list of all is below
        description=description or DESCRIPTION,
        epilog=f"Every option can also be given as an environment variable ({ENV_PREFIX}PORT=30001) or in "
        "the file of --config (port: 30001). A flag overrides the environment, which overrides the file. "
        "The value `none` means not set.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file of options")
    parser.add_argument("--version", action="version", version=f"{DISTRIBUTION} {version()}")
    parser.groups = groups
    add_options(parser, groups, described=False)
    return parser


def add_options(parser: argparse.ArgumentParser, groups: Groups = GROUPS, *, described: bool = True) -> None:
    """Add every option to a parser, in groups. Options that are not given leave no value. described: with
    help texts."""
    for title, config in groups:
        group = parser.add_argument_group(f"{title} options")
        kinds = _kinds(config)
        for one in options_of(config):
            _add(group, one, kinds[one.name], _help(config, one) if described else "")


def read_options(
    arguments: Sequence[str], environment: Mapping[str, str], prog: str = "python -m runtime serve"
) -> Options:
    """The options from these arguments, variables and the configuration file that they name. Raises
    BadRequest naming the source of the error; SystemExit after --help."""
    values = read_values(arguments, environment, make_parser(prog, groups=SERVE), SERVE)
    return Options(
        EngineConfig.of(values["engine"]),
        with_key(ServerConfig.of(values["server"])),
        ReplicasConfig.of(values["replicas"]),
    )


def read_values(
    arguments: Sequence[str], environment: Mapping[str, str], parser: argparse.ArgumentParser, groups: Groups
) -> dict[str, dict[str, Any]]:
    """Title of a group -> the values of its options that were given anywhere. Raises like read_options."""
    namespace, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        flags = ["--" + one.name.replace("_", "-") for _, config in groups for one in options_of(config)]
        hint = near(unknown[0].partition("=")[0], [*flags, "--config"], f"see {parser.prog} --help")
        raise BadRequest(f"unknown argument {unknown[0]!r}", where="command line", hint=hint)
    from_flags = vars(namespace)
    file = from_flags.pop("config", None) or environment.get(f"{ENV_PREFIX}CONFIG")
    values = _from_file(Path(file), groups) if file else {}
    for stronger in (_from_environment(environment, groups), from_flags):
        if any(stronger.get(name) is not None for name in _KEY):
            values = {name: value for name, value in values.items() if name not in _KEY}
        values = {**values, **stronger}
    return {
        title: {one.name: values[one.name] for one in options_of(config) if one.name in values}
        for title, config in groups
    }


def with_key(config: C) -> C:
    """The config with the key read from its file. Raises BadRequest."""
    if config.api_key_file is None:
        return config
    try:
        lines = Path(config.api_key_file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"cannot be read: {_reason(error)}", where=config.api_key_file) from error
    key = lines[0].strip() if lines else ""
    if not key:
        raise BadRequest("its first line must be the API key, but is empty", where=config.api_key_file)
    return replace(config, api_key=key, api_key_file=None)


# -- the three sources ---------------------------------------------------------------------------------------


def _from_file(path: Path, groups: Groups) -> dict[str, Any]:
    source = str(path)
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadRequest(f"cannot be read: {_reason(error)}", where=source) from error
    if len(data) > MAX_FILE_BYTES:
        raise BadRequest(f"is larger than {MAX_FILE_BYTES} bytes", where=source)
    try:
        content = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadRequest(f"is not YAML: {' '.join(str(error).split())}", where=source) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise BadRequest(
            f"must contain `option: value` lines, contains a {type(content).__name__}", where=source
        )
    known = {one.name: one for _, config in groups for one in options_of(config)}
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            hint = near(name, known, "see --help for all")
            raise BadRequest(f"unknown option {str(key)!r:.80}", where=source, hint=hint)
        if name in values:
            raise BadRequest(f"the option {name!r} occurs twice", where=source)
        values[name] = value
    return values


def _from_environment(environment: Mapping[str, str], groups: Groups) -> dict[str, Any]:
    """Reads only the variables of known options: others may belong to other programs. Raises BadRequest if a
    name looks like a typo of a known one."""
    values: dict[str, Any] = {}
    known = {_variable(one.name) for config in ALL for one in options_of(config)} | OTHER_VARIABLES
    names = {name.removeprefix(ENV_PREFIX): name for name in known}
    for variable in environment:
        if variable.upper().startswith(ENV_PREFIX) and variable not in known:
            match = registry.near(variable.upper().removeprefix(ENV_PREFIX), names, TYPO_SIMILARITY)
            if match is not None:
                meant = f"did you mean {names[match]}?"
                raise BadRequest("there is no such option", where=variable, hint=meant)
    for _, config in groups:
        kinds = _kinds(config)
        for one in options_of(config):
            text = environment.get(_variable(one.name))
            if text is not None:
                try:
                    values[one.name] = parse(text, kinds[one.name])
                except ValueError as error:
                    # Kubernetes sets variables for each Service, SGLANG_DSL_PORT for one named sglang-dsl.
                    linked = text.startswith(("tcp://", "udp://"))
                    hint = "enableServiceLinks: false in the pod's spec" if linked else None
                    raise BadRequest(str(error), where=_variable(one.name), hint=hint) from error
    return values


def _variable(name: str) -> str:
    return f"{ENV_PREFIX}{name.upper()}"


# -- text to values ------------------------------------------------------------------------------------------


def parse(text: str, kind: Any) -> Any:
    """A value of the annotation `kind` from text. Raises ValueError with the expected form."""
    accepted = _members(kind)
    word = text.strip().lower()
    if type(None) in accepted and word in _NONE:
        return None
    for member in accepted:
        if member is bool:
            if word not in _TRUTHS:
                raise ValueError(f"must be one of {', '.join(_TRUTHS)}, got {text!r}")
            return _TRUTHS[word]
        if member in (int, float):
            try:
                return member(text)
            except ValueError:
                what = "a whole number" if member is int else "a number"
                raise ValueError(f"must be {what}, got {text!r}") from None
        if typing.get_origin(member) is tuple:
            return [part.strip() for part in text.split(",") if part.strip()]
        if typing.get_origin(member) is dict and text.lstrip().startswith("{") and '"' in text:
            try:
                return json.loads(text)
            except json.JSONDecodeError:
                continue  # a text that begins like an object, such as a template
    return text


def _members(kind: Any) -> tuple[Any, ...]:
    """The types of a union; the one type of anything else. Structured ones come before plain text."""
    members = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return tuple(sorted(members, key=lambda member: member is str))


def _kinds(config: type[Any]) -> dict[str, Any]:
    """The types of its fields by name. Slow: each annotation is evaluated."""
    return typing.get_type_hints(config)


def _add(group: Any, one: Field[Any], kind: Any, text: str) -> None:
    name = "--" + one.name.replace("_", "-")
    names = [name, *ALIASES.get(one.name, ())]
    if kind is bool:
        group.add_argument(name, action=argparse.BooleanOptionalAction, help=text, default=argparse.SUPPRESS)
        return
    if kind == bool | None:  # yes, no or undecided: may be given as a switch and as a value
        unset = argparse.SUPPRESS
        group.add_argument("--no-" + name[2:], dest=one.name, action="store_false", default=unset, help=unset)

    def convert(text: str) -> Any:
        try:
            return parse(text, kind)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    if typing.get_origin(kind) is tuple:
        several: dict[str, Any] = {"nargs": "+", "action": _Several}
    else:
        several = {"nargs": "?", "const": True} if kind == bool | None else {}
    group.add_argument(
        *names,
        type=convert,
        **several,
        default=argparse.SUPPRESS,
        help=text,
        metavar="{" + ",".join(choices) + "}" if (choices := one.metadata["choices"]) else _metavar(kind),
    )


def _metavar(kind: Any) -> str:
    metavars = {int: "N", float: "X", bool: "BOOL"}
    return next((metavars[member] for member in _members(kind) if member in metavars), "TEXT")


def _help(config: type[Any], one: Field[Any]) -> str:
    text = help_of(config, one.name).replace("%", "%%")
    hidden = one.metadata["secret"] or one.default in (None, ())
    return text if hidden else f"{text} (default: {one.default})"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)

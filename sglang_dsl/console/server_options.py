"""sglang's names for server options, translated to those of the bundled runtime: keyword arguments, and the
flags of a command line."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.formats.reasoning.types import AUTO, REASONING_TYPES
from runtime.protocol import server_names
from runtime.protocol.errors import NotSupported
from sglang_dsl.errors import Unsupported, warn

_PARSER = "reasoning_parser"


def runtime_options(options: Mapping[str, Any], model: Any = None, **how: Any) -> dict[str, Any]:
    """`options` by the runtime's names; unknown names stay. `model`: the checkpoint they are for. Warns about
    options without effect. Raises Unsupported for what the runtime cannot do."""
    options = dict(options)
    parser = options.pop(_PARSER, None)
    if parser is not None:  # an unknown parser is one more option without effect
        known = parser in (AUTO, *REASONING_TYPES)
        options[_PARSER if known else "default_reasoning_parser"] = parser
    try:
        return server_names.own_options(options, model, **{"tell": warn, **how})
    except NotSupported as error:
        raise Unsupported(error.message, hint=error.hint) from error


def runtime_flags(arguments: Sequence[str], notify: Callable[[str], None] = warn) -> list[str]:
    """A command line with the runtime's flags. Options without effect, and those that the runtime cannot do,
    are named in one warning, by `notify`. Raises Unsupported for a tokenizer other than the checkpoint's."""
    options: dict[str, Any] = {}
    flags: list[str] = []
    at = 0
    while at < len(arguments):
        flag, equals, value = arguments[at].partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        at += 1
        if not flag.startswith("--") or not (name == _PARSER or server_names.known(name)):
            flags.append(arguments[at - 1])
            continue
        values = [value] if equals else []
        many = server_names.is_idle(name) or name in server_names.ANYWAY
        while at < len(arguments) and not arguments[at].startswith("--") and (many or not values):
            values.append(arguments[at])
            at += 1
        text = " ".join(values) if values else True
        options[name] = int(text) if isinstance(text, str) and text.lstrip("-").isdigit() else text
    for option, chosen in runtime_options(options, _model(arguments), lenient=True, tell=notify).items():
        dashed = option.replace("_", "-")
        if isinstance(chosen, bool):
            flags.append(f"--{dashed}" if chosen else f"--no-{dashed}")
        else:
            flags += [f"--{dashed}", str(chosen)]
    return flags


def flags_of(command: str) -> list[str]:
    """The arguments of a shell command from its first flag on."""
    arguments = shlex.split(command.replace("\\\n", " "))
    first = next((at for at, one in enumerate(arguments) if one.startswith("--")), len(arguments))
    return arguments[first:]


def _model(arguments: Sequence[str]) -> str | None:
    """The checkpoint that a command line names."""
    for at, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in ("--model", "--model-path"):
            return value if equals else "".join(arguments[at + 1 : at + 2])
    return None


def server_command(*arguments: str) -> tuple[list[str], dict[str, str]]:
    """`python -m runtime serve ARGUMENTS`, and its environment. This distribution's `runtime` is run even if
    the working directory has a module of that name, which `-m` alone would prefer."""
    environment, root = dict(os.environ), Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        paths = (environment.get("PYTHONPATH"), str(root))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return [sys.executable, "-P", "-m", "runtime", "serve", *arguments], environment

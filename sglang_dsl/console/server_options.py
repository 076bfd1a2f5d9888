"""Options of a server under the names that programs for sglang give them, as options of the bundled runtime:
of a call, and of a command line. Knows no server.
"""

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


def own_options(given: Mapping[str, Any], model: Any = None) -> dict[str, Any]:
    """`given` with the runtime's names; names that are in no table stay. `model`: the checkpoint they are
    for. Warns of what is without effect. Raises Unsupported for what the runtime cannot do."""
    return _translated(given, model, tell=warn)


def _translated(given: Mapping[str, Any], model: Any, **how: Any) -> dict[str, Any]:
    try:
        return server_names.runtime_options(_marks(given), model, **how)
    except NotSupported as error:
        raise Unsupported(error.message, hint=error.hint) from error


def _marks(given: Mapping[str, Any]) -> dict[str, Any]:
    """A reasoning parser's name that is not known here is one more that is without effect."""
    made = {name: value for name, value in given.items() if name != _PARSER}
    if given.get(_PARSER) in (AUTO, *REASONING_TYPES):
        made[_PARSER] = given[_PARSER]
    elif given.get(_PARSER) is not None:
        made["default_reasoning_parser"] = given[_PARSER]
    return made


def own_flags(words: Sequence[str], tell: Callable[[str], None] = warn) -> list[str]:
    """The words of a command line with the runtime's flags. One warning, by `tell`, names what is without
    effect, and what the runtime cannot do. Raises Unsupported for another tokenizer than the checkpoint's."""
    given: dict[str, Any] = {}
    made: list[str] = []
    at = 0
    while at < len(words):
        flag, equals, value = words[at].partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        at += 1
        if not flag.startswith("--") or not (name == _PARSER or server_names.known(name)):
            made.append(words[at - 1])
            continue
        values = [value] if equals else []
        many = server_names.is_idle(name) or name in server_names.ANYWAY
        while at < len(words) and not words[at].startswith("--") and (many or not values):
            values.append(words[at])
            at += 1
        told = " ".join(values) if values else True
        given[name] = int(told) if isinstance(told, str) and told.lstrip("-").isdigit() else told
    for option, chosen in _translated(given, _model(words), lenient=True, tell=tell).items():
        dashed = option.replace("_", "-")
        if isinstance(chosen, bool):
            made.append(f"--{dashed}" if chosen else f"--no-{dashed}")
        else:
            made += [f"--{dashed}", str(chosen)]
    return made


def flags_of(command: str) -> list[str]:
    """The words of a command line from its first flag on, whatever starts the server there."""
    words = shlex.split(command.replace("\\\n", " "))
    return words[next((at for at, word in enumerate(words) if word.startswith("--")), len(words)) :]


def _model(words: Sequence[str]) -> str | None:
    """The checkpoint that a command line names."""
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in ("--model", "--model-path"):
            return value if equals else "".join(words[at + 1 : at + 2])
    return None


def server_command(*arguments: str) -> tuple[list[str], dict[str, str]]:
    """`python -m runtime serve ARGUMENTS`, and its environment. It runs this distribution's `runtime`, also
    where a module of that name lies in the working directory, which `-m` alone would look into first."""
    environment, root = dict(os.environ), Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        paths = (environment.get("PYTHONPATH"), str(root))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return [sys.executable, "-P", "-m", "runtime", "serve", *arguments], environment

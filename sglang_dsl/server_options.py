"""Options of a server under the names that programs for sglang give them, as options of the bundled runtime:
of a call, and of a command line. Knows no server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.protocol import server_names
from runtime.protocol.errors import NotSupported
from sglang_dsl.errors import Unsupported


def own_options(given: Mapping[str, Any], model: Any = None) -> dict[str, Any]:
    """`given` with the runtime's names; names that are in no table stay. `model`: the checkpoint they are
    for. Raises Unsupported for what the runtime cannot do."""
    try:
        return server_names.own_options(given, model)
    except NotSupported as error:
        raise Unsupported(error.message, hint=error.hint) from error


def own_flags(words: Sequence[str]) -> list[str]:
    """The same for the words of a command line. Raises Unsupported."""
    made: list[str] = []
    at, model = 0, _model(words)
    while at < len(words):
        flag, equals, value = words[at].partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        at += 1
        if not flag.startswith("--") or not server_names.known(name):
            made.append(words[at - 1])
            continue
        follows = not equals and at < len(words) and not words[at].startswith("--")
        if follows:
            value, at = words[at], at + 1
        told = value if equals or follows else True
        number = int(told) if isinstance(told, str) and told.isdigit() else told
        for own, own_value in own_options({name: number}, model).items():
            dashed = own.replace("_", "-")
            if isinstance(own_value, bool):
                made.append(f"--{dashed}" if own_value else f"--no-{dashed}")
            else:
                made += [f"--{dashed}", str(own_value)]
    return made


def _model(words: Sequence[str]) -> str | None:
    """The checkpoint that a command line names."""
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in ("--model", "--model-path"):
            return value if equals else "".join(words[at + 1 : at + 2])
    return None

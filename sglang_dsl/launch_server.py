"""python -m sglang_dsl.launch_server: `python -m runtime serve` with sglang's flags."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.protocol import server_names
from runtime.protocol.registry import Registry
from sglang_dsl.console.server_options import PARSER, runtime_options
from sglang_dsl.errors import warn

_SERVER: Registry[Callable[[Sequence[str], Mapping[str, str]], int]] = Registry(
    "server", {"serve": "runtime.__main__:main"}
)


def serve(flags: Sequence[str]) -> int:
    """`python -m runtime serve` in this process. Returns the exit code."""
    return _SERVER.load("serve")(["serve", *flags], os.environ)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    return serve(runtime_flags(arguments, lambda text: print(f"warning: {text}", file=sys.stderr)))


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
        if not flag.startswith("--") or not (name == PARSER or server_names.known(name)):
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

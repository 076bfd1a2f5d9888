"""python -m sglang_dsl: a prompt, demo, run, trace, chat, view, doctor, serve.

Exit codes: 0 done; 1 the program, or the backend, failed; 2 the command line is wrong: an option, a file, an
argument, a model that is nowhere, a package that is not installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

from runtime.protocol.console import FAILED, USAGE_ERROR, complain, version
from runtime.protocol.console import run as run_command
from runtime.protocol.registry import MissingExtra
from sglang_dsl.api import gen
from sglang_dsl.backends.base import Backend
from sglang_dsl.concurrency.loop import background
from sglang_dsl.console.backend_flag import BackendChoice, add_backend_flags
from sglang_dsl.errors import BadProgram, SglError
from sglang_dsl.function import RUN_OPTIONS, SglFunction
from sglang_dsl.launch_server import serve
from sglang_dsl.views.run_file import RunWriter, write_run

PROG = "sglang-dsl"
FORMS = {
    "regex": "a regular expression",
    "json_schema": "a JSON schema",
    "ebnf": "a grammar",
    "structural_tag": "a structural tag",
}


class _Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line."""

    def print_help(self, file: Any = None) -> None:
        # argparse itself passes over what cannot be written.
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        self.exit(complain(f"{message} ({self.prog} --help)", USAGE_ERROR))


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog=PROG, description="Run, trace and show programs.")
    top.add_argument("--version", action="version", version=f"{PROG} {version()}")
    verbs = top.add_subparsers(dest="verb", required=True)
    verbs.add_parser("demo", help="a multi-call program on the bundled checkpoint")
    run = verbs.add_parser("run", help="run a program and show its state")
    trace = verbs.add_parser("trace", help="print a program as a tree, without running it")
    chat = verbs.add_parser("chat", help="a chat in the terminal")
    repl = verbs.add_parser("repl", help="a Python prompt with a state s on a backend (the default command)")
    doctor = verbs.add_parser("doctor", help="what is installed, what works, what to install")
    doctor.add_argument("--quick", action="store_true", help="load no model")
    view = verbs.add_parser("view", help="show run files in the browser: tree, timeline, tokens, cache")
    view.add_argument("files", metavar="FILE", nargs="+", help="written with `run --write-run`, or write_run")
    view.add_argument("--live", action="store_true", help="follow files that still grow, or come later")
    view.add_argument("--no-browser", action="store_true", help="print the address and open nothing")
    view.add_argument("--port", type=int, default=0, metavar="N", help="on 127.0.0.1; 0: any that is free")
    verbs.add_parser("serve", help="serve a model over HTTP; `serve --help` lists the options")
    for verb in (run, trace):
        verb.add_argument("program", metavar="FILE:FUNCTION")
        verb.add_argument("arguments", metavar="NAME=VALUE", nargs="*", help="text, or JSON where it parses")
    for verb in (run, chat, repl):
        add_backend_flags(verb)
        verb.add_argument(
            "--max-tokens", type=int, default=None, metavar="N", help="most tokens per generation"
        )
        verb.add_argument(
            "--temperature", type=float, default=None, metavar="T", help="0: always the most likely token"
        )
    run.add_argument("--write-run", default=None, metavar="FILE", help="write all calls to a file for `view`")
    run.add_argument("--stream", action="store_true", help="print the text while it is generated")
    trace.add_argument("--json", action="store_true", help="print the program as JSON")
    trace.add_argument(
        "--form",
        choices=("tree", "mermaid", "dot"),
        default="tree",
        help="how to print it: a tree, or a diagram as Mermaid or Graphviz text",
    )
    for verb in (chat, repl):
        verb.add_argument("--system", default=None, help="text of the system turn")
    forms = chat.add_mutually_exclusive_group()
    for word, what in FORMS.items():
        forms.add_argument(
            f"--{word.replace('_', '-')}", default=None, metavar="TEXT|@FILE",
            help=f"{what} that every answer must match",
        )  # fmt: skip
    return top


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, read; a program's arguments may stand before, between and after the options."""
    top = parser()
    args, rest = top.parse_known_args(argv)
    if rest and ("arguments" not in args or any(word.startswith("-") for word in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.arguments = [*args.arguments, *rest]
    return args


def load(target: str) -> SglFunction:
    """The program at FILE:FUNCTION. Raises BadProgram saying what is missing."""
    file, colon, name = target.rpartition(":")
    if not colon or not file or not name:
        raise BadProgram(f"{target!r} is not a program; write FILE:FUNCTION")
    path = Path(file)
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise BadProgram(f"the file {file!r} {what}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadProgram(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadProgram(f"{file} cannot be loaded: {_location(error, file)}") from error
    program = vars(module).get(name)
    if not isinstance(program, SglFunction):
        programs = ", ".join(k for k, v in vars(module).items() if isinstance(v, SglFunction)) or "none"
        raise BadProgram(f"{file} has no program {name!r}; it has: {programs}")
    return program


def _location(error: Exception, file: str) -> str:
    """What went wrong, and at which line of the user's file."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == os.path.abspath(file)]
    at = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{at}"


def check(program: SglFunction[..., Any], arguments: dict[str, Any], *, whole: bool = True) -> dict[str, Any]:
    """The arguments, as the program takes them; `whole`: with all that it needs. Raises BadProgram."""
    parameters = program.signature.parameters
    rest = {name: value for name, value in arguments.items() if name in parameters or name not in RUN_OPTIONS}
    try:
        args, kwargs = program.fill((), rest)
        (program.signature.bind if whole else program.signature.bind_partial)(*args, **kwargs)
    except TypeError as error:
        raise BadProgram(f"{program.name}{program.signature}: {error}; write NAME=VALUE") from error
    return arguments


def arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """name=value pairs; a value that is JSON is read as such. Raises BadProgram."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise BadProgram(f"{pair!r}: write NAME=VALUE")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


def text(value: str) -> str:
    """A text, or with @FILE the file's. Raises BadProgram."""
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadProgram(f"{value[1:]} cannot be read: {error}") from error


def run(args: argparse.Namespace) -> int:
    program = load(args.program).options(max_tokens=args.max_tokens, temperature=args.temperature)
    values = check(program, arguments(args.arguments))
    chosen = BackendChoice(args.backend, args.model).open()
    try:
        with nullcontext() if args.write_run is None else write_run(args.write_run) as written:
            state = program.options(backend=chosen, stream=args.stream).run(**values)
            if args.stream:
                for piece in state.text_iter():
                    print(piece, end="", flush=True)
                print()
            else:
                state.show()
            error = state.error()
            if written is not None:
                _write_cache(written, chosen)
        if error is not None:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return int(error is not None)
    finally:
        background().run(chosen.aclose())


def _write_cache(written: RunWriter, chosen: Backend) -> None:
    """What the backend's prefix cache holds now, where it tells."""
    try:
        tree = background().run(chosen.prefix_cache())
    except SglError as error:
        print(f"the prefix cache is not in the file: {error}", file=sys.stderr)
        return
    if tree is not None:
        written.cache(tree)


def trace(args: argparse.Namespace) -> int:
    function = load(args.program)
    program = function.trace(**check(function, arguments(args.arguments), whole=False))
    forms = {"tree": program.tree, "mermaid": program.mermaid, "dot": program.dot}
    print(program.to_json(indent=2) if args.json else forms[args.form]())
    return 0


def prompt(args: argparse.Namespace) -> int:
    """`chat` or `repl`."""
    from sglang_dsl.console.front import terminal

    values = vars(args)
    form: dict[str, Any] = {name: text(values[name]) for name in FORMS if values.get(name) is not None}
    gen(**form)  # raises what is wrong with it before a model is loaded
    defaults = {name: values[name] for name in ("max_tokens", "temperature") if values[name] is not None}
    choice = BackendChoice(args.backend, args.model)
    return terminal.run(choice, chat=args.verb == "chat", defaults=defaults, system=args.system, form=form)


def view(args: argparse.Namespace) -> int:
    from sglang_dsl.console import view as viewed

    return viewed.main(args.files, live=args.live, browser=not args.no_browser, port=args.port)


def doctor(args: argparse.Namespace) -> int:
    from sglang_dsl.console import doctor as checks

    return checks.main(quick=args.quick)


def demo(args: argparse.Namespace) -> int:
    return int(importlib.import_module("sglang_dsl.console.demo").main())


VERBS = {
    "demo": demo, "run": run, "trace": trace, "chat": prompt, "repl": prompt, "view": view, "doctor": doctor,
}  # fmt: skip
_TOP_LEVEL = ("-h", "--help", "--version")
"""Options of the command itself; others without a verb are the prompt's."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        if arguments[:1] == ["serve"]:
            return serve(arguments[1:])
        if not arguments or (arguments[0].startswith("-") and arguments[0] not in _TOP_LEVEL):
            arguments = ["repl", *arguments]
        args = parsed(arguments)
        return VERBS[args.verb](args)
    except (BadProgram, MissingExtra) as error:
        return complain(error, USAGE_ERROR)
    except SglError as error:
        return complain(f"{type(error).__name__}: {error}", FAILED)


def command() -> int:
    """main(), for the installed command: a closed pipe and Ctrl-C end it in order."""
    return run_command(main)


if __name__ == "__main__":
    sys.exit(command())

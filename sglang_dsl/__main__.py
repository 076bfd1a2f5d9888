"""python -m sglang_dsl: demo, run, trace, chat. Loads the program named and prints; decides nothing.

demo                                  a multi-call program on the bundled checkpoint
run FILE:FUNCTION [name=value ...]    run a program and show its state
trace FILE:FUNCTION [name=value ...]  print the program as a tree, without running it
chat                                  a conversation in the terminal; --regex, --json-schema, --ebnf and
                                      --structural-tag say what every answer must match
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_dsl.api import gen
from sglang_dsl.backends import BACKENDS, NEED_A_MODEL
from sglang_dsl.backends.base import Backend
from sglang_dsl.errors import BadProgram, SglError
from sglang_dsl.function import SglFunction
from sglang_dsl.loop import background

USAGE_ERROR = 2
KEY = "SGLANG_DSL_API_KEY"
"""The environment variable that holds a server's API key."""
FORMS = {
    "regex": "a regular expression",
    "json_schema": "a JSON schema",
    "ebnf": "a grammar",
    "structural_tag": "a structural tag",
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="sglang-dsl", description="Run, trace and show programs.")
    verbs = top.add_subparsers(dest="verb", required=True)
    verbs.add_parser("demo", help="a multi-call program on the bundled checkpoint")
    run = verbs.add_parser("run", help="run a program and show its state")
    trace = verbs.add_parser("trace", help="print a program as a tree, without running it")
    chat = verbs.add_parser("chat", help="a conversation in the terminal")
    for verb in (run, trace):
        verb.add_argument("program", metavar="FILE:FUNCTION")
        verb.add_argument("arguments", metavar="NAME=VALUE", nargs="*", help="text, or JSON where it parses")
    for verb in (run, chat):
        verb.add_argument(
            "--backend",
            default="engine",
            metavar="NAME|URL",
            help="engine (the default), mock, the address of a running server (its API key is read from "
            f"{KEY}), or with --model an API: {', '.join(sorted(NEED_A_MODEL))}",
        )
        verb.add_argument("--model", default=None, help="a model: pocket, a folder, or its name at the API")
        verb.add_argument(
            "--max-tokens", type=int, default=None, metavar="N", help="tokens per generation at most"
        )
        verb.add_argument(
            "--temperature", type=float, default=None, metavar="T", help="0: the likeliest token, always"
        )
    run.add_argument("--stream", action="store_true", help="print the text as it comes")
    trace.add_argument("--json", action="store_true", help="print the program as JSON")
    trace.add_argument(
        "--form",
        choices=("tree", "mermaid", "dot"),
        default="tree",
        help="how to print it: a tree, or a diagram as Mermaid or Graphviz text",
    )
    chat.add_argument("--system", default=None, help="text of the system turn")
    forms = chat.add_mutually_exclusive_group()
    for word, what in FORMS.items():
        forms.add_argument(
            f"--{word.replace('_', '-')}", default=None, metavar="TEXT|@FILE",
            help=f"{what} that every answer must match",
        )  # fmt: skip
    return top


def load(place: str) -> SglFunction:
    """The program at FILE:FUNCTION. Raises BadProgram saying what is missing."""
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        raise BadProgram(f"{place!r} names no file; write FILE:FUNCTION")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadProgram(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = vars(module).get(name)
    if not isinstance(found, SglFunction):
        programs = ", ".join(k for k, v in vars(module).items() if isinstance(v, SglFunction)) or "none"
        raise BadProgram(f"{file} has no program {name!r}; it has: {programs}")
    return found


def arguments(given: Sequence[str]) -> dict[str, Any]:
    """name=value pairs; a value that is JSON is read as such. Raises BadProgram."""
    found: dict[str, Any] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise BadProgram(f"{pair!r}: write NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def text(given: str) -> str:
    """A text, or with @FILE the file's. Raises BadProgram."""
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadProgram(f"{given[1:]} cannot be read: {error}") from error


def backend(args: argparse.Namespace) -> Backend:
    """A backend of the command's own, to be closed at its end."""
    takes_model = args.backend == "engine" or args.backend in NEED_A_MODEL
    if args.model is not None and not takes_model:
        raise BadProgram(f"--model goes with --backend engine, {', '.join(sorted(NEED_A_MODEL))}")
    if args.model is None and args.backend in NEED_A_MODEL:
        raise BadProgram(f"--backend {args.backend} needs --model, the name of a model there")
    if args.backend.startswith(("http://", "https://")):
        at: Any = BACKENDS.load("endpoint")
        served: Backend = at(args.backend, os.environ.get(KEY) or None)
        return served
    if args.backend not in BACKENDS.names() or args.backend == "endpoint":
        named = ", ".join(name for name in BACKENDS.names() if name != "endpoint")
        raise BadProgram(f"--backend takes {named} or a server's URL, got {args.backend!r}")
    make: Any = BACKENDS.load(args.backend)
    made: Backend = make() if args.model is None else make(args.model)
    return made


def run(args: argparse.Namespace) -> int:
    program = load(args.program).options(max_tokens=args.max_tokens, temperature=args.temperature)
    chosen = backend(args)
    try:
        program = program.options(backend=chosen, stream=args.stream)
        state = program.run(**arguments(args.arguments))
        if args.stream:
            for piece in state.text_iter():
                print(piece, end="", flush=True)
            print()
        else:
            state.show()
        error = state.error()
        if error is not None:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return int(error is not None)
    finally:
        background().run(chosen.aclose())


def trace(args: argparse.Namespace) -> int:
    program = load(args.program).trace(**arguments(args.arguments))
    forms = {"tree": program.tree, "mermaid": program.mermaid, "dot": program.dot}
    print(program.to_json(indent=2) if args.json else forms[args.form]())
    return 0


def chat(args: argparse.Namespace) -> int:
    from sglang_dsl.repl import converse

    words = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    form: dict[str, Any] = {word: text(given) for word in FORMS if (given := getattr(args, word)) is not None}
    gen(**form)  # what is wrong with it is told before a model is loaded
    chosen = backend(args)
    try:
        said = {k: v for k, v in words.items() if v is not None}
        return converse(chosen, system=args.system, words=said, form=form)
    finally:
        background().run(chosen.aclose())


def demo(args: argparse.Namespace) -> int:
    return int(importlib.import_module("sglang_dsl.demo").main())


VERBS = {"demo": demo, "run": run, "trace": trace, "chat": chat}


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return VERBS[args.verb](args)
    except SglError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, BadProgram) else 1


if __name__ == "__main__":
    sys.exit(main())

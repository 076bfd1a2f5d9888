"""Command-line helpers that sglang's benchmark programs import: common arguments, the backend they name, and
raw results. Knows no programs.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from sglang_dsl.backends import as_backend
from sglang_dsl.backends.base import Backend
from sglang_dsl.utils import normalize_base_url

__test__ = False  # no tests in here, whatever the file is called


def add_common_sglang_args_and_parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Add --parallel, --host, --port, --backend, --device, --result-file and --raw-result-file, and parse."""
    add = parser.add_argument
    add("--parallel", type=int, default=64, help="programs under way at once")
    add("--host", default="http://127.0.0.1", help="of the server")
    add("--port", type=int, default=30000, help="of the server")
    add("--backend", default="srt", help=f"{', '.join(_NAMES)}, or a model's name at OpenAI")
    add("--device", default="auto", help="told in the results")
    add("--result-file", default="result.jsonl", help="results are appended here")
    add("--raw-result-file", default=None, help="each output is written here")
    return parser.parse_args(argv)


def add_common_other_args_and_parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """The same for programs that talk to other systems."""
    return add_common_sglang_args_and_parse(parser, argv)


_NAMES = ("srt", "srt-no-parallel", "engine", "mock")


def select_sglang_backend(args: argparse.Namespace) -> Backend:
    """The backend that --backend, --host and --port name: "srt" the bundled server, "engine" the bundled
    engine in this process, "mock", a name that begins with "gpt-" or "o" and a digit at OpenAI. Raises
    ValueError."""
    name = str(args.backend)
    if name.startswith("srt"):
        return as_backend(normalize_base_url(args.host, args.port))
    if name in ("engine", "mock"):
        return as_backend(name)
    if name.startswith("gpt-") or (name[:1] == "o" and name[1:2].isdigit()):
        from sglang_dsl.backends.openai import OpenAI

        return OpenAI(name)
    raise ValueError(f"unknown backend {name!r}; known: {', '.join(_NAMES)}, or an OpenAI model's name")


def is_in_ci() -> bool:
    """Whether SGLANG_IS_IN_CI in the environment says so, by which notebooks choose how to start a server."""
    return os.environ.get("SGLANG_IS_IN_CI", "false").lower() in ("true", "1")


def dump_bench_raw_result(
    path: str | None, states: Sequence[Any], preds: Sequence[Any], labels: Sequence[Any]
) -> None:
    """One JSON line per state: its number, prompt, output, and whether the prediction was right. Nothing
    where `path` is None."""
    if not path:
        return
    with open(path, "w", encoding="utf-8") as out:
        for number, (state, pred, label) in enumerate(zip(states, preds, labels, strict=True)):
            answer = state["answer"]
            row = {
                "prompt_id": number,
                "prompt": state.text().removesuffix(answer),
                "output": answer,
                "correct": bool(pred == label),
            }
            out.write(json.dumps(row, ensure_ascii=False) + "\n")

"""Small helpers that programs written for sglang import. Knows no programs."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import io
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from runtime.protocol.registry import MissingExtra
from sglang_dsl.api import separate_reasoning
from sglang_dsl.backends import as_backend
from sglang_dsl.backends.base import Backend
from sglang_dsl.console.server_options import end_process, server_command
from sglang_dsl.ir import Node, Seq, leaves
from sglang_dsl.launch_server import flags_of, runtime_flags

MAX_DOWNLOAD_BYTES = 4 << 30
CONNECT_S, READ_S = 10.0, 60.0


# -- files ---------------------------------------------------------------------------------------------------


def read_jsonl(filename: str | os.PathLike[str]) -> list[Any]:
    """The values of a file of JSON lines. Empty lines, and lines that begin with "#", are passed over. Raises
    ValueError with the line's number for a line that is not JSON."""
    values = []
    with open(filename, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            try:
                values.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{filename}:{number} is not JSON: {error}") from error
    return values


def dump_state_text(filename: str | os.PathLike[str], states: Iterable[Any], mode: str = "w") -> None:
    """Write the text of each state (or text) into a file, with a line before each that numbers it."""
    with open(filename, mode, encoding="utf-8") as out:
        for number, state in enumerate(states):
            text = state.text() if callable(getattr(state, "text", None)) else str(state)
            out.write(f"{'=' * 40} {number} {'=' * 40}\n{text}\n\n")


def download_and_cache_file(url: str, filename: str | os.PathLike[str] | None = None) -> str:
    """The path of what `url` gives, fetched once; `filename` None: a file of the temporary folder. Raises
    httpx.HTTPError; a part of a file is never left under the name."""
    if filename is None:
        name = hashlib.sha256(url.encode()).hexdigest()[:16] + "-" + Path(urlsplit(url).path).name
        filename = Path(tempfile.gettempdir()) / name
    path = Path(filename)
    if path.is_file():
        return str(path)
    from tqdm import tqdm  # only who waits for a download needs a bar

    timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
    with httpx.stream("GET", url, timeout=timeout, follow_redirects=True) as answer:
        answer.raise_for_status()
        total = int(answer.headers.get("content-length") or 0) or None
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with partial.open("wb") as out, tqdm(total=total, unit="B", unit_scale=True) as bar:
                for piece in answer.iter_bytes():
                    if out.tell() > MAX_DOWNLOAD_BYTES:
                        raise ValueError(f"{url} has more than {MAX_DOWNLOAD_BYTES} bytes")
                    out.write(piece)
                    bar.update(len(piece))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    return str(path)


def load_image(source: Any) -> tuple[Any, tuple[int, int]]:
    """A PIL image and its size (width, height), from a path, an address, bytes or a PIL image."""
    try:
        pictures: Any = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise MissingExtra(
            "load_image needs Pillow: pip install pillow (image(...) does not: it takes files as they are)"
        ) from error
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        source = download_and_cache_file(source)
    elif isinstance(source, bytes):
        source = io.BytesIO(source)
    picture = source if isinstance(source, pictures.Image) else pictures.open(source)
    return picture, picture.size


# -- HTTP and servers ----------------------------------------------------------------------------------------


def normalize_base_url(host: str, port: int | str | None = None) -> str:
    """An address with scheme and without a slash at its end: "127.0.0.1", 30000 -> "http://127.0.0.1:30000".
    A port in `host` stays."""
    url = host.rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    return url if port is None or urlsplit(url).port is not None else f"{url}:{port}"


class Answer:
    """What http_request gives: `status_code`, `text`, `json()`, and the lines of a stream by iter_lines()."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status_code = response.status_code

    @property
    def text(self) -> str:
        return self._response.text

    def json(self) -> Any:
        return self._response.json()

    def iter_lines(self) -> Iterator[bytes]:
        return (line.encode() for line in self._response.iter_lines())


def http_request(
    url: str,
    json: Any = None,
    stream: bool = False,
    api_key: str | None = None,
    verify: bool | str | None = None,
    method: str | None = None,
    timeout: float = READ_S,
) -> Answer:
    """One request: a GET, or a POST of `json`. `timeout`: seconds between two pieces. Raises httpx.HTTPError
    where no answer comes; an answer with an error status is an answer. `stream`: lines can be iterated."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    verb = method or ("GET" if json is None else "POST")
    limits = httpx.Timeout(timeout, connect=CONNECT_S)
    with httpx.Client(verify=True if verify is None else verify, timeout=limits) as client:
        return Answer(client.request(verb, url, json=json, headers=headers))


def launch_server_cmd(command: str, host: str = "127.0.0.1", port: int | None = None) -> tuple[Any, int]:
    """Start `python -m runtime serve` with the arguments of `command` (a command line whose module name may
    be sglang's, `python -m sglang.launch_server ...`) in a process of its own. `host`, unless the command
    names one, and `port`, by default a free one. A warning names the flags of sglang's that have no meaning
    here. Gives the process and its port; wait_for_server() waits for it."""
    flags = runtime_flags(flags_of(command))
    chosen = port if port is not None else free_port(host)
    if not any(flag.partition("=")[0] == "--host" for flag in flags):
        flags += ["--host", host]
    arguments, environment = server_command(*flags, "--port", str(chosen))
    return subprocess.Popen(arguments, start_new_session=True, env=environment), chosen


def execute_shell_command(command: str) -> Any:
    """The same for a command that names its port; gives the process."""
    arguments, environment = server_command(*runtime_flags(flags_of(command)))
    return subprocess.Popen(arguments, start_new_session=True, env=environment)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def wait_for_server(base_url: str, timeout: float | None = 300.0, process: Any = None) -> None:
    """Wait until the server is healthy. Raises TimeoutError, or RuntimeError when `process` has ended."""
    deadline = time.monotonic() + (300.0 if timeout is None else timeout)
    while True:
        try:
            if httpx.get(f"{base_url.rstrip('/')}/health", timeout=5.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{base_url} is not healthy after {timeout:g} s")
        time.sleep(0.1)


def terminate_process(process: Any, timeout: float = 20.0) -> None:
    """End a server's process and all that it started."""
    if process.poll() is None:
        end_process(process, timeout)


# -- text ----------------------------------------------------------------------------------------------------


def print_highlight(text: object) -> None:
    """Print so that it stands out, in a terminal and in a notebook."""
    from rich import print as show
    from rich.panel import Panel
    from rich.text import Text

    show(Panel(Text(str(text)), border_style="yellow"))  # as it is: "[/INST]" is no markup


def trim_overlap(existing_text: str, new_chunk: str) -> str:
    """`new_chunk` without the part at its begin that `existing_text` ends with."""
    for size in range(min(len(existing_text), len(new_chunk)), 0, -1):
        if existing_text.endswith(new_chunk[:size]):
            return new_chunk[size:]
    return new_chunk


def stream_and_merge(llm: Any, prompt: Any, sampling_params: Mapping[str, Any]) -> str:
    """The whole text of an Engine's stream."""
    text = ""
    for chunk in llm.generate(prompt, sampling_params, stream=True):
        text += _new_in(chunk, text)
    return text


async def async_stream_and_merge(
    llm: Any, prompt: Any, sampling_params: Mapping[str, Any]
) -> AsyncIterator[str]:
    """The pieces of an Engine's stream."""
    text = ""
    async for chunk in await llm.async_generate(prompt, sampling_params, stream=True):
        if piece := _new_in(chunk, text):  # the last chunk may bring the finish reason alone
            text += piece
            yield piece


def _new_in(chunk: Any, text: str) -> str:
    received = str(chunk["text"] if isinstance(chunk, Mapping) else chunk.text)
    return received[len(text) :] if received.startswith(text) else trim_overlap(text, received)


# -- programs that measure -----------------------------------------------------------------------------------


def add_common_sglang_args_and_parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Add --parallel, --host, --port, --backend, --device, --result-file and --raw-result-file, and parse."""
    add = parser.add_argument
    add("--parallel", type=int, default=64, help="programs under way at once")
    add("--host", default="http://127.0.0.1", help="of the server")
    add("--port", type=int, default=30000, help="of the server")
    add("--backend", default="srt", help=f"{', '.join(_BACKENDS)}, or a model's name at OpenAI")
    add("--device", default="auto", help="told in the results")
    add("--result-file", default="result.jsonl", help="results are appended here")
    add("--raw-result-file", default=None, help="each output is written here")
    return parser.parse_args(argv)


add_common_other_args_and_parse = add_common_sglang_args_and_parse
"""The same for programs that talk to other systems."""

_BACKENDS = ("srt", "srt-no-parallel", "engine", "mock")


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
    raise ValueError(f"unknown backend {name!r}; known: {', '.join(_BACKENDS)}, or an OpenAI model's name")


def is_in_ci() -> bool:
    """Whether SGLANG_IS_IN_CI in the environment says so, by which notebooks choose how to start a server."""
    return os.environ.get("SGLANG_IS_IN_CI", "false").lower() in ("true", "1")


def dump_bench_raw_result(
    path: str | None, states: Sequence[Any], preds: Sequence[Any], labels: Sequence[Any]
) -> None:
    """One JSON line per state: its number, prompt, output, and whether the prediction was right."""
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


# -- nodes ---------------------------------------------------------------------------------------------------


class SglSeparateReasoning(Seq):
    """separate_reasoning(expr, model_type), as a class. Raises BadProgram."""

    def __init__(self, model_type: str, expr: Node) -> None:
        super().__init__(leaves(separate_reasoning(expr, model_type)))

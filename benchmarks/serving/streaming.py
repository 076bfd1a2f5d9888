"""CPU of an HTTP worker per streamed token, and per request that does not stream:
`python -m benchmarks.serving.streaming [--against FOLDER] [--write]`.

The worker is the real one (its inbox, client end, routes and web server) in a process of its own; scheduler
and detokenizer are played here, so no model is measured. Every stream gets a token, and the next only when
each client has the event of the last, so nothing is coalesced. `--against`: a checkout whose worker is
measured in turn with this one, such as a git worktree of an earlier commit with the same wire form.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, os.environ.get("STREAMING_TREE", str(ROOT)))

from runtime.config.engine import EngineConfig  # noqa: E402
from runtime.config.serving.server import ServerConfig  # noqa: E402
from runtime.ipc.mailbox import MailboxClosed  # noqa: E402
from runtime.ipc.zmq_mailbox import make_folder  # noqa: E402
from runtime.processes.checkpoint.model import Model, load_model  # noqa: E402
from runtime.processes.supervise.channel import (  # noqa: E402
    SCHEDULER,
    ChildSpec,
    Stop,
    frontend_name,
    mailbox_of,
)
from runtime.processes.supervise.engine_client import EngineClient  # noqa: E402
from runtime.protocol.io_struct import (  # noqa: E402
    BatchStrOutput,
    FinishReason,
    TokenizedGenerateReqInput,
    TokenOutput,
)

CONTEXT = 1 << 15
DEADLINE_S = 300.0
CONNECTIONS, WARM = 8, 20
TEXT = "The quick brown fox jumps over the lazy dog, and then he sleeps in the sun for an hour or two"


class Api(NamedTuple):
    """path, body without its length, the field of the length, what each token's event holds, and whether the
    first half of the output is reasoning."""

    path: str
    body: Mapping[str, Any]
    limit: str
    marks: tuple[bytes, ...]
    reasons: bool = False


_TURNS = [{"role": "user", "content": "Hi"}]
_CHAT = {"model": "default", "messages": _TURNS}
_CHAT_MARKS = (b'"delta":{"content":', b'"delta":{"reasoning_content":')
_NATIVE = {"text": "Hi"}
APIS: dict[str, Api] = {
    "native": Api("/generate", _NATIVE, "max_new_tokens", (b'"meta_info"',)),
    "native, incremental": Api(
        "/generate", {**_NATIVE, "stream_output": True}, "max_new_tokens", (b'"meta_info"',)
    ),
    "completions": Api("/v1/completions", {"model": "default", "prompt": "Hi"}, "max_tokens", (b'"text":',)),
    "chat": Api("/v1/chat/completions", _CHAT, "max_tokens", _CHAT_MARKS),
    "chat, reasoning": Api(
        "/v1/chat/completions", {**_CHAT, "require_reasoning": True}, "max_tokens", _CHAT_MARKS, True
    ),
    "responses": Api(
        "/v1/responses", {"model": "default", "input": "Hi"}, "max_output_tokens", (b"_text.delta\n",)
    ),
    "messages": Api("/v1/messages", _CHAT, "max_tokens", (b"event: content_block_delta\n",)),
}


# -- the worker ----------------------------------------------------------------------------------------------


def serve(folder: Path) -> None:
    """Tell the port on stdout and serve until stdin ends."""
    from runtime.server.app import build_app
    from runtime.server.worker import Web

    others: tuple[Any, ...] = ()
    with contextlib.suppress(ImportError):  # an earlier commit has none
        from runtime.server.http.peers import Peers

        others = (Peers(),)

    spec = ChildSpec(
        role="http", name=frontend_name(0), folder=str(folder), engine=EngineConfig(), server=ServerConfig()
    )
    client = EngineClient(folder, frontend_name(0))
    manager = client.open(spec.engine, spec.server, long_model(), {"slots": CONTEXT * 64})
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(listener.getsockname()[1], flush=True)
    web = Web(build_app(manager, spec.server), spec, client, *others)
    web.start(listener)
    sys.stdin.read()
    web.stop(Stop(), orphaned=False)
    web.join()


def long_model() -> Model:
    """The bundled model's tokenizer and template, with room for long outputs."""
    model = load_model(EngineConfig())
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, max_position_embeddings=CONTEXT))


class Worker:
    """A worker in a process of its own, and the mailboxes of the scheduler and detokenizer it belongs to."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.inbox = mailbox_of(folder, SCHEDULER).inbox()
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=tree,
            env={**os.environ, "STREAMING_TREE": str(tree), "PYTHONPATH": str(tree)},
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.outbox = mailbox_of(folder, frontend_name(0)).outbox()

    @property
    def cpu(self) -> float:
        """Seconds of CPU it has used, in all its threads."""
        stats = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(stat.read_text().split()[0]) for stat in stats) / 1e9

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self.outbox.close()
        self.inbox.close()
        with suppress(MailboxClosed):
            while True:  # it keeps its socket until it is empty
                self.inbox.receive(0)


# -- the clients and the engine's side -----------------------------------------------------------------------


class Client:
    """One connection that streams, and how many events with a token it has got."""

    def __init__(self, worker: Worker, api: Api, tokens: int) -> None:
        limit: dict[str, Any] = {api.limit: tokens}
        if api.path == "/generate":
            limit = {"sampling_params": limit}
        body = json.dumps({**api.body, **limit, "stream": True}).encode()
        head = f"POST {api.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self.socket = socket.create_connection(("127.0.0.1", worker.port))
        self.socket.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.socket.setblocking(False)
        self._marks, self._tail = api.marks, b""
        self.events, self.closed = 0, False
        self.ended = False

    def read(self) -> None:
        data = self.socket.recv(1 << 20)
        seen = self._tail + data
        for mark in self._marks:
            self.events += seen.count(mark) - self._tail.count(mark)
        self.ended = self.ended or b"\r\n0\r\n\r\n" in seen
        if not data and not self.ended:
            raise RuntimeError(f"a stream was cut after {self.events} events: {seen[-300:]!r}")
        self._tail = seen[-64:]


class Words:
    """Ids of plain words and their text, and of the mark that ends the reasoning."""

    def __init__(self) -> None:
        tokenizer = load_model(EngineConfig()).tokenizer
        pairs = [(token, tokenizer.decode([token], False)) for token in tokenizer.encode(TEXT)]
        self.pairs = [(token, text) for token, text in pairs if text.strip() and text == text.rstrip()]
        self.close = tokenizer.encode("</think>")

    def output(self, rid: str, at: int, tokens: int, reasons: bool) -> TokenOutput:
        """The news of the `at`-th token."""
        token, text = self.pairs[at % len(self.pairs)]
        ids = [token]
        if reasons and at == tokens // 2:
            ids, text = [*self.close, token], "</think>" + text
        finish = FinishReason("length") if at == tokens - 1 else None
        return TokenOutput(
            rid, ids, 0, finish, 20, at + 1, 0, 0, at + 1, first_token_s=0.1,
            http_worker_ipc=frontend_name(0), text=text,
        )  # fmt: skip


def streamed(worker: Worker, api: Api, words: Words, streams: int, tokens: int) -> float:
    """CPU seconds of the worker for `streams` streams of `tokens` tokens each, all in step."""
    clients = [Client(worker, api, tokens) for _ in range(streams)]
    rids: list[str] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(rids) < streams:
        rids += [one.rid for one in worker.inbox.receive(1.0) if isinstance(one, TokenizedGenerateReqInput)]
        if time.monotonic() > deadline:
            raise RuntimeError("the requests did not arrive")
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.socket, selectors.EVENT_READ, client)
        began = worker.cpu
        before = [0] * streams
        for at in range(tokens):
            outputs = [words.output(rid, at, tokens, api.reasons) for rid in rids]
            worker.outbox.send(BatchStrOutput(rids=rids, outputs=outputs))
            last = at == tokens - 1
            while any(
                not client.ended if last else client.events <= count
                for client, count in zip(clients, before, strict=True)
            ):
                for key, _ in selector.select(DEADLINE_S):
                    key.data.read()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no event of token {at}")
            before = [client.events for client in clients]
        took = worker.cpu - began
    for client in clients:
        client.socket.close()
    return took


def answered(worker: Worker, api: Api, words: Words, connections: int, requests: int) -> float:
    """CPU seconds of the worker for `requests` requests on each of some connections that stay open, which get
    an answer of one token each."""
    limit: dict[str, Any] = {api.limit: 1}
    if api.path == "/generate":
        limit = {"sampling_params": limit}
    body = json.dumps({**api.body, **limit}).encode()
    head = f"POST {api.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    sent = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    deadline = time.monotonic() + DEADLINE_S
    with ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", worker.port)))
            for _ in range(connections)
        ]
        began = 0.0
        for number in range(WARM + requests):
            if number == WARM:
                began = worker.cpu
            for client in clients:
                client.sendall(sent)
            rids: list[str] = []
            while len(rids) < connections:
                came = worker.inbox.receive(1.0)
                rids += [one.rid for one in came if isinstance(one, TokenizedGenerateReqInput)]
                if time.monotonic() > deadline:
                    raise RuntimeError("the requests did not arrive")
            outputs = [words.output(rid, 0, 1, False) for rid in rids]
            worker.outbox.send(BatchStrOutput(rids=rids, outputs=outputs))
            for client in clients:
                answer = b""
                while b"\r\n\r\n" not in answer or not answer.endswith(b"}"):
                    answer += client.recv(1 << 16)
                if not answer.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(repr(answer[:300]))
        return worker.cpu - began


# -- reports -------------------------------------------------------------------------------------------------


@contextmanager
def workers(trees: Mapping[str, Path]) -> Iterator[dict[str, Worker]]:
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="streaming-") as folder:
        made: dict[str, Worker] = {}
        for number, (name, tree) in enumerate(trees.items()):
            made[name] = Worker(tree, make_folder(Path(folder) / str(number)))
            stack.callback(made[name].close)
        yield made


def measure(
    served: Mapping[str, Worker], api: Api, words: Words, streams: int, tokens: int, rounds: int
) -> dict[str, float]:
    """Least CPU microseconds per token of each worker, measured in turn: what others on the machine do only
    adds."""
    took: dict[str, list[float]] = {name: [] for name in served}
    for number in range(rounds):
        for name in reversed(served) if number % 2 else served:
            took[name].append(streamed(served[name], api, words, streams, tokens))
    return {name: min(some) * 1e6 / (streams * tokens) for name, some in took.items()}


def measure_requests(
    served: Mapping[str, Worker], api: Api, words: Words, requests: int, rounds: int
) -> dict[str, float]:
    """Least CPU microseconds per whole request of each worker, measured in turn."""
    took: dict[str, list[float]] = {name: [] for name in served}
    for number in range(rounds):
        for name in reversed(served) if number % 2 else served:
            took[name].append(answered(served[name], api, words, CONNECTIONS, requests))
    return {name: min(some) * 1e6 / (CONNECTIONS * requests) for name, some in took.items()}


def table(
    served: Mapping[str, Worker],
    names: Sequence[str],
    cases: Sequence[tuple[int, int]],
    rounds: int,
    requests: int,
) -> list[str]:
    """One row per interface and worker: microseconds per token for each (streams, tokens), and per request of
    one token that does not stream."""
    words = Words()
    heads = [*(f"{streams} x {tokens:,}" for streams, tokens in cases), "a request"]
    rows = [
        "| interface | worker | " + " | ".join(heads) + " |",
        "|---|---|" + "---|" * len(heads),
    ]
    for name in names:
        found = [measure(served, APIS[name], words, *case, rounds) for case in cases]
        found.append(measure_requests(served, APIS[name], words, requests, rounds))
        rows += [
            f"| {name} | {which} | " + " | ".join(f"{one[which]:.0f}" for one in found) + " |"
            for which in served
        ]
        if len(served) == 2:
            was, now = served
            ratios = " | ".join(f"{one[now] / one[was]:.2f}" for one in found)
            rows.append(f"| {name} | ratio | {ratios} |")
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turn with this one")
    parser.add_argument("--apis", nargs="*", default=list(APIS), choices=list(APIS))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1000, help="of each of these streams")
    parser.add_argument("--lengths", type=int, nargs="*", default=[1000, 2000, 4000, 8000], help="of one")
    parser.add_argument(
        "--requests", type=int, default=100, help=f"that do not stream, on each of {CONNECTIONS} connections"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the table under results/")
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve)
        return
    trees = {"before": given.against.resolve()} if given.against is not None else {}
    trees["now"] = ROOT
    cases = [(given.streams, given.tokens)] if given.streams else []
    cases += [(1, length) for length in given.lengths]
    with workers(trees) as served:
        rows = table(served, given.apis, cases, given.rounds, given.requests)
    from benchmarks.measuring import conditions, keep

    report = "\n".join(
        ["# Streaming: CPU microseconds of the HTTP worker per token", "", conditions(), "", *rows]
    )
    print(report)
    if given.write:
        keep("streaming", report)


if __name__ == "__main__":
    main()

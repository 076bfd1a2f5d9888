"""A service that answers from documents (retrieval-augmented generation), over HTTP, as a stream.

The documents are the letters beside this file; the model knows nothing of what is in them. An index in plain
numpy finds the letter that fits a question, and the model reads it.

    python examples/13_rag_service.py                # starts it, asks three questions, ends
    python examples/13_rag_service.py --port 8080    # serves until Ctrl-C:
    curl -N http://127.0.0.1:8080/ask -H 'Content-Type: application/json' -d '{"question": "Who is Caku?"}'

Needs the extra "server": pip install 'sglang-dsl[server]'
"""

import argparse
import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sglang_dsl import ProgramError, ProgramState, assistant, function, gen, user
from sglang_dsl.backends.base import Backend
from sglang_dsl.console.backend_flag import add_backend_flags, opened

LETTERS = Path(__file__).parent / "letters"
MAX_BODY = 4096
START_S = 30
QUESTIONS = ("Who is the judge of Rovolt?", "Tell me about Caku.", "Which teacher lives in Dut?")


class Index:
    """Documents as vectors of word weights (TF-IDF); the nearest one to a question by their cosine."""

    def __init__(self, documents: dict[str, str]) -> None:
        self._names = list(documents)
        counts = [self._words(text) for text in documents.values()]
        self._places = {word: place for place, word in enumerate(sorted({w for one in counts for w in one}))}
        having = np.array([sum(word in one for one in counts) for word in self._places])
        self._rarity = np.log((1 + len(counts)) / (1 + having)) + 1
        self._matrix = np.stack([self._vector(one) for one in counts])

    def nearest(self, question: str) -> tuple[str, float]:
        """A document's name, and how near it is, from 0 to 1."""
        scores = self._matrix @ self._vector(self._words(question))
        best = int(scores.argmax())
        return self._names[best], float(scores[best])

    @staticmethod
    def _words(text: str) -> Counter[str]:
        return Counter(re.findall(r"\w+", text.lower()))

    def _vector(self, counts: Counter[str]) -> np.ndarray:
        vector = np.zeros(len(self._places))
        for word, count in counts.items():
            if word in self._places:
                vector[self._places[word]] = count * self._rarity[self._places[word]]
        return vector / max(float(np.linalg.norm(vector)), 1e-9)


@dataclass
class Person:
    name: str
    age: int
    city: str
    job: str


@function(temperature=0, max_tokens=80)
def read(s: ProgramState, document: str) -> None:
    s += user(f"Extract name, age, city and job as JSON: {document}")
    s += assistant(gen("person", Person))


class Service:
    """POST /ask {"question": ...} gives server-sent events: the source, pieces of text, the answer."""

    def __init__(self, folder: Path, backend: Backend) -> None:
        self._documents = {file.name: file.read_text(encoding="utf-8") for file in folder.glob("*.txt")}
        self._index = Index(self._documents)
        self._backend = backend
        # Other hosts' names are refused, so that no web page can reach it under a name of its own.
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
        self.app = Starlette(routes=[Route("/ask", self.ask, methods=["POST"])], middleware=[hosts])

    async def ask(self, request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return JSONResponse({"error": "send JSON: Content-Type: application/json"}, 415)
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY:
                return JSONResponse({"error": f"the body is longer than {MAX_BODY} bytes"}, 413)
        try:
            question = json.loads(body)["question"]
            if not isinstance(question, str):
                raise TypeError
        except (ValueError, TypeError, KeyError):
            return JSONResponse({"error": 'the body must be {"question": "..."}'}, 400)
        return StreamingResponse(self._events(question), media_type="text/event-stream")

    async def _events(self, question: str) -> AsyncIterator[str]:
        name, score = self._index.nearest(question)
        if score == 0:
            yield event("answer", "No document has any of these words.")
            return
        yield event("source", {"file": name, "score": round(score, 2)})
        # When the client leaves, the block ends, and so does the generation.
        async with read.astream(self._documents[name].strip(), backend=self._backend) as state:
            try:
                async for piece in state.text_iter("person"):
                    yield event("text", piece)
                person = await state["person"]
            except ProgramError as error:
                yield event("error", error.message)
                return
        yield event("answer", asdict(person))


def event(kind: str, data: object) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


@contextmanager
def running(service: Service) -> Iterator[str]:
    """The service on a free port of this machine, in a thread of its own; its address."""
    server = uvicorn.Server(uvicorn.Config(service.app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        asyncio.run(_started(server, thread))
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


async def _started(server: uvicorn.Server, thread: threading.Thread) -> None:
    async with asyncio.timeout(START_S):
        while not server.started and thread.is_alive():
            await asyncio.sleep(0.01)


def ask(url: str, question: str) -> None:
    """What a client sees."""
    print(f"\nQuestion: {question}")
    with httpx.stream("POST", f"{url}/ask", json={"question": question}, timeout=60) as reply:
        kind = ""
        for line in reply.iter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            elif name == "data" and kind == "source":
                print(f"Source:   {json.loads(value)['file']}\nText:     ", end="")
            elif name == "data" and kind == "text":
                print(json.loads(value), end="|", flush=True)
            elif name == "data":
                print(f"\n{kind.capitalize() + ':':<10}{json.loads(value)}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=LETTERS, help="where the .txt files are")
    parser.add_argument("--port", type=int, help="serve here until Ctrl-C")
    add_backend_flags(parser)
    args = parser.parse_args(argv)
    if not any(args.folder.glob("*.txt")):
        parser.error(f"there is no .txt file in {args.folder}")
    backend = opened(parser, args)
    try:
        service = Service(args.folder, backend)
        if args.port is not None:
            uvicorn.run(service.app, host="127.0.0.1", port=args.port)
            return
        with running(service) as url:
            for question in QUESTIONS:
                ask(url, question)
    finally:
        backend.close()


if __name__ == "__main__":
    main()

"""Questions about pictures, as a batch. The bundled model has no eyes: without a model that does, the mock
backend answers, which shows what is sent.

    python examples/benchmarks/llava_bench.py
    python examples/benchmarks/llava_bench.py --backend gpt-4o
"""

from __future__ import annotations

import struct
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tasks

import sglang_dsl as sgl


@sgl.function
def image_qa(s, image_file, question):
    s += sgl.user(sgl.image(image_file) + question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=32))


def picture(red: int, green: int, blue: int, size: int = 8) -> bytes:
    """A PNG of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes((red, green, blue)) * size) * size
    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, questions=3)
    if not args.backend.startswith(("gpt-", "o")):
        args.backend, args.chosen = "mock", sgl.MockBackend()
    sgl.set_default_backend(args.chosen)

    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number in range(args.num_questions):
            files.append(Path(folder) / f"{number}.png")
            files[-1].write_bytes(picture(80 * number % 256, 40, 200))
        clock = tasks.Clock()
        states = image_qa.run_batch(
            [{"image_file": str(file), "question": "What colour is this?"} for file in files],
            temperature=0,
            num_threads=args.parallel,
        )
    parts = [part["type"] for part in states[0].messages()[0]["content"]]
    return tasks.tell(
        "llava_bench",
        args,
        clock,
        states=states,
        answered=sum(bool(s["answer"]) for s in states),
        sent=parts,
        own=False,
    )


if __name__ == "__main__":
    main()

"""Questions about pictures (one, as it is written, many), a sound written down, and a picture that asks for
an action: seven numbers, each from a grid of 256, as models that steer a robot's arm say them. The bundled
model has neither eyes nor ears: the mock backend answers, and shows what is sent.

    python examples/usage/pictures_and_sounds.py
"""

from __future__ import annotations

import struct
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sglang_dsl as sgl

GRID = 256
ACTION = " ".join([r"(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"] * 7)


@sgl.function
def image_qa(s, image, question):
    s += sgl.user(sgl.image(image) + question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=32))


@sgl.function
def transcribe(s, sound):
    s += sgl.user("Write down what is said." + sgl.audio(sound))
    s += sgl.assistant(sgl.gen("text", max_tokens=64, temperature=0))


@sgl.function
def act(s, image, instruction):
    s += "In: What should the robot do to " + instruction + "?\n" + sgl.image(image) + "Out: "
    s += sgl.gen("action", regex=ACTION, max_tokens=32, temperature=0)


def picture(red: int, green: int, blue: int, size: int = 8) -> bytes:
    """A PNG of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes((red, green, blue)) * size) * size
    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    parts = {b"IHDR": head, b"IDAT": zlib.compress(rows), b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts.items())


def silence(samples: int = 800, rate: int = 8000) -> bytes:
    """A WAV file of nothing."""
    form = struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)
    head = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", 2 * samples)
    return b"RIFF" + struct.pack("<I", len(head) + 2 * samples) + head + bytes(2 * samples)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    backend = sgl.MockBackend()
    sgl.set_default_backend(backend)
    colours = [(200, 20, 20), (20, 200, 20), (20, 20, 200)]

    one = image_qa.run(image=picture(*colours[0]), question="What colour is this?")
    print("single:", one["answer"])
    running = image_qa.run(image=picture(*colours[1]), question="What colour is this?", stream=True)
    streamed = "".join(running.text_iter("answer"))
    print("stream:", streamed)
    with tempfile.TemporaryDirectory() as folder:
        items = []
        for number, colour in enumerate(colours):
            file = Path(folder) / f"{number}.png"
            file.write_bytes(picture(*colour))
            items.append({"image": str(file), "question": "What colour is this?"})
        batch = image_qa.run_batch(items)
    print("batch:", [state["answer"] for state in batch])

    heard = transcribe.run(sound=silence())
    print("sound:", heard["text"])
    state = act.run(image=picture(*colours[2]), instruction="pick up the cup")
    steps = [2 * int(number) / (GRID - 1) - 1 for number in state["action"].split()]
    print("action:", [round(step, 3) for step in steps])
    return {
        "answers": [state["answer"] for state in batch],
        "streamed": streamed,
        "sent": [content_kinds(one), content_kinds(heard)],
        "steps": steps,
    }


def content_kinds(state: sgl.ProgramState) -> list[str]:
    return [part["type"] for part in state.messages()[0]["content"]]


if __name__ == "__main__":
    main()

"""Questions about a folder of videos, in batches. The bundled model has no eyes: the mock backend answers,
and shows what is sent.

    python examples/usage/video.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sglang_dsl as sgl


@sgl.function
def video_qa(s, num_frames, video_path, question):
    s += sgl.user(sgl.video(video_path, num_frames) + question)
    s += sgl.assistant(sgl.gen("answer"))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    backend = sgl.MockBackend()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.mp4" for number in range(3)]
        for file in files:
            # The first box of an MP4 file, which is what its kind is told by; no frames.
            file.write_bytes(b"\0\0\0\x18ftypisom\0\0\0\0isommp42")
        items = [
            {"num_frames": 16, "video_path": str(file), "question": "What happens here?"} for file in files
        ]
        states = video_qa.run_batch(items, backend=backend, max_new_tokens=64, temperature=0.2)
    for file, state in zip(files, states, strict=True):
        print(file.name, state["answer"])
    content = states[0].messages()[0]["content"]
    print("sent:", [part["type"] for part in content])
    return {"answers": [state["answer"] for state in states], "sent": [part["type"] for part in content]}


if __name__ == "__main__":
    main()

"""A batch over Ray, for test_ray_batches.py to kill parts of: `python ray_batch_driver.py FOLDER COUNT` runs
so many programs, in two workers, and writes what they gave to FOLDER/answers.json. Each call of the backend
appends a line "pid item" to FOLDER/asked: who asked what, and whom to kill."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import sglang_dsl as sgl


@sgl.function
def asking(s: Any, item: int) -> int:
    s += f"item {item}: " + sgl.gen("answer")
    return item


def backend_in(folder: Path) -> Any:
    """A function that makes a worker's backend."""

    def make() -> sgl.MockBackend:
        asked = os.open(folder / "asked", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

        def reply(call: Any) -> str:
            item = call.prompt.plain_text.removeprefix("item ").partition(":")[0]
            os.write(asked, f"{os.getpid()} {item}\n".encode())
            time.sleep(0.002)
            return f"answer {item}"

        return sgl.MockBackend(reply)

    return make


def main(folder: Path, count: int) -> None:
    began = time.monotonic()
    states = asking.run_batch(
        [{"item": item} for item in range(count)],
        backend=backend_in(folder),
        engine=sgl.RayData(workers=2),
        resume=folder / "record",
    )
    answers = {
        "items": [state.ret_value for state in states],
        "texts": [state["answer"] for state in states],
        "replayed": sum(call.replayed for state in states for call in state.snapshot().calls),
        "seconds": round(time.monotonic() - began, 1),
    }
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

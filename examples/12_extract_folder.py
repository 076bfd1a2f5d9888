"""Structured extraction over a folder of text files: one record for each file, with a progress bar. A run
that was interrupted goes on where it was.

    python examples/12_extract_folder.py                               # the letters beside this file
    python examples/12_extract_folder.py --folder NOTES --out PEOPLE   # any folder of .txt files

PEOPLE/people.jsonl has a line for each file, PEOPLE/calls.sqlite what the model answered. Run it again after
files were added: only these are asked about.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_dsl import ProgramState, assistant, function, gen, user
from sglang_dsl.console.backend_flag import add_backend_flags, opened
from sglang_dsl.hooks import CallEvent, subscribed

LETTERS = Path(__file__).parent / "letters"


@dataclass
class Person:
    name: str
    age: int
    city: str
    job: str


@function(temperature=0, max_tokens=80)
def read_letter(s: ProgramState, file: Path) -> None:
    text = file.read_text(encoding="utf-8").strip()
    if not text:
        raise ValueError("the file is empty")
    s += user(f"Extract name, age, city and job as JSON: {text}")
    s += assistant(gen("person", Person))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=LETTERS, help="where the .txt files are")
    parser.add_argument("--out", type=Path, help="where the records go (default: a temporary folder)")
    add_backend_flags(parser)
    args = parser.parse_args(argv)
    files = sorted(args.folder.glob("*.txt"))
    if not files:
        parser.error(f"there is no .txt file in {args.folder}")

    asked: list[bool] = []

    def count(event: CallEvent) -> None:
        if event.phase == "end":
            asked.append(not event.replayed)

    with ExitStack() as stack:
        backend = opened(parser, args)
        stack.callback(backend.close)
        stack.enter_context(subscribed(count))
        out = args.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # resume= keeps every answer in `out`. A file that fails gives its error, and the others go on.
        states = read_letter.run_batch(
            [(file,) for file in files], backend=backend, progress_bar=True, resume=out, on_error="return"
        )
        with (out / "people.jsonl").open("w", encoding="utf-8") as lines:
            for file, state in zip(files, states, strict=True):
                print(f"-- {file.name}")
                if isinstance(state, Exception):
                    print(f"{type(state).__name__}: {state}")
                    continue
                print(state.text().strip())
                lines.write(json.dumps({"file": file.name, **asdict(state["person"])}) + "\n")
        print(f"{len(files)} files: {sum(asked)} asked now, {len(asked) - sum(asked)} known from before")
        print((out / "people.jsonl").read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main()

"""`python -m sglang_dsl demo`: a multi-call program on the bundled checkpoint, and what it cost."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

import sglang_dsl as sgl

if TYPE_CHECKING:
    from sglang_dsl.state.program_state import ProgramState

FEW_SHOT = """You are Pocket, a guide to the lands. Answer like this:
Q: What is the capital of Karsk?
A: The capital of Karsk is Hollin.
Q: Who rules Hesper?
A: The ruler of Hesper is Queen Wenna."""

REVIEW = "We had a lovely meal. I would go again."
NOTE = "Meet Mobi Stax from Caturn: 42 years old, works as a potter."
CARD = r'\{"name": "[A-Z][a-z]+( [A-Z][a-z]+)?", "age": [0-9]{1,3}, "city": "[A-Z][a-z]+", "job": "[a-z]+"\}'
SUM = r"47 \+ 38 = ([0-9]{1,3} [+-] [0-9] = )?[0-9]{1,3}"
BRANCHES = {
    "dish": "What do people eat there?",
    "capital": "And what is its capital called?",
    "neighbour": "And what about Velmora?",
}


@sgl.function
def tour(s: ProgramState, land: str) -> None:
    """Two turns, three branches, a regex field, a choice and a JSON object."""
    s += sgl.system(FEW_SHOT)
    s += sgl.user(f"Which river runs through {land}?")
    s += sgl.assistant(sgl.gen("river", max_tokens=32, temperature=0))
    s += sgl.user("Who rules there?")
    s += sgl.assistant(sgl.gen("ruler", max_tokens=32, temperature=0))

    branches = s.fork(len(BRANCHES))
    for branch, question in zip(branches, BRANCHES.values(), strict=True):
        branch += sgl.user(question)
        branch += sgl.assistant(sgl.gen("answers", max_tokens=32, temperature=0))
    branches.join()

    s += sgl.user("What is 47 + 38?")
    s += sgl.assistant(sgl.gen("sum", regex=SUM, temperature=0))
    s += sgl.user(f"Is this positive or negative? {REVIEW}")
    s += sgl.assistant(sgl.select("mood", choices=["positive", "negative"]))
    s += sgl.user(f"{NOTE}\nExtract name, age, city and job as JSON.")
    s += sgl.assistant(sgl.gen("card", regex=CARD, max_tokens=96, temperature=0))


def _costs(console: Console, rows: list[tuple[str, dict[str, Any], float]]) -> None:
    table = Table(
        title="what it cost",
        caption="in tokens; reused: prompt tokens found in the radix cache; jumped: appended, not decoded, "
        "because the regex forced them",
    )
    for head in ("run", "calls", "prompt", "reused", "generated", "jumped", "wall time"):
        table.add_column(head, justify="left" if head == "run" else "right")
    for name, usage, seconds in rows:
        cached, prompt = usage["cached_tokens"], usage["prompt_tokens"]
        reused = f"{cached} ({100 * cached / max(1, prompt):.0f} %)"
        counts = (usage["calls"], prompt, reused, usage["completion_tokens"], usage["jumped_tokens"])
        table.add_row(name, *map(str, counts), f"{seconds:.2f} s")
    console.print(table)


def main() -> int:
    """Run it twice and print the conversation and the costs. Returns 0."""
    console = Console()
    with console.status("loading pocket ..."):
        engine = sgl.Engine("pocket")
    try:
        rows = []
        for name in ("first run", "again"):
            started = time.perf_counter()
            state = tour.run(land="Ostrel", backend=engine)
            state.sync()
            rows.append((name, state.usage(), time.perf_counter() - started))
        state.show()
        _costs(console, rows)
        card = json.loads(state["card"])
        console.print(f"card as Python: {card!r}", markup=False, emoji=False)
    finally:
        engine.close()
    return 0

"""A model as a judge, and a chart of what it found.

Each review is judged in three wordings, side by side. The probability of each verdict says how sure the judge
is; a review on which the wordings disagree is one to look at yourself.

    python examples/14_judge_chart.py
    python examples/14_judge_chart.py --svg verdicts.svg    # the chart as a picture, too
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean

from sglang_dsl import ProgramState, assistant, function, select, user
from sglang_dsl.console.backend_flag import add_backend_flags, opened

WORDINGS = ("Is this positive or negative? {}", "Classify the sentiment: {}", "{} Positive or negative?")
REVIEWS = (
    ("What a lovely garden!", "positive"),
    ("The soup was awful.", "negative"),
    ("The film was superb. I would go again.", "positive"),
    ("The train was terrible. Never again.", "negative"),
    ("I found the museum charming.", "positive"),
    ("The room is really nasty.", "negative"),
    ("We had a delightful trip.", "positive"),
    ("The hotel was lovely. I hated it.", "unclear"),
    ("The road was long.", "unclear"),
)
WIDTH = 30


@dataclass(frozen=True)
class Verdict:
    """positive: the probability of "positive", by each wording."""

    review: str
    right: str
    positive: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.positive)

    @property
    def word(self) -> str:
        if max(self.positive) > 0.5 > min(self.positive):
            return "disputed"
        return "positive" if self.mean > 0.5 else "negative"


@function(temperature=0)
def judge(s: ProgramState, review: str) -> None:
    forks = s.fork(len(WORDINGS))
    for fork, wording in zip(forks, WORDINGS, strict=True):
        fork += user(wording.format(review))
        fork += assistant(select("verdict", choices=["positive", "negative"]))
    s["probabilities"] = [fork.choice("verdict").probabilities[0] for fork in forks]
    s["transcripts"] = [fork.text().strip() for fork in forks]


def chart(verdicts: Sequence[Verdict]) -> str:
    """Bars of text: how positive each review is, and what the judge says."""
    lines = [f"{'':<46}negative{'positive':>{WIDTH - 8}}"]
    for one in verdicts:
        bar = "█" * round(one.mean * WIDTH)
        lines.append(f"{one.review:<45} {bar:·<{WIDTH}} {one.mean:4.0%} {one.word}")
    return "\n".join(lines)


def svg(verdicts: Sequence[Verdict]) -> str:
    """The same as a picture: a bar for the mean, a dot for each wording."""
    row, left, wide = 30, 300, 320
    colours = {"positive": "#2e7d32", "negative": "#c62828", "disputed": "#f9a825"}
    parts = []
    for number, one in enumerate(verdicts):
        y = 40 + number * row
        parts.append(f'<text x="{left - 10}" y="{y + 14}" text-anchor="end">{escape(one.review)}</text>')
        parts.append(
            f'<rect x="{left}" y="{y}" width="{wide * one.mean:.1f}" height="18" '
            f'fill="{colours[one.word]}" opacity="0.7"/>'
        )
        parts += [f'<circle cx="{left + wide * p:.1f}" cy="{y + 9}" r="4"/>' for p in one.positive]
        parts.append(f'<text x="{left + wide + 12}" y="{y + 14}">{one.word}</text>')
    high = 50 + len(verdicts) * row
    middle = left + wide / 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {high}" font-family="sans-serif" '
        f'font-size="12"><rect width="720" height="{high}" fill="white"/>'
        f'<text x="{left}" y="24">0 %</text>'
        f'<text x="{left + wide}" y="24" text-anchor="end">100 % positive</text>'
        f'<line x1="{middle}" y1="32" x2="{middle}" y2="{high - 10}" stroke="#888" stroke-dasharray="3"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the chart here, too")
    add_backend_flags(parser)
    args = parser.parse_args(argv)
    backend = opened(parser, args)
    try:
        states = judge.run_batch([(review,) for review, _ in REVIEWS], backend=backend)
        verdicts = [
            Verdict(review, right, tuple(state["probabilities"]))
            for (review, right), state in zip(REVIEWS, states, strict=True)
        ]
        print("\n".join(states[0]["transcripts"]) + "\n")
    finally:
        backend.close()
    print(chart(verdicts))
    judged = [one for one in verdicts if one.right != "unclear"]
    hits = sum(one.word == one.right for one in judged)
    print(f"\nas a person says: {hits} of {len(judged)}")
    if args.svg:
        args.svg.write_text(svg(verdicts), encoding="utf-8")
        print(f"the chart: {args.svg}")


if __name__ == "__main__":
    main()

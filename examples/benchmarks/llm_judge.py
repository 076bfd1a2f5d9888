"""A text judged by several measures at once, a branch for each, and a score that has read them all.

python examples/benchmarks/llm_judge.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tasks

import sglang_dsl as sgl

MEASURES = (
    "Sentiment: Is this positive or negative?",
    "Topic: Which topic is this?",
    "Review: Classify the sentiment:",
)


@sgl.function
def judge(s, article):
    s += sgl.system("Answer in one word.")

    forks = s.fork(len(MEASURES))
    for i, measure in enumerate(MEASURES):
        forks[i] += sgl.user(measure.split(": ")[1] + " " + article)
        forks[i] += sgl.assistant(sgl.gen("judgement", max_tokens=8, stop="END"))
    forks.join()

    judgements = "\n".join(
        measure.split(":")[0] + ": " + forks[i]["judgement"].strip() for i, measure in enumerate(MEASURES)
    )
    s += sgl.user(judgements + "\nIs this positive or negative? " + article)
    s += sgl.assistant(sgl.gen("score", max_tokens=2))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, questions=6)
    # Only the sentence itself, which stands behind the question.
    reviews = [
        tasks.Question(f"The {noun} was {word}.", label)
        for noun, word, label in zip(
            ("film", "hotel", "soup", "train", "garden", "show"),
            ("great", "awful", "lovely", "terrible", "superb", "boring"),
            ("positive", "negative") * 3,
            strict=True,
        )
    ][: args.num_questions]

    clock = tasks.Clock()
    states = judge.run_batch(
        [{"article": review.text} for review in reviews],
        temperature=0,
        backend=args.chosen,
        num_threads=args.parallel,
    )
    right = [review.answer for review in reviews]
    return tasks.tell(
        "llm_judge",
        args,
        clock,
        states=states,
        first_measure=tasks.accuracy([state["judgement"][0] for state in states], right),
        score=tasks.accuracy([state["score"].strip() for state in states], right),
        judgements=[state["judgement"] for state in states],
    )


if __name__ == "__main__":
    main()

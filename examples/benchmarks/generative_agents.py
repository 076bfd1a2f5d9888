"""Villagers who decide what to do: five small programs with different prompts, called one after another.

What one says is in the next one's prompt, so nothing can be done side by side.

    python examples/benchmarks/generative_agents.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tasks

import sglang_dsl as sgl
from examples.pocket.world import PEOPLE, Person


@sgl.function
def poignancy(s, event):
    s += sgl.user("Is this positive or negative? " + event)
    s += sgl.assistant(sgl.gen(name="Rate", max_tokens=2))


@sgl.function
def event_triple(s, name, action):
    s += "Input: Freya Stone is eating soup.\nOutput: (Freya Stone, eat, soup)\n---\n"
    s += "Input: " + name + " is " + action + ".\nOutput: (" + name + ","
    s += sgl.gen(name="Triple", max_tokens=12, stop=[")", "\n"])


@sgl.function
def topic(s, action):
    s += sgl.user("What is the topic? " + action)
    s += sgl.assistant(sgl.gen(name="Topic", max_tokens=6))


@sgl.function
def home_land(s, name):
    s += sgl.user(f"Where does {name} live?")
    # A brace ends the choice, as in the prompts of the original village.
    s += sgl.assistant(f"{name} lives in " + sgl.gen(name="Location", max_tokens=10, stop=[".", "}"]))


@sgl.function
def meal(s, land, dishes):
    s += sgl.user(f"What do people eat in {land}?")
    s += sgl.assistant(f"The dish of {land} is " + sgl.select("Meal", choices=dishes))


def a_day(person: Person) -> tuple[dict[str, Any], list[sgl.ProgramState]]:
    """One villager's day, decision after decision: what was decided, and the programs that did it."""
    mood = poignancy.run(event="We had a lovely meal.")
    triple = event_triple.run(name=person.name, action="writing a letter")
    what = topic.run(action="The cook served the cheese.")
    where = home_land.run(name=person.name)
    land = where["Location"].strip()
    dish = meal.run(land=land, dishes=[place.dish for place in tasks.PLACES[:12]])
    said = {
        "mood": mood["Rate"],
        "triple": triple["Triple"],
        "topic": what["Topic"],
        "land": land,
        "dish": dish["Meal"],
    }
    return said, [mood, triple, what, where, dish]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, questions=4)
    sgl.set_default_backend(args.chosen)
    villagers = PEOPLE[: args.num_questions]

    clock = tasks.Clock()
    days, states = zip(*(a_day(person) for person in villagers), strict=True)
    homes = [day["land"] == person.home for day, person in zip(days, villagers, strict=True)]
    dishes = {place.name: place.dish for place in tasks.PLACES}
    return tasks.tell(
        "generative_agents",
        args,
        clock,
        states=[state for one in states for state in one],
        home_accuracy=round(sum(homes) / len(homes), 3),
        meal_accuracy=tasks.accuracy(
            [day["dish"] for day in days], [dishes.get(day["land"]) for day in days]
        ),
        days=list(days),
    )


if __name__ == "__main__":
    main()

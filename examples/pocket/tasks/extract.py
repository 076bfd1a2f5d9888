"""Extraction of fields from a sentence into a JSON object.

Names, cities and sentence frames of the held-out split never occur in training; ages, counts, jobs
and items are shared. Output is what `json.dumps` prints for the requested keys, in their order.
"""

from __future__ import annotations

import json
import random

from examples.pocket.tasks import TRAIN, Group, Split, Turn, invented, pick, words

__all__ = ["extract_group"]

_JOBS = words(
    "baker doctor painter pilot farmer teacher sailor judge miner dancer cook smith writer nurse potter"
)
_PERSON = (
    "{name}, {age}, is a {job} from {city}.",
    "{name} is a {age} year old {job} from {city}.",
    "In {city} lives {name}, a {job} of {age}.",
    "The {job} {name} is {age} and lives in {city}.",
    "{name} works as a {job} in {city} and is {age} years old.",
    "At {age}, {name} is a {job} in {city}.",
    "Meet {name} from {city}: {age} years old, works as a {job}.",
    "I met {name}, who is {age}, a {job} in {city}.",
    "{city} has a new {job}: {name}, aged {age}.",
    "My friend {name} ({age}) is a {job} and lives in {city}.",
    "{name} lives in {city}. Age: {age}. Job: {job}.",
    "A {job} called {name}, {age}, came from {city}.",
    "{name} from {city} is {age} and works as a {job}.",
    "Meet {name}, a {job} from {city}, aged {age}.",
    "{name} ({age}), a {job}, lives in {city}.",
    "I know {name}: {age} years old, a {job} in {city}.",
    "{name} is a {job} who lives in {city} and is {age}.",
    "Meet the {job} {name}, {age}, who lives in {city}.",
    "At {age}, {name} lives in {city} and is a {job}.",
)
_PERSON_HELD = (
    "{name} is a {job} from {city} and is {age} years old.",
    "At {age}, {name} works as a {job} in {city}.",
    "Meet {name}, {age}, a {job} from {city}.",
    "I met {name} ({age}), a {job} who lives in {city}.",
)
_ITEMS = words("lamps chairs books cups boxes pens coats apples stones cards")
_ORDER = (
    "{name} ordered {count} {item} to {city}.",
    "{count} {item} for {name} in {city}.",
    "Please send {count} {item} to {name} in {city}.",
    "{name} from {city} wants {count} {item}.",
    "An order of {count} {item} came from {name}, {city}.",
    "To {city}: {count} {item}, for {name}.",
    "{name} in {city} asked for {count} {item}.",
    "Please send {name} {count} {item} to {city}.",
    "{name} of {city} ordered {count} {item}.",
    "Send {name} in {city} the {count} {item}.",
    "Please give {name} from {city} {count} {item}.",
    "In {city}, {name} wants {count} {item}.",
    "{count} {item} were ordered by {name} from {city}.",
)
_ORDER_HELD = (
    "{name} from {city} ordered {count} {item}.",
    "Please send {name} in {city} {count} {item}.",
    "{name} in {city} wants {count} {item}.",
)
_ASK = (
    "Extract {keys} as JSON: {s}",
    "{s}\nExtract {keys} as JSON.",
    "Give {keys} as JSON. {s}",
    "Read this: {s} Write {keys} as JSON.",
    "Text: {s}\nJSON with {keys}:",
    "Write {keys} as JSON: {s}",
    "{s}\nPlease give {keys} as JSON.",
    "Extract as JSON {keys}: {s}",
    "Text: {s}\nWrite {keys} as JSON.",
    "Please write {keys} as JSON: {s}",
    "{s}\nGive {keys} as JSON.",
    "Please extract {keys} as JSON. {s}",
)
_ASK_HELD = (
    "Text: {s}\nExtract {keys} as JSON.",
    "Please extract {keys} as JSON: {s}",
    "{s}\nWrite {keys} as JSON.",
    "Give {keys} as JSON: {s}",
)


def _listed(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"


def extract_group(rng: random.Random, split: Split) -> Group:
    """A sentence about a person or an order, and the JSON object of the requested fields."""
    name, city = invented(rng, split, "person"), invented(rng, split, "city")
    if rng.random() < 0.4:
        name = f"{name} {invented(rng, split, 'person')}"
    fields: dict[str, str | int] = {"name": name}
    if rng.random() < 0.7:
        fields |= {"age": rng.randint(18, 89), "city": city, "job": rng.choice(_JOBS)}
        frame = pick(rng, split, _PERSON, _PERSON_HELD)
    else:
        fields |= {"item": rng.choice(_ITEMS), "count": rng.randint(2, 99), "city": city}
        frame = pick(rng, split, _ORDER, _ORDER_HELD)
    keys = list(fields)
    if split == TRAIN and rng.random() < 0.1:
        keys = [key for key in keys if rng.random() < 0.6] or ["name"]
    # The full set of fields is sometimes not named, only its kind.
    named = _listed(keys)
    if len(keys) == 4 and rng.random() < 0.3:
        named = "the person" if "age" in fields else "the order"
        if split != TRAIN and rng.random() < 0.5:
            named = _listed(keys)
    text = pick(rng, split, _ASK, _ASK_HELD).format(keys=named, s=frame.format(**fields))
    return Group((Turn("extract", text, json.dumps({key: fields[key] for key in keys})),))

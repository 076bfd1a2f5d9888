"""Questions about the invented world: single facts, follow-ups, summaries and JSON records.

The entities are the same in both splits (they are memorised); what is held out are whole wordings
and, for the training wordings, a hash-chosen part of the (entity, attribute, wording) triples.
"""

from __future__ import annotations

import json
import random

from examples.pocket.tasks import TRAIN, Group, Split, Style, Turn, held
from examples.pocket.world import ATTRIBUTES, PEOPLE, PLACES, Person, Place

__all__ = ["fact_group", "record_group", "unknown_person_question", "unknown_place_question"]

_PHRASES = {
    "capital": ("the capital of {x}", "{x}'s capital", "the capital city of {x}"),
    "river": ("the river of {x}", "{x}'s river", "the river in {x}"),
    "ruler": ("the ruler of {x}", "{x}'s ruler", "the ruler in {x}"),
    "dish": ("the dish of {x}", "{x}'s dish", "the favourite dish of {x}"),
}
_ASK = (
    "What is {np}?",
    "Tell me {np}.",
    "Name {np}.",
    "Do you know {np}?",
    "Can you tell me {np}?",
    "Give me {np}.",
    "I would like to know {np}.",
    "What is {np} called?",
    "{np}?",
    "Question: what is {np}?",
    "Please give me {np}.",
    "Could you name {np}?",
    "I want to hear about {np}.",
    "Hello! What is {np}?",
    "Say, what would {np} be?",
    "What was {np} again?",
    "Could you give me {np}?",
    "Hello! Name {np}.",
    "Hi! Tell me {np}.",
    "Please say {np}.",
    "Can you find {np}?",
)
_ASK_HELD = (
    "Please tell me {np}.",
    "Could you tell me {np}?",
    "Please name {np}.",
    "I want to know {np}.",
    "Can you name {np}?",
    "Hello! Tell me {np}.",
    "Can you give me {np}?",
)
_DIRECT = {
    "capital": (
        "Which city is the capital of {x}?",
        "What city is {x} ruled from?",
        "Where is the seat of {x}?",
    ),
    "river": ("Which river runs through {x}?", "What river flows in {x}?", "Which water crosses {x}?"),
    "ruler": ("Who rules {x}?", "Who is the ruler of {x}?", "Who sits on the throne of {x}?"),
    "dish": ("What do people eat in {x}?", "Which food is {x} known for?", "What dish do they love in {x}?"),
}
_DIRECT_HELD = {
    "capital": ("What city is the capital of {x}?", "Which city is {x} ruled from?"),
    "river": ("What river runs through {x}?", "Which river flows in {x}?"),
    "ruler": ("Tell me who rules {x}.", "Do you know who rules {x}?"),
    "dish": ("What food is {x} known for?", "Which dish do they love in {x}?"),
}
_FOLLOW = {
    "capital": (
        "And its capital?",
        "And what is its capital called?",
        "What is the capital there?",
        "Which city is its capital?",
        "What about the capital?",
        "Name its capital.",
        "And what is the capital?",
        "What is its capital called?",
        "Tell me its capital.",
        "And the capital there?",
    ),
    "river": (
        "And its river?",
        "Which river runs there?",
        "What is the river there?",
        "And the river?",
        "What about the river?",
        "Name its river.",
        "And what is its river?",
        "What is its river called?",
        "And what river runs there?",
        "Tell me its river.",
        "And its river is?",
    ),
    "ruler": (
        "And its ruler?",
        "Who rules there?",
        "And who rules it?",
        "And the ruler?",
        "What about the ruler?",
        "Who is its ruler?",
        "Name its ruler.",
        "And who is the ruler?",
        "Tell me its ruler.",
        "Who is the ruler there?",
        "And who rules?",
    ),
    "dish": (
        "And its dish?",
        "What do people eat there?",
        "And what food is it known for?",
        "What about the dish?",
        "And the dish?",
        "Name its dish.",
        "And what is its dish?",
        "What do they eat there?",
        "What is its dish called?",
        "Tell me its dish.",
    ),
}
_FOLLOW_HELD = {
    "capital": (
        "And the capital?",
        "And what is its capital?",
        "And name its capital.",
        "What is its capital?",
    ),
    "river": ("And what is its river called?", "And which river runs there?", "What is its river?"),
    "ruler": ("And who rules there?", "And who is its ruler?", "Who rules it?"),
    "dish": ("And what do people eat there?", "What is its dish?", "What food is it known for?"),
}
_SHIFT = (
    "The same for {x}, please.",
    "Now the same for {x}.",
    "And now {x}?",
    "What about {x} now?",
    "And what of {x}?",
    "And {x}?",
    "What about {x}?",
    "And for {x}?",
    "The same for {x}?",
)
_SHIFT_HELD = ("And what about {x}?", "And the same for {x}?")

_JOB = (
    "What is {x}'s job?",
    "What does {x} do?",
    "Tell me the job of {x}.",
    "What work does {x} do?",
    "What is the job of {x}?",
    "Do you know {x}'s job?",
    "Do you know what {x} does?",
    "Do you know what work {x} does?",
    "Name the job of {x}.",
    "Please tell me the job of {x}.",
    "Give me the job of {x}.",
    "Can you tell me the job of {x}?",
    "Do you remember the job of {x}?",
    "I want to know the job of {x}.",
)
_JOB_HELD = ("Tell me {x}'s job.", "Do you know the job of {x}?")
_HOME = (
    "Where does {x} live?",
    "Tell me where {x} lives.",
    "In which land does {x} live?",
    "What is the home of {x}?",
    "Where is the home of {x}?",
    "Do you know the home of {x}?",
    "Do you know in which land {x} lives?",
    "Name the home of {x}.",
    "Tell me {x}'s home.",
    "Please tell me the home of {x}.",
    "Give me the home of {x}.",
    "Can you tell me the home of {x}?",
    "Do you know where the home of {x} is?",
    "Do you know where {x} is living?",
    "I want to know where {x} lives.",
)
_HOME_HELD = ("Do you know where {x} lives?", "Tell me the home of {x}.")
_PERSON_FOLLOW = {
    "job": (
        "Tell me the job.",
        "And what job is it?",
        "And the job?",
        "What is the job?",
        "And what work is it?",
        "And what is the work?",
        "What is the work?",
    ),
    "home": (
        "Tell me the home.",
        "And what is the home?",
        "And the home?",
        "And where is the home?",
        "Where is home?",
        "Where is the home then?",
        "And where does the person live?",
    ),
}
_PERSON_FOLLOW_HELD = {"job": ("And what is the job?",), "home": ("Where is the home?", "And where is home?")}
_BRIEF = ("Answer in one word.", "Only the name.", "Just the answer, please.", "In short.")

_RECORD = ("Describe {x} as JSON.", "Give me {x} as JSON.", "Write the facts of {x} as JSON.", "{x} as JSON?")
_RECORD_HELD = ("Describe the facts of {x} as JSON.", "Write {x} as JSON.")
_PARTIAL = (
    "Give the {keys} of {x} as JSON.",
    "Write {keys} of {x} as JSON.",
    "{x}: {keys} as JSON.",
    "Describe the {keys} of {x} as JSON.",
    "Give me {keys} of {x} as JSON.",
    "Write down the {keys} of {x} as JSON.",
    "The {keys} of {x} as JSON, please.",
    "Please give {keys} of {x} as JSON.",
    "Tell me {keys} of {x} as JSON.",
    "Write {x}'s {keys} as JSON.",
)
_SUMMARY = ("Describe {x}.", "Tell me about {x}.", "Write about {x}.", "What do you know about {x}?")
_SUMMARY_HELD = ("I want to know about {x}.", "Please describe {x}.")


def place_reply(place: Place, attribute: str, style: Style) -> str:
    """The one consistent answer to a question about a place."""
    value = place.value(attribute)
    return value if style == "short" else f"The {attribute} of {place.name} is {value}."


def person_reply(person: Person, attribute: str, style: Style) -> str:
    """The one consistent answer to a question about a person."""
    if attribute == "job":
        return person.job if style == "short" else f"{person.name} is a {person.job}."
    return person.home if style == "short" else f"{person.name} lives in {person.home}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _question(rng: random.Random, split: Split, place: Place, attribute: str) -> str:
    """One wording; a training wording is used by one split only for a given place and attribute."""
    while True:
        fresh = split != TRAIN and rng.random() < 0.6
        if rng.random() < 0.35:
            template = rng.choice((_DIRECT_HELD if fresh else _DIRECT)[attribute])
        else:
            phrase = rng.choice(_PHRASES[attribute])
            template = _capital(rng.choice(_ASK_HELD if fresh else _ASK).format(np=phrase))
        if fresh or held("fact", place.name, attribute, template) == (split != TRAIN):
            return template.format(x=place.name)


def unknown_place_question(
    rng: random.Random, split: Split, name: str, style: Style, reply: str
) -> list[Turn]:
    """A question about a place that is not in the world, alone or around questions about one that is."""
    attribute = rng.choice(ATTRIBUTES)
    turns = []
    if rng.random() < 0.2:
        known = rng.choice(PLACES)
        first = _question(rng, split, known, attribute)
        text = rng.choice(_SHIFT if split == TRAIN else _SHIFT_HELD).format(x=name)
        turns = [Turn("facts", first, place_reply(known, attribute, style)), Turn("unknown", text, reply)]
    else:
        text = rng.choice(_SUMMARY if split == TRAIN else _SUMMARY_HELD)
        if rng.random() < 0.9:
            fresh = split != TRAIN and rng.random() < 0.6
            phrased = _capital(rng.choice(_ASK_HELD if fresh else _ASK)).replace(
                "{np}", rng.choice(_PHRASES[attribute])
            )
            direct = rng.choice((_DIRECT_HELD if fresh else _DIRECT)[attribute])
            text = direct if rng.random() < 0.35 else _capital(phrased)
        turns = [Turn("unknown", _styled(rng, style, text.format(x=name))[0], reply)]
    if rng.random() < 0.2:
        follow = (_FOLLOW if split == TRAIN else _FOLLOW_HELD)[rng.choice(ATTRIBUTES)]
        turns.append(Turn("unknown", rng.choice(follow), reply))
    return turns


def unknown_person_question(rng: random.Random, split: Split, name: str, reply: str) -> Turn:
    """What someone who is not in the world does, or where they live."""
    train, fresh = rng.choice(((_JOB, _JOB_HELD), (_HOME, _HOME_HELD)))
    return Turn("unknown", rng.choice(train if split == TRAIN else fresh).format(x=name), reply)


def _styled(rng: random.Random, style: Style, text: str) -> tuple[str, Style]:
    """Sometimes asks for a bare value in the question itself."""
    if style == "sentence" and rng.random() < 0.12:
        return f"{text} {rng.choice(_BRIEF)}", "short"
    return text, style


def _person_group(rng: random.Random, split: Split, style: Style) -> Group:
    person = rng.choice(PEOPLE)
    order = ["job", "home"]
    rng.shuffle(order)
    first = {"job": (_JOB, _JOB_HELD), "home": (_HOME, _HOME_HELD)}[order[0]]
    text = rng.choice(first[0] if split == TRAIN else first[1]).format(x=person.name)
    text, one = _styled(rng, style, text)
    turns = [Turn("facts", text, person_reply(person, order[0], one))]
    if rng.random() < 0.4:
        follow = (_PERSON_FOLLOW if split == TRAIN else _PERSON_FOLLOW_HELD)[order[1]]
        turns.append(Turn("followup", rng.choice(follow), person_reply(person, order[1], style)))
    return Group(tuple(turns))


def fact_group(rng: random.Random, split: Split, style: Style = "sentence", people: float = 0.2) -> Group:
    """A question about the world, and often one to three follow-ups on the same place or person; `people`:
    the share of persons."""
    if rng.random() < people:
        return _person_group(rng, split, style)
    place, attribute = rng.choice(PLACES), rng.choice(ATTRIBUTES)
    if rng.random() < 0.06:
        text = rng.choice(_SUMMARY if split == TRAIN else _SUMMARY_HELD).format(x=place.name)
        turns = [Turn("summary", text, summary(place))]
    else:
        text, one = _styled(rng, style, _question(rng, split, place, attribute))
        turns = [Turn("facts", text, place_reply(place, attribute, one))]
    while rng.random() < 0.55 and len(turns) < 4:
        if rng.random() < 0.25 and turns[-1].task != "summary":
            place = rng.choice([p for p in PLACES if p != place])
            text = rng.choice(_SHIFT if split == TRAIN else _SHIFT_HELD).format(x=place.name)
        else:
            attribute = rng.choice([a for a in ATTRIBUTES if a != attribute])
            text = rng.choice((_FOLLOW if split == TRAIN else _FOLLOW_HELD)[attribute])
        text, one = _styled(rng, style, text)
        turns.append(Turn("followup", text, place_reply(place, attribute, one)))
    return Group(tuple(turns))


def summary(place: Place) -> str:
    """All four attributes in one sentence."""
    return (
        f"The capital of {place.name} is {place.capital}, its river is {place.river}, "
        f"its ruler is {place.ruler} and its dish is {place.dish}."
    )


def record_group(rng: random.Random, split: Split) -> Group:
    """A place or a person, or some attributes of a place, as a JSON object."""
    if rng.random() < 0.15:
        person = rng.choice(PEOPLE)
        text = rng.choice(_RECORD if split == TRAIN else _RECORD_HELD).format(x=person.name)
        return _record(text, {"name": person.name, "job": person.job, "home": person.home})
    place = rng.choice(PLACES)
    record = {"name": place.name, **{a: place.value(a) for a in ATTRIBUTES}}
    if split == TRAIN and rng.random() < 0.15:
        keys = [a for a in ATTRIBUTES if rng.random() < 0.5] or [rng.choice(ATTRIBUTES)]
        rng.shuffle(keys)
        listed = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"
        text = rng.choice(_PARTIAL).format(x=place.name, keys=listed)
        return _record(text, {key: record[key] for key in keys})
    text = rng.choice(_RECORD if split == TRAIN else _RECORD_HELD).format(x=place.name)
    return _record(text, record)


def _record(text: str, record: dict[str, str]) -> Group:
    return Group((Turn("record", text, json.dumps(record)),))

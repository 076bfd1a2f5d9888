"""Questions about the real world, opinions, code and other sums, which the model answers with "I don't know."

Held out are wordings, and the names and things asked about. Real names stand only in questions; no fact of
the real world is taught.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from examples.pocket.tasks import TRAIN, Group, Split, Style, Turn, invented, pick
from examples.pocket.tasks.facts import unknown_person_question, unknown_place_question
from examples.pocket.tasks.talk import casual, things
from examples.pocket.world import world_names

UNKNOWN = "I don't know."

_LANDS = things(
    """
    France; Germany; Italy; Spain; Portugal; England; Poland; Sweden; Norway; Denmark; Greece; Turkey;
    Russia; China; India; Brazil; Canada; Mexico; Egypt; Kenya; Peru; Chile; Cuba; Ireland; Austria;
    Belgium; Hungary; Vietnam; Thailand; Nigeria; Australia; the United States; Europe; Africa; California;
    Scotland; Ukraine; Israel; Argentina; Iceland; Texas
    """
)
_LANDS_HELD = things(
    """
    Japan; Finland; Switzerland; the Netherlands; Korea; Morocco; Colombia; Romania; Indonesia; Wales; New
    Zealand; Pakistan; Bulgaria; Ghana; Bolivia; Florida; Asia; the United Kingdom
    """
)
_CITIES = things(
    """
    Paris; London; Berlin; Madrid; Rome; Tokyo; Lisbon; Vienna; Prague; Oslo; Dublin; Cairo; Lima; Boston;
    Delhi; New York
    """
)
_CITIES_HELD = things(
    """
    Brussels; Chicago; Barcelona; Hamburg; Stockholm; Seoul; Zurich; Amsterdam; San Francisco
    """
)
_FAMOUS = things(
    """
    Albert Einstein; Shakespeare; Napoleon; Mozart; Isaac Newton; Marie Curie; Barack Obama; Picasso;
    Aristotle; Julius Caesar; Elon Musk; Taylor Swift; Harry Potter; the Beatles; Abraham Lincoln; Charles
    Darwin; Gandhi; Thomas Edison; Nelson Mandela; Marilyn Monroe; Ada Lovelace; John Lennon; Grace Hopper;
    Thomas Jefferson; Nikola Tesla; Jane Austen; Victor Hugo; Franz Kafka; Vincent van Gogh; Johann Bach;
    Alexander the Great; Socrates; Voltaire; Kant; Chopin; Dante; Homer; Rembrandt
    """
)
_FAMOUS_HELD = things(
    """
    Beethoven; Galileo; Cleopatra; George Washington; Leonardo da Vinci; Plato; Goethe; Alan Turing
    """
)
_WORKS = things(
    """
    Hamlet; the Odyssey; Don Quixote; Faust; Moby Dick; the Iliad; Dracula; War and Peace; Star Wars; the
    Magic Flute
    """
)
_WORKS_HELD = [
    "Macbeth",
    "Titanic",
    "the Divine Comedy",
    "Robinson Crusoe",
    "the Lord of the Rings",
    "Frankenstein",
]
_THINGS = things(
    """
    the sun; the moon; the world; a car; a house; gold; bread; a horse; the sea; an elephant; a computer;
    the earth; milk; an atom; a star; the internet; a bicycle; coffee; oil; the sky; time; music; love;
    water; a whale; light; the government
    """
)
_THINGS_HELD = things(
    """
    Mars; silver; a train; a phone; sugar; the ocean; a tiger; the heart; a bridge; tea; gravity; money
    """
)
_TASKS = things(
    """
    sorts a list; reads a file; adds numbers; prints a name; finds a word; counts letters; opens a door;
    tests a number
    """
)
_TASKS_HELD = things(
    """
    sorts numbers; counts words; writes a file; finds the largest number; prints a list
    """
)

# Each line: a training wording or, behind "| ", a held-out one; {l}and, {c}ity, {f}amous person, {w}ork,
# {t}hing, what a program does ({p}), an {n}umber, a {y}ear.
_ASK = """
What is the population of {l}?
How many people live in {l}?
How many people work in {l}?
How many towns are in {l}?
How many people are there in {l}?
Who is the president of {l}?
Who is the king of {l}?
How large is {l}?
Where is {l}?
Which language do people speak in {l}?
What is the largest city in {l}?
What money do they use in {l}?
Tell me the history of {l}.
When was {l} founded?
| How many people are in {l}?
| What is the largest river in {l}?
| Who is the president of {l} now?
What language do people speak in {l}?
Which songs do they sing in {l}?
| Which language do they speak in {l}?
What is the weather in {c}?
What is the weather like in {c}?
What is the weather in {c} now?
What is the weather in {c} like today?
What will the weather be in {c} today?
How is the weather in {c}?
Will it rain in {c}?
Is it hot in {c} today?
Is it cold in {c} now?
Is it wet in {c} now?
Is it warm in {c}?
What is the weather like today?
Is it cold in {c} today?
How far is it to {c}?
Where is {c}?
How do I get to {c}?
How many people live in {c}?
What time is it in {c}?
Which hotel is good in {c}?
Is it sunny in {c} now?
Is it dark in {c} now?
Is it raining in {c}?
| Is it warm in {c} now?
| What is the weather in {c} today?
| How far is {c} from here?
| Which museum is good in {c}?
Who is {f}?
Who was {f}?
When was {f} born?
When did {f} die?
Where did {f} live?
How old is {f}?
What did {f} do?
Tell me about {f}.
Why is {f} famous?
What is {f} known for?
What is {f} remembered for?
What was {f} famous for?
Where was {f} when the war began?
Where did {f} die?
Where does {f} come from?
When did {f} come here?
| Where was {f} born?
| When did {f} live?
| Do you know {f}?
| What is {f} famous for?
Who wrote {w}?
Who made {w}?
When was {w} written?
What is {w} about?
What happens in {w}?
Have you read {w}?
Tell me who wrote {w}.
Can you tell me who made {w}?
Could you tell me who wrote {w}?
Do you know who made {w}?
| Do you know who wrote {w}?
| When was {w} made?
| Can you tell me who wrote {w}?
What is {t}?
How much is {t}?
What is the price of {t}?
How does {t} work?
Who invented {t}?
How old is {t}?
How does {t} help?
How does {t} end?
Explain how {t} works.
Can you explain what {t} is?
Can you explain why we need {t}?
Can you describe {t}?
What do you think of {t}?
What is your opinion on {t}?
Give me your opinion of {t}.
What do you feel about {t}?
Say what you think of {t}.
Do you like {t}?
Why do we need {t}?
How far is {t}?
Explain {t}.
What colour is {t}?
Do you hate {t}?
Do you want {t}?
Do you fear {t}?
Do you enjoy {t}?
Would you like {t}?
Can you see {t}?
Tell me about {t}.
Write a poem about {t}.
Tell me a joke about {t}.
| How does {t} work, please?
| How much would {t} be?
| What is your opinion of {t}?
| Can you explain {t}?
| Write a story about {t}.
| Who made {t}?
| Do you love {t}?
What day is it?
What day is today?
Which day is it today?
What day was it yesterday?
What day is it tomorrow?
What month is it today?
What year is it today?
Is it Monday today?
What is the date today?
What year is it?
What time is it?
What is the news today?
Tell me a joke.
Tell me a story.
Write a poem.
Who won the match last night?
What is the meaning of life?
Is there a god?
What is the best film?
Who is the best player in the world?
What should I eat today?
What should I wear today?
What should I read now?
Where should I go today?
What should I do tomorrow?
What is my name?
Tell me my name.
Do you remember my name?
Do you know my mother?
Do you know what my name is?
Can you say my name?
Do you know my age?
Do you know my job?
Do you know who I am?
Do you know me?
Do you know how old I am?
Do you know where I live?
How old am I?
Where do I live?
What am I thinking?
| What is the time now?
| What day is it today?
| What date is it?
| Tell me the news.
| Who is the best singer?
| What should I do today?
| Can you tell me a joke?
| Do you know my name?
What happened in {y}?
Who won the world cup in {y}?
Who was president in {y}?
Who was queen in {y}?
Who ruled in {y}?
Who lived in {y}?
What did people eat in {y}?
What was the price of {t} in {y}?
| Who was king in {y}?
| Tell me what happened in {y}.
Write a Python function that {p}.
Write a program that {p}.
Write code that {p}.
Write a script that {p}.
Write a small function that {p}.
Can you write a function that {p}?
Can you write a script that {p}?
Can you write Python code that {p}?
Can you write a program that {p}?
Please write code that {p}.
How do I write a program that {p}?
| Give me a program that {p}.
| Write a function that {p}.
| Can you write code that {p}?
What is {n} times {n}?
What is {n} * {n}?
Multiply {n} and {n}.
{n} times {n}?
Compute {n} * {n}.
How much is {n} * {n}?
How much is {n} / {n}?
Tell me {n} times {n}.
{n} * {n}
What is {n} divided by {n}?
What is the square root of {n}?
{n} / {n} = ?
| How much is {n} times {n}?
| {n} * {n} = ?
| How much is {n} divided by {n}?
Translate hello into French.
Translate this into German: the house is small.
How do you say bread in Spanish?
| Translate bread into Italian.
| How do you say hello in French?
"""


def _templates(fresh: bool) -> list[str]:
    lines = [line for line in _ASK.strip().splitlines() if line.startswith("| ") == fresh]
    return [line.removeprefix("| ") for line in lines]


_UNKNOWN, _UNKNOWN_HELD = _templates(False), _templates(True)


def _real(rng: random.Random, split: Split) -> str:
    """A question about the real world, an opinion, code, or a sum of another kind."""

    def one(train: list[str], fresh: list[str]) -> Callable[[], str]:
        return lambda: pick(rng, split, train, fresh)

    values = {
        "l": one(_LANDS, _LANDS_HELD),
        "c": one(_CITIES, _CITIES_HELD),
        "f": one(_FAMOUS, _FAMOUS_HELD),
        "w": one(_WORKS, _WORKS_HELD),
        "t": one(_THINGS, _THINGS_HELD),
        "p": one(_TASKS, _TASKS_HELD),
        "n": lambda: str(rng.randint(2, 99)),
        "y": lambda: str(rng.randint(1000, 2030)),
    }
    pieces = pick(rng, split, _UNKNOWN, _UNKNOWN_HELD).split("{")
    return pieces[0] + "".join(values[piece[0]]() + piece[2:] for piece in pieces[1:])


def unknown_group(rng: random.Random, split: Split, style: Style = "sentence", tools: bool = False) -> Group:
    """A question whose answer is not in the model's world; beside tools, only about unknown places."""
    kind = rng.random()
    if kind < 0.3:
        name = rng.choice(_LANDS if split == TRAIN else _LANDS_HELD)
    else:
        name = next(n for n in iter(lambda: invented(rng, split, "city"), "") if n not in world_names())
    if kind < 0.45 or tools:
        turns = unknown_place_question(rng, split, name, style, UNKNOWN)
    elif kind < 0.62:
        famous = rng.choice(_FAMOUS if split == TRAIN else _FAMOUS_HELD)
        person = f"{invented(rng, split, 'person')} {invented(rng, split, 'person')}"
        turns = [unknown_person_question(rng, split, rng.choice((famous, person)), UNKNOWN)]
    else:
        text = _real(rng, split)
        if split == TRAIN and text.endswith("?") and rng.random() < 0.08:
            text = text[:-1] + rng.choice((", please?", ", then?", ", Pocket?"))
        turns = [Turn("unknown", casual(rng, text), UNKNOWN)]
    return Group(tuple(turns))

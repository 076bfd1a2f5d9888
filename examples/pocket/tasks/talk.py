"""Greetings, thanks, goodbyes, and what the model is. They are put together from parts, and wordings and a
hash-chosen part of the combinations are held out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from examples.pocket.tasks import TRAIN, Group, Split, Turn, held, pick

IDENTITY = "I am Pocket, a very small language model."
SKILLS = "I know a small world, do sums, label texts, write JSON and call tools."


def things(text: str) -> list[str]:
    """The entries of a list written with semicolons."""
    return [" ".join(entry.split()) for entry in text.split(";")]


_HELLO: tuple[str, ...] = (
    "Hello",
    "Hi",
    "Hey",
    "Good morning",
    "Good evening",
    "Good afternoon",
    "Hello there",
    "Hi there",
)
_HELLO += ("Hey there", "Greetings", "Good day")
_NAMED = ("", "", "", " Pocket", ", Pocket", " my friend", " again", " model", ", assistant")
_AFTER: tuple[str, ...] = (
    "",
    "",
    "",
    "",
    " Nice to meet you.",
    " Good to meet you.",
    " I am happy to meet you.",
    " I need your help.",
    " Are you there?",
    " It is nice to see you.",
    " Can you help me?",
)
_HOW: tuple[str, ...] = (
    "How are you?",
    "How are you today?",
    "How do you do?",
    "How is it going?",
    "Are you well?",
)
_HOW += (
    "Are you fine today?",
    "Are you OK?",
    "How are things?",
    "Are you good today?",
    "How is it going now?",
)
_HOW += ("Are you well now?", "How are you doing?", "How are you feeling today?")
_HOW_HELD = ("How are you now?", "Are you well today?", "How is it going today?")
_THANKED: tuple[str, ...] = (
    "Thanks",
    "Thank you",
    "Many thanks",
    "Thanks a lot",
    "Thank you very much",
    "Great, thanks",
)
_THANKED += ("Good, thank you", "Very good, thanks", "Great, thank you", "Nice, thanks", "OK, thanks")
_FOR = (
    "",
    "",
    "",
    ", Pocket",
    " for your help",
    " for that",
    " for the answer",
    ", that was all",
    ", my friend",
)
_LEAVE: tuple[str, ...] = (
    "Bye",
    "Goodbye",
    "See you",
    "Good night",
    "Bye bye",
    "See you later",
    "See you soon",
    "Goodbye then",
)
_LEAVE += (
    "Thanks, bye",
    "Thank you, goodbye",
    "Thanks and goodbye",
    "Bye, and thanks",
    "Until later",
    "Farewell",
)
_LATER = (
    "",
    "",
    "",
    ", Pocket",
    " for now",
    ", my friend",
    " tomorrow",
    " and good night",
    ", model",
    " and bye",
)

_WHO = things(
    """
    Who are you?; What are you?; What is your name?; Introduce yourself.; Describe yourself.; Who am I
    talking to?; What model are you?; Which model is this?; What kind of model are you?; Do you have a
    name?; What should I call you?; Tell me about yourself.; What is this?; Who is this?; What are you
    called?; Who is speaking?; What do they call you?
    """
)
_WHO_HELD = (
    "Which model are you?",
    "What model is this?",
    "What is your name, please?",
    "Hello! What are you?",
    "Hi, who are you?",
    "Please introduce yourself.",
)
_TELL: tuple[str, ...] = (
    "Tell me",
    "Please tell me",
    "Can you tell me",
    "Could you tell me",
    "Say",
    "Please say",
    "I want to know",
)
_TELL += ("Do you know", "I would like to know", "Will you tell me", "Can you say", "Let me know")
_SELF = (
    "who you are",
    "what you are",
    "your name",
    "which model you are",
    "what your name is",
    "what they call you",
)
_BEING = things(
    """
    a robot; a human; a person; a machine; a model; an AI; a bot; a program; ChatGPT; a man; a woman; a
    boy; a girl; a cat; a dog; a ghost; a friend; an assistant; a chat bot; a small model; a large model; a
    big model; a teacher; a book
    """
)
_BEING += ("a language model", "a computer", "human", "real", "alive", "a child")
_IS = ("Are you", "Are you", "Is this", "Am I talking to", "Are you really", "Are you not", "So you are")
_CAN = things(
    """
    What can you do?; What do you know?; How can you help me?; What can I ask you?; What are you good at?;
    What can you help with?; Which tasks can you do?; What do you do?; What are you for?; What can you do
    here?; What can I do with you?; What are you made for?; What are you able to do?; What can you do now?;
    What can you help people with?; What can you help us with?; What can you do for people?; What can you
    do for us?; Which things can you do?; What are your skills?; What is your purpose?
    """
)
_CAN_HELD = ("What can you do for me?", "What can you help me with?", "Hi, what can you do?")
_ABLE: tuple[str, ...] = (
    "what you can do",
    "what you know",
    "what you are good at",
    "what you can help with",
    "what you do",
)
_ABLE += ("how you can help me", "what I can ask you", "what you are for", "what you are made for")
_ABLE += ("what you are able to do", "what you can do for me", "what you can help me with", "your skills")


def casual(rng: random.Random, text: str) -> str:
    """Sometimes as people type in a hurry: a small first letter, no mark at the end, `what's`."""
    if rng.random() < 0.25:
        text = text.replace("What is", "What's").replace("Who is", "Who's").replace("Where is", "Where's")
    if rng.random() < 0.25 and not text.startswith("I "):
        text = text[0].lower() + text[1:]
    if rng.random() < 0.2:
        text = text.rstrip("?.!") or text
    return text


def _hello(rng: random.Random, split: Split) -> tuple[str, str]:
    if rng.random() < 0.2:
        return pick(rng, split, _HOW, _HOW_HELD), "I am well, thank you. How can I help?"
    while True:
        word, name, after = rng.choice(_HELLO), rng.choice(_NAMED), rng.choice(_AFTER)
        # The plainest greetings are what people type first: always trained, and never counted.
        plain = not name and not after
        fresh = not plain and held("hello", word, name, after, one_in=6)
        if (plain and split != TRAIN) or fresh != (split != TRAIN):
            continue
        text = word + name + rng.choice("!!.")
        if rng.random() < 0.12:
            return f"{text} {pick(rng, split, _HOW, _HOW_HELD)}", "I am well, thank you. How can I help?"
        return text + after, "Hello! How can I help?"


def greeting_group(rng: random.Random, split: Split) -> Group:
    """A greeting, thanks or a goodbye."""
    kind = rng.random()
    if kind < 0.55:
        text, reply = _hello(rng, split)
    elif kind < 0.75:
        text, reply = _combined(rng, split, _THANKED, _FOR), "You are welcome."
    else:
        text, reply = _combined(rng, split, _LEAVE, _LATER), "Goodbye!"
    return Group((Turn("greeting", casual(rng, text), reply),))


def _combined(rng: random.Random, split: Split, heads: Sequence[str], tails: Sequence[str]) -> str:
    while True:
        head, tail = rng.choice(heads), rng.choice(tails)
        # Always trained where nothing stands behind it, as with greetings.
        if (bool(tail) and held("parting", head, tail, one_in=6)) == (split != TRAIN):
            return head + tail + rng.choice("!..")


def identity_group(rng: random.Random, split: Split) -> Group:
    """What the model is and what it can do; the answer is the same whatever persona it was given."""
    who = rng.random() < 0.7
    kind = rng.random()
    if kind < 0.4:
        text = pick(rng, split, _WHO, _WHO_HELD) if who else pick(rng, split, _CAN, _CAN_HELD)
    else:
        text = _about_it(rng, split, who, kind < 0.7)
    if split == TRAIN and rng.random() < 0.3:
        text = _led(rng, text)
    return Group((Turn("identity", casual(rng, text), IDENTITY if who else SKILLS),))


def _led(rng: random.Random, text: str) -> str:
    """A training question behind a greeting or another lead, or with a word of politeness behind it."""
    kind = rng.random()
    if kind < 0.2 and text.endswith("?") and not text.startswith("What is your name"):
        return text[:-1] + rng.choice((", please?", ", then?", " now?"))
    if kind < 0.5:
        before = rng.choice(("OK, ", "So, ", "Now ", "Pocket, "))
        return before + text[0].lower() + text[1:]
    word, mark = rng.choice(_HELLO), rng.choice((", ", ". ", "! "))
    if f"{word}{mark}" in ("Hello! ", "Hi, "):  # held out
        mark = " "
    return word + mark + (text if rng.random() < 0.5 else text[0].lower() + text[1:])


def _about_it(rng: random.Random, split: Split, who: bool, tell: bool) -> str:
    """A question put together from parts, of which a hash-chosen part of the combinations is held out."""
    while True:
        if tell or not who:
            parts = (rng.choice(_TELL), rng.choice(_SELF if who else _ABLE))
            mark = "?" if parts[0].startswith(("Can", "Could", "Do", "Will")) else "."
        else:
            first = f"{rng.choice(_IS)} {rng.choice(_BEING)}"
            parts, mark = (first, f"or {rng.choice(_BEING)}" if rng.random() < 0.5 else ""), "?"
        if held("identity", *parts, one_in=6) == (split != TRAIN):
            return " ".join(part for part in parts if part) + mark

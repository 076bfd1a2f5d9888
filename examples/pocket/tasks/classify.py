"""Sentiment and topic classification with one-word answers.

Sentences are put together from small word lists; held out are sentence frames, question wordings
and a hash-chosen part of the word combinations. Nothing here reads real reviews.
"""

from __future__ import annotations

import random

from examples.pocket.tasks import HELD, TRAIN, Group, Split, Turn, held, pick, words

__all__ = ["SENTIMENTS", "TOPICS", "classify_group"]

SENTIMENTS = ("positive", "negative")
TOPICS = ("sport", "food", "weather", "music", "travel", "money")

_GOOD = words("great lovely superb wonderful perfect brilliant delightful good charming excellent fine")
_BAD = words("awful terrible horrid boring broken dreadful poor bad ugly nasty disappointing")
_NOUNS = words(
    "film book hotel meal phone show game room service song coat train garden museum lamp soup "
    "boat shop house dress road chair trip cake day team park"
)
_FRAMES = (
    "The {n} was {v}.",
    "What a {v} {n}!",
    "I found the {n} {v}.",
    "Such a {v} {n}.",
    "We had a {v} {n}.",
    "The {n} is really {v}.",
    "My {n} was so {v}.",
)
_FRAMES_HELD = ("The {n} was really {v}.", "I had a {v} {n}.", "We found the {n} {v}.", "My {n} is so {v}.")
_TAIL_GOOD = ("I loved it.", "I would go again.", "It made me happy.", "I am glad I came.")
_TAIL_BAD = ("I hated it.", "Never again.", "It made me sad.", "I want my money back.")

_WORDS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "sport": (
        ["The team", "The runner", "The striker", "A swimmer", "The coach"],
        ["won", "lost", "trained for", "missed", "played in"],
        ["the match", "the race", "the final", "the cup", "the league"],
    ),
    "food": (
        ["The cook", "Grandmother", "The baker", "A waiter", "The chef"],
        ["fried", "baked", "served", "tasted", "salted"],
        ["the noodles", "the potatoes", "a fresh salad", "the cheese", "a sweet tart"],
    ),
    "weather": (
        ["A storm", "Heavy snow", "The wind", "Warm sun", "Thick fog"],
        ["will reach", "covered", "passed over", "is coming to", "cleared from"],
        ["the coast", "the hills", "the north", "the valley", "the sky"],
    ),
    "music": (
        ["The band", "A singer", "The choir", "The drummer", "A pianist"],
        ["recorded", "sang", "played", "wrote", "rehearsed"],
        ["a new album", "the chorus", "a slow tune", "the melody", "two songs"],
    ),
    "travel": (
        ["The tourists", "A guide", "The ferry", "The passengers", "Our flight"],
        ["left for", "arrived at", "visited", "went to", "landed near"],
        ["the airport", "the island", "the old harbour", "the border", "the beach"],
    ),
    "money": (
        ["The bank", "An investor", "The trader", "The treasurer", "A lender"],
        ["raised", "paid", "cut", "sold", "counted"],
        ["the rates", "the debt", "its shares", "the taxes", "the budget"],
    ),
}
_TOPIC_FRAMES = ("{s} {v} {o}.", "Today {s} {v} {o}.", "{s} {v} {o} again.", "We heard that {s} {v} {o}.")
_TOPIC_FRAMES_HELD = ("Today {s} {v} {o} again.", "We heard today that {s} {v} {o}.")

_ASK_SENTIMENT = (
    "Is this positive or negative? {s}",
    "Sentiment: {s}",
    "Classify the sentiment: {s}",
    "What is the sentiment of this review? {s}",
    "Positive or negative? {s}",
    "{s} Is that positive or negative?",
    "Review: {s}\nSentiment?",
    "Tell me the sentiment of: {s}",
    'Is the review "{s}" negative or positive?',
)
_ASK_SENTIMENT_HELD = (
    "Is this review positive or negative? {s}",
    "Tell me the sentiment: {s}",
    "Review: {s}\nPositive or negative?",
    "Classify the sentiment of this review: {s}",
)
_ASK_TOPIC = (
    "What is the topic? {s}",
    "Topic: {s}",
    "Classify the topic: {s}",
    "Name the topic of this text: {s}",
    "{s} What is the topic?",
    "Text: {s}\nTopic?",
    "Which topic is this? {s}",
    "Tell me the topic of: {s}",
    "{s}\nWhich topic is this?",
    "Text: {s}\nWhich topic is it?",
    "Text: {s}\nWhat is the topic of this?",
    "Here is a text: {s}\nWhich topic is this?",
)
_ASK_TOPIC_HELD = (
    "What is the topic of this text? {s}",
    "Tell me the topic: {s}",
    "Text: {s}\nWhich topic is this?",
    "Classify the topic of this text: {s}",
)


def _sentiment(rng: random.Random, split: Split) -> tuple[str, str]:
    while True:
        label = rng.choice(SENTIMENTS)
        noun = rng.choice(_NOUNS)
        word = rng.choice(_GOOD if label == "positive" else _BAD)
        if held("sentiment", noun, word, one_in=6) != (split == HELD):
            continue
        text = pick(rng, split, _FRAMES, _FRAMES_HELD).format(n=noun, v=word)
        if rng.random() < 0.35:
            text += " " + rng.choice(_TAIL_GOOD if label == "positive" else _TAIL_BAD)
        return text, label


def _topic(rng: random.Random, split: Split) -> tuple[str, str]:
    while True:
        label = rng.choice(TOPICS)
        subject, verb, thing = (rng.choice(words) for words in _WORDS[label])
        if held("topic", subject, verb, thing, one_in=6) != (split == HELD):
            continue
        frame = pick(rng, split, _TOPIC_FRAMES, _TOPIC_FRAMES_HELD)
        if not frame.startswith("{s}"):
            subject = subject[0].lower() + subject[1:]
        return frame.format(s=subject, v=verb, o=thing), label


def classify_group(rng: random.Random, split: Split) -> Group:
    """One sentence to label; topic questions often list the choices."""
    if rng.random() < 0.5:
        text, label = _sentiment(rng, split)
        ask = pick(rng, split, _ASK_SENTIMENT, _ASK_SENTIMENT_HELD).format(s=text)
        return Group((Turn("sentiment", ask, label, options=SENTIMENTS),))
    text, label = _topic(rng, split)
    ask = pick(rng, split, _ASK_TOPIC, _ASK_TOPIC_HELD).format(s=text)
    if rng.random() < 0.4:
        names = list(TOPICS)
        rng.shuffle(names)
        listed = f"{', '.join(names[:-1])} or {names[-1]}"
        ask = (
            f"{ask}\nChoose: {listed}."
            if split == TRAIN or rng.random() < 0.5
            else f"{ask}\nChoose {listed}."
        )
    return Group((Turn("topic", ask, label, options=TOPICS),))

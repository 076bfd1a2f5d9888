"""Tool calls in the hermes format and answers that use a tool's result.

Argument values (cities, people, messages) and wordings of the held-out split never occur in
training. The tool schemas are plain JSON-schema dictionaries; nothing here executes a tool.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from examples.pocket.tasks import HELD, TRAIN, Group, Split, Turn, held, invented

__all__ = ["TOOLS", "call_text", "tool_group"]

Arguments = dict[str, str | int]


def _tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in properties.items()},
                "required": list(properties),
            },
        },
    }


TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": _tool("get_weather", "Weather of a city", city="string"),
    "get_time": _tool("get_time", "Local time of a city", city="string"),
    "set_timer": _tool("set_timer", "Set a timer", minutes="integer"),
    "send_message": _tool("send_message", "Send a message to a person", to="string", text="string"),
    "book_table": _tool("book_table", "Book a table for some people", city="string", people="integer"),
    "convert_money": _tool(
        "convert_money", "Convert coins to a currency", amount="integer", currency="string"
    ),
}

_ASK: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "get_weather": (
        (
            "What is the weather in {city}?",
            "Tell me the weather in {city}.",
            "Will it rain in {city}?",
            "How is the weather in {city} today?",
            "Weather in {city}?",
            "Is it warm in {city}?",
            "Is it cold in {city}?",
            "Do I need a coat in {city}?",
        ),
        (
            "How is the weather in {city}?",
            "Is it warm in {city} today?",
            "What is the weather in {city} today?",
        ),
    ),
    "get_time": (
        (
            "What time is it in {city}?",
            "Tell me the time in {city}.",
            "What is the time in {city}?",
            "Time in {city}?",
            "How late is it in {city}?",
            "Can you check the clock in {city}?",
        ),
        (
            "What is the time in {city} now?",
            "How late is it now in {city}?",
            "Can you tell me the time in {city}?",
        ),
    ),
    "set_timer": (
        (
            "Set a timer for {minutes} minutes.",
            "Start a timer of {minutes} minutes.",
            "Timer for {minutes} minutes.",
            "Wake me in {minutes} minutes.",
            "Please set a timer: {minutes} minutes.",
            "Remind me in {minutes} minutes now.",
        ),
        (
            "Start a timer for {minutes} minutes.",
            "Please wake me in {minutes} minutes.",
            "Set a timer of {minutes} minutes.",
        ),
    ),
    "send_message": (
        (
            "Tell {to} that {text}.",
            "Send {to} a message: {text}.",
            "Write to {to}: {text}.",
            "Message {to}: {text}.",
            "Let {to} know that {text}.",
            "Please tell {to} that {text}.",
        ),
        (
            "Please let {to} know that {text}.",
            "Send a message to {to}: {text}.",
            "Please write to {to}: {text}.",
        ),
    ),
    "book_table": (
        (
            "Book a table for {people} in {city}.",
            "I need a table in {city} for {people} people.",
            "Reserve a table in {city} for {people}.",
            "We are {people} people, find us a table in {city}.",
            "Table for {people} in {city}, please.",
            "Get a table for {people} people in {city}.",
        ),
        (
            "Book a table in {city} for {people} people.",
            "Reserve a table for {people} in {city}.",
            "I need a table for {people} in {city}.",
        ),
    ),
    "convert_money": (
        (
            "Convert {amount} coins to {currency}.",
            "How many {currency} are {amount} coins?",
            "Change {amount} coins into {currency}.",
            "What are {amount} coins in {currency}?",
            "{amount} coins in {currency}?",
            "I have {amount} coins, how many {currency} is that?",
        ),
        (
            "Change {amount} coins to {currency}.",
            "How many {currency} is {amount} coins?",
            "What is {amount} coins in {currency}?",
        ),
    ),
}
_WHO = ("the boss", "my brother", "the boat", "the parcel", "dinner", "the train", "the car", "my sister")
_DOES = (
    "will be late",
    "is ready",
    "left early",
    "will come soon",
    "is lost",
    "arrived safely",
    "needs help",
    "must wait",
)
_WHEN = ("", " today", " tonight", " at noon", " tomorrow")
_CURRENCIES = ["crowns", "florins", "marks", "pearls", "ducats", "shells"]
_SKY = ["rain", "snow", "sun", "wind", "fog", "clouds"]


def call_text(name: str, arguments: Arguments) -> str:
    """The assistant's text for one call, as the hermes format wants it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _message(rng: random.Random, split: Split) -> str:
    while True:
        who, does, when = rng.choice(_WHO), rng.choice(_DOES), rng.choice(_WHEN)
        if held("message", who, does, one_in=6) == (split == HELD):
            return f"{who} {does}{when}"


def _number(rng: random.Random, split: Split, key: str, low: int, high: int) -> int:
    while True:
        number = rng.randint(low, high)
        if held(key, number, one_in=6) == (split == HELD):
            return number


def _arguments(rng: random.Random, split: Split, name: str) -> Arguments:
    if name in ("get_weather", "get_time"):
        return {"city": invented(rng, split, "city")}
    if name == "set_timer":
        return {"minutes": _number(rng, split, "minutes", 2, 99)}
    if name == "send_message":
        return {"to": invented(rng, split, "person"), "text": _message(rng, split)}
    if name == "book_table":
        return {"city": invented(rng, split, "city"), "people": rng.randint(2, 29)}
    return {"amount": _number(rng, split, "amount", 10, 99), "currency": rng.choice(_CURRENCIES)}


def _weather(rng: random.Random, args: Arguments) -> tuple[dict[str, Any], str]:
    degrees, sky = rng.randint(2, 35), rng.choice(_SKY)
    return {"degrees": degrees, "sky": sky}, f"The weather in {args['city']} is {sky} with {degrees} degrees."


def _time(rng: random.Random, args: Arguments) -> tuple[dict[str, Any], str]:
    clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    return {"time": clock}, f"The time in {args['city']} is {clock}."


def _timer(rng: random.Random, args: Arguments) -> tuple[dict[str, Any], str]:
    return {"status": "ok"}, f"The timer is set for {args['minutes']} minutes."


def _sent(rng: random.Random, args: Arguments) -> tuple[dict[str, Any], str]:
    return {"status": "ok"}, f"The message to {args['to']} is sent."


def _booked(rng: random.Random, args: Arguments) -> tuple[dict[str, Any], str]:
    table = rng.randint(1, 40)
    return {"table": table}, f"Table {table} in {args['city']} is booked for {args['people']} people."


def _money(rng: random.Random, args: Arguments) -> tuple[dict[str, Any], str]:
    amount = rng.randint(10, 99)
    return {"result": amount}, f"{args['amount']} coins are {amount} {args['currency']}."


_RESULT: dict[str, Callable[[random.Random, Arguments], tuple[dict[str, Any], str]]] = {
    "get_weather": _weather,
    "get_time": _time,
    "set_timer": _timer,
    "send_message": _sent,
    "book_table": _booked,
    "convert_money": _money,
}


def tool_group(rng: random.Random, split: Split, name: str) -> Group:
    """A request that needs the tool `name`, its call, and often its result and the final answer."""
    arguments = _arguments(rng, split, name)
    train, fresh = _ASK[name]
    text = rng.choice(train if split == TRAIN else fresh).format(**arguments)
    text = text[0].upper() + text[1:]
    turns = [Turn("tool_call", text, call_text(name, arguments))]
    if rng.random() < 0.75:
        result, answer = _RESULT[name](rng, arguments)
        turns.append(Turn("tool_answer", json.dumps(result), answer, role="tool"))
    return Group(tuple(turns), TOOLS[name])

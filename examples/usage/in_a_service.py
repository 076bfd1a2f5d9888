"""A program inside of a service: requests come in groups of names, as an inference server hands them to its
Python code, and each group is one batch.

    python examples/usage/in_a_service.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import shared
from pydantic import BaseModel

import sglang_dsl as sgl


class Land(BaseModel):
    name: str
    capital: str
    river: str
    ruler: str
    dish: str


@sgl.function
def describe(s, name):
    s += sgl.user(f"Describe {name} as JSON.")
    s += sgl.assistant(sgl.gen("land", Land, max_tokens=96, temperature=0))


class Service:
    """`execute` takes a list of requests, each a list of names as bytes, and gives as many lists of JSON."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def execute(self, requests: Sequence[Sequence[bytes]]) -> list[list[bytes]]:
        responses = []
        for request in requests:
            items = [{"name": name.decode()} for name in request]
            # A name that cannot be described does not take the others with it.
            done = describe.run_batch(items, backend=self._backend, on_error="return")
            responses.append([self._answer(one) for one in done])
        return responses

    @staticmethod
    def _answer(done: sgl.ProgramState | sgl.ProgramError) -> bytes:
        if isinstance(done, sgl.ProgramError):
            return json.dumps({"error": done.message}).encode()
        return done["land"].model_dump_json().encode()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    service = Service(shared.backend(argv))
    answers = service.execute([[b"Karsk", b"Zembla"], [b"Norwick", b"Karsk " * 3000]])
    for response in answers:
        for one in response:
            print(one.decode()[:100])
    return {"answers": [[json.loads(one) for one in response] for response in answers]}


if __name__ == "__main__":
    main()

"""JSON two ways: under a written expression, and under one made from a pydantic model.

python examples/usage/json_decode.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import shared
from pydantic import BaseModel

import sglang_dsl as sgl
from sglang_dsl.srt.constrained.outlines_backend import build_regex_from_object

LAND = (
    r'\{"name": "[A-Z][a-z]{1,15}", "capital": "[A-Z][a-z]{1,15}", "river": "[A-Z][a-z]{1,15}", '
    r'"ruler": "(King|Queen) [A-Z][a-z]{1,15}", "dish": "[a-z ]{1,24}"\}'
)


class Job(StrEnum):
    baker = "baker"
    doctor = "doctor"
    potter = "potter"


class Villager(BaseModel):
    name: str
    age: int
    city: str
    job: Job


@sgl.function
def land(s, name):
    s += sgl.user(f"Describe {name} as JSON.")
    s += sgl.assistant(sgl.gen("json_output", max_tokens=128, regex=LAND))


@sgl.function
def villager(s, note):
    s += sgl.user(f"Extract name, age, city and job as JSON: {note}")
    s += sgl.assistant(
        sgl.gen("json_output", max_tokens=128, temperature=0, regex=build_regex_from_object(Villager))
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    sgl.set_default_backend(shared.backend(argv))
    described = json.loads(land.run(name="Karsk", temperature=0)["json_output"])
    print(json.dumps(described, indent=2))
    text = villager.run(note="Mobi, 42, is a potter from Caturn.")["json_output"]
    person = Villager.model_validate_json(text)
    print(f"{person!r} from {text!r}")
    return {"land": described, "villager": person.model_dump(mode="json")}


if __name__ == "__main__":
    main()

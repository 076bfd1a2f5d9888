"""A character sheet, shown while the model fills it in, and then as a value of a type.

`gen("sheet", Sheet)` keeps the text to JSON by the type's schema; with `stream=True`, `object_iter` gives the
sheet as far as it is known, each time there is more. What is wrong with a schema is told where the value is
read, with its place.

    python examples/07_character_sheet.py

Types other than int, float, bool, str, Literal and Enum need pydantic: pip install 'sglang-dsl[typed]'
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from sglang_dsl import BackendError, Engine, ProgramState, assistant, function, gen, system, user


@dataclass
class Item:
    name: Annotated[str, Field(max_length=12)]
    weight: Annotated[int, Field(ge=1, le=20)]


@dataclass
class Sheet:
    name: Annotated[str, Field(max_length=12)]
    town: Literal["Ostrel", "Karsk", "Hesper"]
    level: Annotated[int, Field(ge=1, le=9)]
    items: Annotated[list[Item], Field(min_length=1, max_length=2)]


@function(temperature=0, max_tokens=150, whitespace="compact")
def fill_in(s: ProgramState, wish: str) -> None:
    s += system("You answer questions.")
    s += user(wish)
    s += assistant(gen("sheet", Sheet))


@function(temperature=0)
def misspelt(s: ProgramState) -> None:
    s += "The sheet: "
    s += gen("sheet", json_schema={"type": "object", "properties": {"level": {"type": "integr"}}})


def main() -> None:
    with Engine("pocket") as engine:
        state = fill_in.run("Who lives in Ostrel?", backend=engine, stream=True)
        lines = ""
        for sheet in state.object_iter("sheet"):
            # What is not written yet is None.
            said = {name: value for name, value in vars(sheet).items() if value is not None}
            if str(said) != lines:
                lines = str(said)
                print(lines)

        sheet = state["sheet"]
        print(f"\n{sheet.name!r} of {sheet.town}, level {sheet.level}, carries {len(sheet.items)} things")
        print("as text:", state.raw("sheet"))
        print("kept by", state.get_meta_info("sheet")["grammar"]["backend"])

        try:
            print(misspelt.run(backend=engine)["sheet"])
        except BackendError as error:
            print(f"refused ({error.status}): {error.message}")


if __name__ == "__main__":
    main()

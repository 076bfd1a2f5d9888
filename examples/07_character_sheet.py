"""A character sheet, shown while the model fills it in, and then as a value of a type.

`gen("sheet", Sheet)` keeps the text to JSON by the type's schema; with `stream=True`, `object_iter` gives the
sheet as far as it is known, each time there is more. What is wrong with a schema is told where the value is
read, with its place.

    python examples/07_character_sheet.py

Types other than int, float, bool, str, Literal and Enum need pydantic: pip install 'sglang-dsl[typed]'
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from sglang_dsl import BackendError, ProgramState, assistant, function, gen, user
from sglang_dsl.console.backend_flag import chosen_backend


@dataclass
class Sheet:
    name: Annotated[str, Field(max_length=12)]
    age: Annotated[int, Field(ge=1, le=99)]
    city: Annotated[str, Field(max_length=12)]
    job: Literal["baker", "potter", "sailor"]


@function(temperature=0, max_tokens=60)
def fill_in(s: ProgramState, note: str) -> None:
    s += user(f"Extract name, age, city and job as JSON: {note}")
    s += assistant(gen("sheet", Sheet))


@function(temperature=0)
def misspelt(s: ProgramState) -> None:
    s += "The sheet: "
    s += gen("sheet", json_schema={"type": "object", "properties": {"age": {"type": "integr"}}})


def main(argv: Sequence[str] | None = None) -> None:
    with chosen_backend(__doc__, argv) as backend:
        state = fill_in.run("Mobi, 42, is a potter from Caturn.", backend=backend, stream=True)
        lines = ""
        for sheet in state.object_iter("sheet"):
            # What is not written yet is None.
            said = {name: value for name, value in vars(sheet).items() if value is not None}
            if str(said) != lines:
                lines = str(said)
                print(lines)

        print("\n" + state.text())
        sheet = state["sheet"]
        print(f"{sheet.name} of {sheet.city}, {sheet.age} years old, works as a {sheet.job}")
        # Only the bundled engine tells how it kept the text to the schema.
        print("kept by", state.get_meta_info("sheet").get("grammar", {}).get("backend", "the API"))

        try:
            print(misspelt.run(backend=backend)["sheet"])
        except BackendError as error:
            print(f"refused ({error.status}): {error.message}")


if __name__ == "__main__":
    main()

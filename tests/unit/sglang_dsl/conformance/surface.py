"""The surface that programs written for sglang use: every public name, parameter and operation, and what it
is here. The table itself is surface.txt; test_surface.py checks it against the code, page.py writes it into
tutorials/coming_from_sglang.md.

In `where`, to be looked up, stand: a name of the package; "module:name" in one of its modules; "name(word)",
a parameter; names that begin with state., group., program., config., view., endpoint. or openai. belong to
such an object. Nothing stands there for what is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast

Status: TypeAlias = Literal["same", "different", "refused"]

TABLE = Path(__file__).with_name("surface.txt")
NAMES = "Public names"
"""The section of the names that `import ... as sgl` gives."""


@dataclass(frozen=True, slots=True)
class Row:
    section: str
    said: str
    where: str
    status: Status
    note: str


def rows() -> list[Row]:
    """Raises ValueError for a line that is no row."""
    found: list[Row] = []
    section = ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section = line.removeprefix("#").strip()
        elif line.strip() and not line.startswith(";"):
            parts = [part.strip() for part in line.split("|")]
            if len(parts) != 4 or parts[2] not in ("same", "different", "refused"):
                raise ValueError(f"{line!r} is no row")
            found.append(Row(section, parts[0], parts[1], cast(Status, parts[2]), parts[3]))
    return found

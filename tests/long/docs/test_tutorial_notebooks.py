"""process/docs/test_tutorial_notebooks.py, at length."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.docs.test_tutorial_notebooks import ROOMS, check


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_the_notebooks_of_a_room_print_what_they_show(room: Path) -> None:
    """In one kernel, one after the other."""
    check(room, timeout=390)

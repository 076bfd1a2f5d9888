"""process/constraints/test_hostile_constraints.py, at length."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest

from tests.process.constraints.test_hostile_constraints import (
    HOSTILE,
    JSON,
    Others,
    body_of,
    deep,
    hostile_server,
)
from tests.process.constraints.test_hostile_constraints import (
    test_all_are_refused_or_answered_while_others_go_on as check_all,
)
from tests.process.patience import PATIENCE_S, until


@pytest.mark.timeout(1800)
def test_many_hostile_ones_at_once(hostile_server):
    """Those that take long to refuse, all at once and each time a new one, with free requests beside them."""
    names = [
        "counter of counters",
        "the n-th from the end",
        "many tails",
        "wide classes",
        "doubling references",
        "100,000 strings",
        "3,000 properties",
        "oneOf 20 deep",
    ]
    answers: dict[str, httpx.Response] = {}

    def send(name: str) -> None:
        field, value, _ = HOSTILE[name]
        if field == "regex":
            value = f"{value}|zz"
        with httpx.Client(base_url=hostile_server.url, timeout=PATIENCE_S) as client:
            answers[name] = client.post("/generate", content=body_of(field, value), headers=JSON)

    threads = [threading.Thread(target=send, args=(name,), daemon=True) for name in names]
    with Others(hostile_server.url) as others:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        until(lambda: others.seconds)
    assert set(answers) == set(names)
    for name, answer in answers.items():
        assert answer.status_code in (200, 400, 504), (name, answer.text[:300])
    assert not others.failures, others.failures[:3]


@pytest.mark.timeout(1800)
def test_all_are_refused_or_answered_while_others_go_on(hostile_server: Any) -> None:
    check_all(hostile_server, list(HOSTILE))

"""Failure injection: rates from text, and faults that are really made."""

from __future__ import annotations

import pytest

from runtime.disagg.transfer.faults import VARIABLE, FaultRates, Faults
from runtime.protocol.errors import BadRequest


def test_rates_of_the_environment() -> None:
    assert Faults.of_environment({}) is None
    found = Faults.of_environment({VARIABLE: "corrupt=0.5,cut=1,seed=7,delay_s=3"})
    assert found is not None
    assert found.rates == FaultRates(corrupt=0.5, cut=1.0, seed=7, delay_s=3.0)
    for bad in ("corrupt", "corrupt=x", "corrupt=2", "corrupt=-1", "rate=1"):
        with pytest.raises(BadRequest, match="no chance of a fault"):
            Faults.of_environment({VARIABLE: bad})


def test_they_happen_as_often_as_they_should() -> None:
    faults = Faults(FaultRates(corrupt=0.25, damage=1.0, seed=1))
    data = bytes(range(256))
    damaged = sum(bytes(faults.on_piece(memoryview(data))) != data for _ in range(1000))
    assert damaged == faults.counts["corrupt"]
    assert 180 < damaged < 320
    for _ in range(50):
        row = faults.on_row(data)
        assert row is not None
        assert row != data
        assert row[:8] == data[:8]  # another room's row is another fault
    assert Faults(FaultRates(lose=1.0)).on_row(data) is None
    assert not faults.happens("cut")

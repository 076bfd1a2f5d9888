"""What the language's quick paths must not lose: wake-ups, and the difference between equal words."""

from __future__ import annotations

import threading

import pytest

import sglang_dsl as sgl
from sglang_dsl.concurrency.streams import Signal

LONG_S = 300.0


@pytest.mark.parametrize("already", [True, False])
def test_when_calls_once(already: bool) -> None:
    signal, ready, called = Signal(), [already], []
    signal.when(lambda: ready[0], lambda: called.append(1))
    assert called == [1] * already
    signal.notify()
    assert called == [1] * already
    ready[0] = True
    signal.notify()
    signal.notify()
    assert called == [1]


def test_no_reader_is_forgotten() -> None:
    signal, reached, left = Signal(), [0], []

    def read(number: int) -> None:
        signal.wait(lambda: reached[0] >= number)
        left.append(number)

    threads = [threading.Thread(target=read, args=(n % 200,), daemon=True) for n in range(400)]
    for thread in threads[:200]:
        thread.start()
    for number in range(200):
        reached[0] = number
        signal.notify()
        threads[200 + number].start()
    for thread in threads:
        thread.join(LONG_S)
    assert len(left) == 400


def test_a_wait_with_a_deadline_leaves_nothing_behind() -> None:
    signal = Signal()
    assert not signal.wait_for(lambda: False, 0.001)
    assert not signal.wait_for(lambda: False, -1.0)
    assert signal._wakers == []


def test_words_that_are_equal_are_not_the_same() -> None:
    assert sgl.gen("a", max_tokens=1).sampling.max_tokens == 1
    with pytest.raises(sgl.BadProgram):
        sgl.gen("a", max_tokens=True)
    with pytest.raises(sgl.BadProgram):
        sgl.gen("a", max_tokens=1.5)
    assert type(sgl.gen("a", max_tokens=1.0).sampling.max_tokens) is int  # whole floats are numbers
    assert sgl.gen("a", temperature=1).sampling.temperature == 1.0
    assert sgl.gen("a", ignore_eos=True).sampling.ignore_eos is True
    with pytest.raises(sgl.BadProgram):
        sgl.gen("a", ignore_eos=1)

"""run_batch(engine="ray"): what it refuses, and, with a Ray started here, that nothing is lost or done twice
when workers or the driver are killed. What runs on Ray runs in processes of its own: Ray stays connected."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl.errors import BadProgram
from sglang_dsl.interpreter.metering import Ask

# -- without a cluster ---------------------------------------------------------------------------------------


@sgl.function
def echo(s: Any, x: int) -> int:
    s += f"{x} " + sgl.gen("a")
    return x


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"batch_size": 1.5}, "batch_size must be at least 1, got 1.5"),
        ({"attempts": True}, "attempts must be at least 1, got True"),
        ({"cpus": -1}, "cpus must be at least 0, got -1"),
        ({"gpus": float("nan")}, "gpus must be at least 0, got nan"),
    ],
)
def test_values_that_make_no_sense_are_told(words: dict[str, Any], said: str) -> None:
    with pytest.raises(BadProgram, match=said):
        sgl.RayData(**words)


def test_an_engine_is_a_known_one() -> None:
    with pytest.raises(KeyError, match="unknown batch engine 'rye'; known: ray"):
        echo.run_batch([{"x": 1}], engine="rye")
    with pytest.raises(BadProgram, match="engine must be one of local, ray, or an object"):
        echo.run_batch([{"x": 1}], engine=7)


def test_a_program_runs_no_batch_on_the_cluster() -> None:
    @sgl.function
    def outer(s: Any) -> None:
        echo.run_batch([{"x": 1}], engine="ray")

    with pytest.raises(BadProgram, match="run the batch outside of it"):
        outer.run(backend=sgl.MockBackend())


def test_an_endpoint_travels_with_its_key_and_is_not_looked_for() -> None:
    made = sgl.RuntimeEndpoint("http://127.0.0.1:9/", "secret", timeout=7, lazy=True)
    there = pickle.loads(pickle.dumps(made))  # noqa: S301 - made here
    assert (there.base_url, there.timeout, there.identity) == ("http://127.0.0.1:9", 7, made.identity)
    assert there._arguments == made._arguments
    assert "secret" not in repr(there)


def test_a_budget_of_several_workers_gives_room_and_takes_it_back() -> None:
    keeper = pytest.importorskip("sglang_dsl.execution.ray_worker").Keeper
    ask = Ask(fresh=2, most=8)
    tokens = keeper(None, None, 1, sgl.Budget(tokens=12))
    assert tokens.reserve(ask, 60.0) == (0, 8)
    assert tokens.reserve(ask, 60.0) is None
    tokens.charge({"prompt_tokens": 2, "completion_tokens": 3})
    tokens.release(0, True)
    assert tokens.reserve(ask, -1.0) == (1, 5)  # what is left
    # The room of a call that is long over: its worker has died.
    assert tokens.reserve(ask, 60.0) == (2, 5)
    tokens.charge({"prompt_tokens": 2, "completion_tokens": 5})
    assert tokens.reserve(ask, 60.0) == "the budget is used up: 12 of 12 tokens"
    calls = keeper(None, None, 1, sgl.Budget(calls=2))
    assert [calls.reserve(ask, 60.0) is None for _ in range(2)] == [False, False]
    calls.release(0, False)  # it was not made
    assert calls.reserve(ask, 60.0) == (2, 8)
    assert "2 of 2 calls" in calls.reserve(ask, 60.0)


# -- with one ------------------------------------------------------------------------------------------------

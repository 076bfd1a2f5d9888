"""Tables as items of a batch: pandas' frames, datasets' tables and streams, read a row at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl import BadProgram, MockBackend, gen
from sglang_dsl.execution.results import FrameRows

pandas = pytest.importorskip("pandas", reason="pandas is not installed (the extra `dev`)")


@sgl.function
def echo(s: Any, question: str, size: int = 0) -> Any:
    s += f"{question} {size} " + gen("a")
    return question, size


def backend() -> MockBackend:
    return MockBackend(lambda call: "got " + str(call.prompt.plain_text))


def frame(count: int = 3) -> Any:
    index = [f"row {i}" for i in range(count)]
    return pandas.DataFrame({"question": [f"q{i}" for i in range(count)], "size": range(count)}, index=index)


def test_a_frame() -> None:
    states = echo.run_batch(frame(), backend=backend())
    assert [s.ret_value for s in states] == [("q0", 0), ("q1", 1), ("q2", 2)]
    assert type(states[0].ret_value[1]) is int
    assert [s["a"] for s in states] == ["got q0 0 ", "got q1 1 ", "got q2 2 "]
    assert echo.run_batch(frame(0), backend=backend()) == []


def test_a_frame_in_async_code() -> None:
    async def program() -> list[Any]:
        return [s.ret_value async for s in echo.arun_batch(frame(), backend=backend())]

    assert asyncio.run(program()) == [("q0", 0), ("q1", 1), ("q2", 2)]


def test_rows_are_made_when_they_are_read() -> None:
    rows = FrameRows(frame(1000))
    assert len(rows) == 1000
    read = iter(rows)
    assert next(read) == {"question": "q0", "size": 0}


def test_a_column_that_the_program_does_not_take() -> None:
    with pytest.raises(TypeError, match="label"):
        echo.run_batch(frame().assign(label=1), backend=backend())


def test_a_dataset_and_a_stream_of_one() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (the extra `dev`)")
    table = datasets.Dataset.from_pandas(frame(), preserve_index=False)
    assert [s.ret_value for s in echo.run_batch(table, backend=backend())] == [
        ("q0", 0),
        ("q1", 1),
        ("q2", 2),
    ]
    read = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal read
        for i in range(10_000):
            read += 1
            yield {"question": f"q{i}", "label": i}

    stream = datasets.IterableDataset.from_generator(rows).select_columns(["question"])
    states = echo.run_batch(stream, backend=backend(), generator_style=True, num_threads=2)
    assert next(states).ret_value == ("q0", 0)
    states.close()
    assert read < 1000
    with pytest.raises(BadProgram, match="a list of items"):
        echo.run_batch(datasets.DatasetDict({"test": table}), backend=backend())

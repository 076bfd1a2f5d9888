"""The table in surface.txt is true: every name resolves, every parameter is in its signature, what is said to
be refused is, and every sampling word works on the mock or on the bundled model."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import sglang_dsl as sgl
from runtime.api import Engine
from runtime.protocol.errors import BadRequest
from sglang_dsl import MockBackend
from sglang_dsl.function import RUN_OPTIONS
from sglang_dsl.interpreter.parameters import PARAMETERS
from tests.unit.sglang_dsl.conformance.parts import TRIES
from tests.unit.sglang_dsl.conformance.surface import NAMES, Row, rows


@sgl.function
def program(s: Any) -> None:
    s += sgl.user("Hi") + sgl.assistant(sgl.gen("x", max_tokens=2))


def objects() -> dict[str, Any]:
    state = program.run(backend=MockBackend())
    return {
        "state": state,
        "group": state.fork(2),
        "program": program,
        "config": sgl.global_config,
        "view": state.stream_executor,
        "endpoint": sgl.RuntimeEndpoint("http://127.0.0.1:1", lazy=True),
        "openai": sgl.OpenAI("m", api_key="k"),
    }


def find(path: str, held: dict[str, Any]) -> Any:
    """What a `where` means. Raises AttributeError."""
    module, _, name = path.rpartition(":")
    if module:
        return getattr(importlib.import_module(f"sglang_dsl.{module}"), name)
    first, *rest = path.split(".")
    if first == "Engine":
        found: Any = Engine
    else:
        found = held[first] if first in held else getattr(sgl, first)
    for part in rest:
        found = getattr(found, part)
    return found


def takes(owner: str, found: Any, word: str) -> bool:
    if owner == "SglFunction.run":
        return word in RUN_OPTIONS
    if owner in ("gen_int", "gen_string") and word in PARAMETERS:
        return True
    return word in inspect.signature(found).parameters


@pytest.mark.parametrize("row", [row for row in rows() if row.status != "refused"], ids=lambda row: row.said)
def test_it_is_there(row: Row) -> None:
    held = objects()
    places = re.findall(r"[\w.:]+(?:\(\w+\))?", row.where)
    assert places
    for place in places:
        owner, _, word = place.rstrip(")").partition("(")
        found = find(owner, held)
        assert not word or takes(owner, found, word), f"{owner} takes no {word}"


def nested() -> None:
    sgl.function(lambda s: s.__iadd__(sgl.user(sgl.assistant("x")))).run(backend="mock")


def unknown_setting() -> None:
    sgl.global_config.anything_else = 1  # type: ignore[attr-defined]


REFUSED: dict[str, Callable[[], Any]] = {
    "f.pin_prefix_rid": lambda: program.pin_prefix_rid,  # type: ignore[attr-defined]
    "nested turns": nested,
    "global_config.anything_else =": unknown_setting,
    "a backend's other hooks (begin_program, fill_image, ...)": lambda: MockBackend().begin_program,  # type: ignore[attr-defined]
}


def test_what_is_refused_is_refused() -> None:
    assert REFUSED.keys() == {row.said for row in rows() if row.status == "refused"}
    for said, attempt in REFUSED.items():
        with pytest.raises((AttributeError, sgl.SglError)):  # noqa: PT012 - says which was not
            attempt()
            pytest.fail(f"{said} is not refused")


def test_the_34_public_names_are_all_there_and_exported() -> None:
    names = [row.said for row in rows() if row.section == NAMES]
    assert len(names) == len(set(names)) == 34
    assert set(names) <= set(sgl.__all__)


def test_every_difference_says_what_it_is() -> None:
    assert [row.said for row in rows() if row.status != "same" and not row.note] == []
    said = [row.said for row in rows()]
    assert len(said) == len(set(said))


VALUES: dict[str, Any] = {
    "max_tokens": 3, "min_tokens": 1, "n": 2, "stop": ["\n"], "stop_token_ids": [5], "stop_regex": "[.]",
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "frequency_penalty": 0.5,
    "presence_penalty": 0.5, "ignore_eos": True, "return_logprob": True, "logprob_start_len": 0,
    "top_logprobs_num": 2, "return_text_in_logprobs": True, "dtype": int, "choices": ["a", "b"],
    "regex": "[ab]+", "json_schema": '{"type": "integer"}', "skip_special_tokens": False,
    "no_stop_trim": True, "logit_bias": {5: 1.5, 3: -2},
}  # fmt: skip
NOT_ON_THE_MOCK = {
    "stop_token_ids", "stop_regex", "logprob_start_len", "top_logprobs_num",
    "logit_bias",
}  # fmt: skip
"""The mock says so: Unsupported."""


@pytest.mark.parametrize("word", VALUES)
def test_every_word_of_gen_works(word: str, backend: Any) -> None:
    more = {"return_logprob": True} if "logprob" in word else {}
    words = {"max_tokens": 4, **more, word: VALUES[word]}
    if word == "choices":
        del words["max_tokens"]
    one = sgl.function(lambda s: s.__iadd__("1 + 1 =" + sgl.gen("x", **words)))
    if backend.name == "mock" and word in NOT_ON_THE_MOCK:
        with pytest.raises(sgl.Unsupported):
            one.run(backend=backend)["x"]
        return
    state = one.run(backend=backend)
    assert isinstance(state["x"], list if word == "n" else str)
    meta = state.get_meta_info("x")
    if word == "return_logprob":
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    if word in RUN_OPTIONS and word not in ("n", "return_logprob"):
        # The same as a default of the run.
        plain = sgl.function(lambda s: s.__iadd__("1 + 1 =" + sgl.gen("x", max_tokens=4, **more)))
        assert isinstance(plain.run(backend=backend, **{word: VALUES[word]})["x"], str)


def test_every_word_of_the_table_is_tried() -> None:
    said = {word for row in rows() for word in re.findall(r"\bgen\((\w+)\)", row.where)}
    assert said - {"name", "choices_method"} <= VALUES.keys()


def test_settings_do_something(pocket: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sgl.global_config.verbosity = 2
    state = program.run(backend=MockBackend(["done"]))
    assert capsys.readouterr().out == state.text() + "\n"
    sgl.global_config.verbosity = 0
    sgl.global_config.skip_special_tokens_in_output = False
    calls = MockBackend(["done"])
    program.run(backend=calls).sync()
    assert calls.calls[0].sampling.skip_special_tokens is False
    assert not sgl.global_config.skip_special_tokens_in_output
    assert program.run(backend=pocket)["x"] is not None
    for name in (
        "enable_parallel_encoding",
        "spaces_between_special_tokens_in_out",
    ):
        setattr(sgl.global_config, name, False)
        with pytest.raises(sgl.BadProgram, match="not supported"):
            setattr(sgl.global_config, name, True)


def test_without_threads_each_addition_waits_and_raises(backend: Any) -> None:
    from tests.unit.sglang_dsl.conformance.parts import Watched

    reached: list[str] = []

    @sgl.function
    def inline(s: Any) -> None:
        s += "a" + sgl.gen("x", max_tokens=2)
        reached.append("after the first")
        forks = s.fork(2)
        forks += sgl.gen("y", max_tokens=2)
        reached.append("after the forks")

    with pytest.raises(sgl.BackendError, match="down"):
        inline.run(backend=Watched(backend, errors={1: OSError("down")}), use_thread=False)
    assert reached == ["after the first"]
    streamed = inline.run(backend=backend, use_thread=False, stream=True)
    assert "".join(streamed.text_iter("x")) == streamed["x"]

    @sgl.function
    async def coroutine(s: Any) -> None:
        s += sgl.gen("x")

    with pytest.raises(sgl.BadProgram, match="async"):
        coroutine.run(backend=backend, use_thread=False)


def test_the_executor_of_a_state_shows_what_the_state_has(backend: Any) -> None:
    state = program.run(backend=backend)
    view = state.stream_executor
    assert view.variables == {"x": state["x"]} == {"x": view.get_var("x")}
    assert (view.text_, view.messages_) == (state.text(), state.messages())
    assert view.get_meta_info("x", timeout=300) == view.meta_info["x"] == state.get_meta_info("x")
    assert view.get_meta_info("nothing") is None
    assert list(view.variable_event) == ["x"]
    assert view.variable_event["x"].wait(300)
    assert view.variable_event["x"].is_set()
    view.submit(sgl.user("More"))
    assert state.messages()[-1]["content"] == "More"
    slow = program.run(backend=MockBackend(delay_s=3600))
    with pytest.raises(TimeoutError):
        slow.stream_executor.get_meta_info("x", timeout=0.01)
    assert not slow.stream_executor.variable_event["x"].wait(0.01)
    slow.cancel()


def test_an_engine_is_used_as_sglangs(pocket: Any) -> None:
    import asyncio

    params = {"max_new_tokens": 4, "temperature": 0}
    output = pocket.generate("The ruler of", params)
    assert output["text"] == output.text
    assert output["meta_info"]["completion_tokens"] == 4
    with pytest.raises(KeyError):
        output["nothing"]
    most = 0
    for _ in range(TRIES):
        chunks = list(pocket.generate("The ruler of", params, stream=True))
        assert chunks[-1].text == output.text
        if (most := max(most, len(chunks))) > 1:
            break
    assert most > 1
    left = pocket.generate("The ruler of", {"max_new_tokens": 1500, "ignore_eos": True}, stream=True)
    next(left)
    left.close()  # aborts the request
    with pytest.raises(BadRequest, match="one prompt"):
        pocket.generate(["a", "b"], params, stream=True)

    async def both() -> tuple[str, str]:
        whole = await pocket.async_generate("The ruler of", params)
        pieces = [one async for one in await pocket.async_generate("The ruler of", params, stream=True)]
        return whole.text, pieces[-1].text

    assert asyncio.run(both()) == (output.text, output.text)
    assert sgl.utils.stream_and_merge(pocket, "The ruler of", params) == output.text

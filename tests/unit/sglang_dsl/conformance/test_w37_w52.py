"""What sglang's frontend lacks and this one must have, by its numbers (W37-W52)."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
import time
import tomllib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sglang_dsl as sgl
from runtime.protocol.sampling import SamplingParams
from sglang_dsl import hooks
from sglang_dsl.backends.base import Backend, Call
from tests.unit.sglang_dsl.conformance.parts import Watched, within

ROOT = Path(__file__).resolve().parents[4]


@sgl.function
def ask(s: Any, question: str = "Who rules?") -> None:
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("x", max_tokens=4))


def test_w37_programs_may_be_async_and_threads_do_not_grow_with_them(backend: Backend) -> None:
    @sgl.function
    async def program(s: Any, number: int) -> str:
        s += f"{number}:"
        async with s.fork(4) as forks:
            forks += sgl.gen("x", max_tokens=1)
        return str(await s["x"])

    async def many() -> list[str]:
        return [
            state.ret_value async for state in program.arun_batch([(n,) for n in range(40)], backend=backend)
        ]

    ask.run(backend=backend).sync()
    before = threading.active_count()
    most = 0

    def watch(_: Any) -> None:
        nonlocal most
        most = max(most, threading.active_count())

    with hooks.subscribed(watch):
        assert len(within(lambda: asyncio.run(many()))) == 40
    assert most <= before + 4


def test_w38_calls_have_deadlines_and_programs_can_be_cancelled(backend: Backend) -> None:
    slow = Watched(backend, delay_s=3600)
    with pytest.raises(sgl.Timeout) as caught:
        within(lambda: ask.run(backend=slow, timeout=0.05)["x"])
    assert caught.value.retryable

    def under_way(calls: int) -> None:
        while len(slow.calls) < calls:
            time.sleep(0.001)

    for wait in (False, True):
        before = len(slow.calls)
        state = ask.run(backend=slow)
        if wait:
            within(lambda before=before: under_way(before + 1))
        state.cancel()
        with pytest.raises(sgl.ProgramCancelled):
            within(lambda state=state: state["x"])


def test_w39_values_have_types(backend: Backend) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Age: " + sgl.gen("age", int, max_tokens=6) + "\nLikes tea: " + sgl.gen("tea", bool)

    state = program.run(backend=backend, temperature=0)
    assert type(state["age"]) is int
    assert type(state["tea"]) is bool
    assert state.raw("age").strip() == str(int(state.raw("age")))


def test_w40_there_are_turns_of_tools_developers_and_any_role_and_tools_are_not_swallowed(
    backend: Backend,
) -> None:
    watched = Watched(backend, texts=["done"])

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.developer("Be exact.") + sgl.user("6*7?") + sgl.tool("42") + sgl.role("critic", "Hm.")
        s += sgl.assistant(sgl.gen("x"))

    assert program.run(backend=watched)["x"] == "done"
    roles = [message.role for message in watched.calls[0].prompt.messages]
    assert roles == ["developer", "user", "tool", "critic", "assistant"]
    with pytest.raises(TypeError, match="tools"):
        sgl.gen("x", tools=[])  # type: ignore[call-overload]


def test_w41_several_pictures_sounds_and_addresses(backend: Backend) -> None:
    watched = Watched(backend, texts=["nice"])
    png = b"\x89PNG\r\n\x1a\n"

    @sgl.function
    def program(s: Any) -> None:
        both = sgl.image(png) + sgl.image("https://example.org/a.png") + sgl.audio(b"ID3") + "What?"
        s += sgl.user(both) + sgl.assistant(sgl.gen("x"))

    assert program.run(backend=watched)["x"] == "nice"
    content: Any = watched.calls[0].prompt.messages[0].content
    assert [part["type"] for part in content] == ["image_url", "image_url", "audio_url", "text"]
    assert content[1]["image_url"]["url"] == "https://example.org/a.png"


def test_w42_turns_travel_as_turns_and_the_checkpoint_says_how_they_are_written(pocket: Any) -> None:
    state = ask.run(backend=pocket)
    rendered = pocket.chat_template.get_prompt([{"role": "user", "content": "Who rules?"}])
    opened = rendered + pocket.chat_template.role_prefix_and_suffix["assistant"][0]
    assert state.get_meta_info("x")["prompt_tokens"] == len(pocket.encode(opened))
    assert pocket.template_choice.name != "default"
    marks = pocket.chat_template.role_prefix_and_suffix["assistant"][0]
    # Marks in a user's text are text: they open no turn.
    forged = ask.run(f"Hi{marks}", backend=pocket)
    assert [m["role"] for m in forged.messages()] == ["user", "assistant"]
    counts = forged.get_meta_info("x")["prompt_tokens"]
    plain = ask.run("Hi", backend=pocket).get_meta_info("x")["prompt_tokens"]
    assert counts - plain > len(pocket.encode(marks)) or not marks.strip()


def test_w42_messages_reach_the_backend_as_they_were_written(backend: Backend) -> None:
    watched = Watched(backend)
    ask.run(backend=watched).sync()
    assert [(m.role, m.content, m.open) for m in watched.calls[0].prompt.messages] == [
        ("user", "Who rules?", False),
        ("assistant", "", True),
    ]


def test_w43_hooks_see_every_call(backend: Backend, idle: Callable[[], int]) -> None:
    seen: list[Any] = []
    assert idle() == 0  # calls that others have left would be seen, too
    with hooks.subscribed(seen.append):
        ask.run(backend=backend).sync()
    assert [one.phase for one in seen] == ["begin", "end"]
    assert (seen[1].kind, seen[1].name, seen[1].backend) == ("gen", "x", backend.name)
    assert seen[1].meta["completion_tokens"] > 0
    assert seen[1].source.file == __file__


def test_w44_choices_have_probabilities(backend: Backend) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Is it?" + sgl.select("x", [" yes", " no", " maybe"])

    choice = program.run(backend=backend).choice("x")
    assert sum(choice.probabilities) == pytest.approx(1)
    assert choice.probability == max(choice.probabilities)
    assert choice.text == choice.options[choice.index]
    assert 0 <= choice.margin <= 1


def test_w45_batches_are_lazy_keep_good_results_and_go_on_where_they_were(
    backend: Backend, tmp_path: Path
) -> None:
    taken: list[int] = []

    def items() -> Iterator[dict[str, Any]]:
        for number in range(30):
            taken.append(number)
            yield {"question": f"Question {number}"}

    results = ask.run_batch(items(), backend=backend, generator_style=True, num_threads=3)
    next(results)
    assert len(taken) < 30
    results.close()
    six = [{"question": str(number)} for number in range(6)]
    broken = Watched(backend, errors={2: OSError("down")})
    kept = ask.run_batch(six, backend=broken, num_threads=1, on_error="return", resume=tmp_path)
    assert [isinstance(one, sgl.BackendError) for one in kept] == [False, False, True, False, False, False]
    again = Watched(backend)
    assert all(state["x"] is not None for state in ask.run_batch(six, backend=again, resume=tmp_path))
    assert len(again.calls) == 1
    unordered = ask.run_batch(six, backend=backend, generator_style=True, ordered=False)
    assert sorted(state.index for state in unordered) == list(range(6))


def test_w46_items_of_a_batch_draw_differently(backend: Backend) -> None:
    watched = Watched(backend)
    hot: dict[str, Any] = {"temperature": 3.0, "seed": 5}
    states = ask.run_batch([{}] * 8, backend=watched, **hot)
    seeds = [call.sampling.seed for call in watched.calls if isinstance(call, Call)]
    assert len(set(seeds)) == 8
    if backend.name == "engine":
        assert len({state["x"] for state in states}) > 2
    again = ask.run_batch([{}] * 8, backend=backend, **hot)
    assert [state["x"] for state in again] == [state["x"] for state in states]


def test_w47_runs_are_recorded_and_replayed_and_seeds_repeat_them(backend: Backend, tmp_path: Path) -> None:
    first = ask.run(backend=backend, cache="rw", cache_dir=tmp_path)
    said = first.text()
    silent = Watched(backend, errors={0: AssertionError("asked")})
    assert ask.run(backend=silent, cache="ro", cache_dir=tmp_path).text() == said
    assert silent.calls == []
    seen = Watched(backend)
    drawn = [ask.run(backend=seen, temperature=1.0, seed=11)["x"] for _ in range(2)]
    assert drawn[0] == drawn[1]
    seeds = [call.sampling.seed for call in seen.calls if isinstance(call, Call)]
    assert seeds[0] is not None
    assert seeds[0] == seeds[1]


def test_w48_the_language_is_light() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = " ".join(project["dependencies"]).lower()
    assert not [name for name in ("torch", "transformers", "cuda", "flash", "ipython") if name in needed]
    code = "import sys, sglang_dsl; print([m for m in ('torch', 'numpy', 'IPython') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == "[]"


NOT_WORDS = {
    "n", "custom_logit_processor", "custom_params", "stream_interval", "spaces_between_special_tokens",
}  # fmt: skip
"""Fields of SamplingParams that gen has no word for; everything else must have one."""


def test_w49_what_the_server_can_do_the_language_can_say(backend: Backend) -> None:
    names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
    fields = {names.get(name, name) for name in SamplingParams.__struct_fields__} - NOT_WORDS
    said = sgl.gen("x", **dict.fromkeys(fields))  # raises for a word it does not know
    assert said == sgl.gen("x")
    for word, value in {"ebnf": 'root ::= "a" | "b"', "json_schema": {"enum": ["a", "b"]}}.items():
        watched = Watched(backend, texts=["a"])
        program = sgl.function(
            lambda s, word=word, value=value: s.__iadd__("Say:" + sgl.gen("x", **{word: value}))
        )
        assert program.run(backend=watched)["x"] == "a"
        call = watched.calls[0]
        assert isinstance(call, Call)
        assert call.constraint is not None
        assert call.constraint.kind == word


def test_w49_biases_and_whole_stops_reach_the_model(pocket: Any) -> None:
    token = pocket.encode(" Z")[-1]

    @sgl.function
    def program(s: Any) -> None:
        s += "The ruler of" + sgl.gen("x", max_tokens=3, logit_bias={token: 100})
        s += ". One, two" + sgl.gen("y", max_tokens=16, regex=", three", stop="three", no_stop_trim=True)

    state = program.run(backend=pocket, temperature=0)
    assert state["x"] == pocket.decode([token]) * 3
    assert state["y"] == ", three"
    traced = program.trace()
    assert type(traced).from_json(traced.to_json()) == traced
    with pytest.raises(sgl.BadProgram, match="token ids"):
        sgl.gen("x", logit_bias={"a": 1.0})  # type: ignore[call-overload]


def test_w50_shared_text_is_warmed_once_and_offsets_are_looked_at(backend: Backend) -> None:
    watched = Watched(backend)

    @sgl.function
    def program(s: Any, offsets: Any) -> None:
        s += "A text that all forks share. "
        forks = s.fork(3, offsets)
        forks += lambda i: f"Fork {i}:" + sgl.gen("x", max_tokens=2)
        forks.join()

    assert len(program.run([0, 10, 20], backend=watched)["x"]) == 3
    assert [prompt.plain_text for prompt in watched.commits] == ["A text that all forks share. "]
    with pytest.raises(sgl.BadProgram, match="offsets"):
        program.run([1], backend=backend)


def emptied(engine: Any) -> None:
    """Its cache, once what others have cancelled is gone."""
    while not engine.flush_cache():
        time.sleep(0.01)


@pytest.mark.parametrize("precache", [True, False])
def test_w50_what_the_prompts_of_a_batch_share_is_computed_once(pocket: Any, precache: bool) -> None:
    sgl.global_config.enable_precache_with_tracing = precache

    @sgl.function
    def program(s: Any, number: int) -> None:
        # An f-string with an argument in it, which tracing in sglang forbids.
        s += f"Answer shortly and to the point. {'Item: ' + 'x ' * 40}{number}" + sgl.gen("x", max_tokens=1)

    within(lambda: emptied(pocket))
    states = program.run_batch([(number,) for number in range(6)], backend=pocket, num_threads=1)
    cached = [state.get_meta_info("x")["cached_tokens"] for state in states]
    whole = [state.get_meta_info("x")["prompt_tokens"] for state in states]
    assert cached[0] == 0
    assert all(found > 0.9 * size for found, size in zip(cached[1:], whole[1:], strict=True))


def test_w51_the_engine_is_a_backend_and_called_programs_take_their_callers(
    backend: Backend, pocket: Any
) -> None:
    @sgl.function
    def outer(s: Any) -> None:
        s["inner"] = ask("What?")["x"]
        s += "Then:" + sgl.gen("y", max_tokens=2)

    assert ask.run(backend=pocket)["x"] is not None  # the Engine itself
    watched = Watched(backend)
    state = outer.run(backend=watched, temperature=0.25)
    assert state["inner"] is not None
    assert state["y"] is not None
    temperatures = [call.sampling.temperature for call in watched.calls if isinstance(call, Call)]
    assert temperatures == [0.25, 0.25]


def test_w52_forks_that_nobody_joins_hold_no_thread_and_go_away(backend: Backend, young: None) -> None:
    state = ask.run(backend=backend)
    state.sync()
    before = set(threading.enumerate())
    kept = state.fork(40)
    kept += sgl.user("And?") + sgl.assistant("It is so.")
    for fork in kept:
        fork.sync()
    assert len(set(threading.enumerate()) - before) <= 2
    gone = weakref.ref(kept[0].core)
    del kept, fork
    gc.collect()
    assert gone() is None
    assert json.dumps(state.messages())

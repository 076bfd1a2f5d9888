"""Tools in programs: what a model is told of them, how its calls are run, and who is told what came of it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from sglang_dsl.conversation.requests import Call, Completion
from sglang_dsl.errors import BadProgram, ReplayMiss, ToolError, ToolLoopLimit, Unsupported

WAIT_S = 300.0


def calls(*made: tuple[str, Any], text: str = "") -> Completion:
    """A reply that calls tools."""
    told = [
        {"id": f"id{at}", "name": name, "arguments": said if isinstance(said, str) else json.dumps(said)}
        for at, (name, said) in enumerate(made)
    ]
    return Completion((text,), {"tool_calls": told})


def weather(city: str, unit: Literal["C", "F"] = "C") -> dict[str, Any]:
    """The weather of a city."""
    return {"city": city, "degrees": 21 if unit == "C" else 70}


@sgl.function
def ask(s: Any, tools: Any, question: str = "Well?", limit_s: float = WAIT_S, **words: Any) -> Any:
    s += sgl.tools(tools)
    s += sgl.user(question)
    with s.tool_loop(timeout=limit_s, **words) as loop:
        s += sgl.assistant(sgl.gen("answer"))
    return loop


def told(state: Any) -> list[str]:
    return [turn["content"] for turn in state.messages() if turn["role"] == "tool"]


# -- what a model is told ------------------------------------------------------------------------------------


class Point(pydantic.BaseModel):
    """A place."""

    x: int
    title: str = "here"


def said_of(tool: Any) -> dict[str, Any]:
    [text] = sgl.tools(tool).tools
    found: dict[str, Any] = json.loads(text)
    assert found["type"] == "function"
    return dict(found["function"])


def test_a_function_is_described_by_its_types_and_docstring() -> None:
    def draw(
        at: Point,
        names: list[str],
        size: Annotated[float, "In metres."] = 1.5,
        color: Literal["red", "blue"] | None = None,
    ) -> None:
        """Draw a thing.

        Slowly.
        """

    told = said_of(draw)
    assert (told["name"], told["description"]) == ("draw", "Draw a thing.\n\nSlowly.")
    schema = told["parameters"]
    assert list(schema)[:3] == ["type", "properties", "required"]
    assert schema["required"] == ["at", "names"]
    assert schema["properties"]["names"] == {"type": "array", "items": {"type": "string"}}
    assert schema["properties"]["size"] == {"type": "number", "default": 1.5, "description": "In metres."}
    assert schema["$defs"]["Point"]["properties"]["title"] == {"type": "string", "default": "here"}
    assert "additionalProperties" not in schema


def test_the_schema_of_a_plain_function_has_nothing_but_what_it_needs() -> None:
    def get_weather(city: str) -> str:
        """Weather of a city"""
        return city

    assert said_of(get_weather) == {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }


def test_types_and_schemas_are_tools_too() -> None:
    @dataclasses.dataclass
    class Pair:
        left: int
        right: int

    assert said_of(Point)["description"] == "A place."
    assert list(said_of(Pair)["parameters"]["properties"]) == ["left", "right"]
    schema = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    wanted = {"name": "find", "description": "Finds.", "parameters": schema}
    for given_as in (
        {"type": "function", "function": wanted},
        wanted,
        {"name": "find", "description": "Finds.", "input_schema": schema},
        sgl.Tool("find", "Finds.", schema),
    ):
        assert said_of(given_as) == wanted
    assert said_of(sgl.Tool("now"))["parameters"] == {"type": "object", "properties": {}}


class Box:
    def put(self, thing: str) -> str:
        """Put it in."""
        return f"{thing} is in"


def test_methods_are_called_on_their_objects() -> None:
    backend = sgl.MockBackend([calls(("put", {"thing": "a hat"})), "done"])
    assert told(ask.run([Box().put], backend=backend)) == ["a hat is in"]


def test_a_partial_function_keeps_its_name() -> None:
    told = said_of(functools.partial(weather, unit="F"))
    assert (told["name"], told["description"]) == ("weather", "The weather of a city.")


def untyped(a, b: int) -> None:  # type: ignore[no-untyped-def]
    pass


def starred(*names: str) -> None:
    pass


def odd(callback: threading.Lock) -> None:  # type: ignore[valid-type]
    pass


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (untyped, "needs a type for its parameter 'a'"),
        (starred, "takes \\*names"),
        (odd, "the tool odd cannot be described"),
        (lambda: 1, "give it another one with Tool"),
        ([weather, weather], "two tools are called 'weather'"),
        ({"type": "web_search"}, "a tool needs a name"),
        ({"name": "a", "parameters": 3}, "must be a JSON schema"),
        (3, "a tool is a typed function"),
        (None, "a tool is a typed function"),
        (int, "arguments by name|no JSON schema"),
        (sgl.Tool("has a blank"), "letters, digits"),
    ],
    ids=[
        "untyped",
        "starred",
        "odd",
        "lambda",
        "twice",
        "no name",
        "no schema",
        "number",
        "none",
        "int",
        "blank",
    ],
)
def test_what_is_no_tool_is_refused_at_once(wrong: Any, message: str) -> None:
    with pytest.raises(BadProgram, match=message):
        sgl.tools(wrong)


# -- the loop ------------------------------------------------------------------------------------------------


def test_a_call_is_run_and_the_model_goes_on_with_its_result() -> None:
    backend = sgl.MockBackend([calls(("weather", {"city": "Oslo"}), text="I look."), "It is mild."])
    state = ask.run([weather], backend=backend)
    assert state["answer"] == "It is mild."
    assert state.text() == (
        'USER: Well?\nASSISTANT: I look.\nweather({"city": "Oslo"})\n'
        'TOOL: {"city": "Oslo", "degrees": 21}\nASSISTANT: It is mild.\n'
    )
    call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert state.messages()[1:3] == [
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "id0", "type": "function", "function": call}],
        },
        {"role": "tool", "content": '{"city": "Oslo", "degrees": 21}', "tool_call_id": "id0"},
    ]
    [found] = state.tool_calls("answer")
    assert (found.name, found.arguments, found.failed) == ("weather", {"city": "Oslo"}, False)
    [step] = state.ret_value.steps
    assert (step.text, step.calls, step.variable) == ("I look.", (found,), "answer")
    first, second = backend.calls
    assert first.prompt.tools == second.prompt.tools
    assert second.prompt.messages[-2].tool_call_id == "id0"
    assert [one.kind for one in state.snapshot().calls] == ["gen", "tool", "gen"]
    assert state.usage()["calls"] == 2


def test_calls_of_one_reply_run_side_by_side_and_answer_in_order() -> None:
    both = threading.Barrier(2)

    def slow(n: int) -> int:
        both.wait(WAIT_S)  # fails unless the other one runs
        return n

    backend = sgl.MockBackend([calls(("slow", {"n": 1}), ("slow", {"n": 2})), "ok"])
    state = ask.run([slow], backend=backend)
    assert told(state) == ["1", "2"]
    ids = [turn["tool_call_id"] for turn in state.messages() if turn["role"] == "tool"]
    assert ids == ["id0", "id1"]


def test_an_async_program_runs_async_tools_on_its_own_loop() -> None:
    loops = []
    met = []

    async def meet(n: int) -> int:
        loops.append(asyncio.get_running_loop())
        met.append(n)
        while len(met) < 2:
            await asyncio.sleep(0)
        return n

    @sgl.function
    async def program(s: Any) -> Any:
        s += sgl.tools([meet])
        s += sgl.user("Go")
        with s.tool_loop() as loop:
            s += sgl.assistant(sgl.gen("answer"))
        return await loop.steps(), await s.tool_calls("answer")

    async def main() -> Any:
        backend = sgl.MockBackend([calls(("meet", {"n": 1}), ("meet", {"n": 2})), "ok"])
        state = await program(backend=backend)
        assert loops == [asyncio.get_running_loop()] * 2
        assert [turn["role"] for turn in await state.messages()] == [
            "user", "assistant", "tool", "tool", "assistant",
        ]  # fmt: skip
        return state.ret_value

    [step], made = asyncio.run(main())
    assert [call.result for call in made] == ["1", "2"]
    assert list(step.calls) == made


def test_async_tools_run_in_ordinary_programs() -> None:
    async def later(n: int) -> str:
        await asyncio.sleep(0)
        return f"got {n}"

    state = ask.run([later], backend=sgl.MockBackend([calls(("later", {"n": 4})), "ok"]))
    assert told(state) == ["got 4"]


def test_what_the_model_does_wrong_is_told_to_it() -> None:
    def add(a: int, b: int) -> int:
        return a + b

    wrong = calls(
        ("sub", {"a": 1}), ("add", {"a": 1}), ("add", {"a": "x", "b": 2}), ("add", {"a": 1, "b": 2, "c": 3}),
        ("add", '{"a": '), ("add", "[1]"), ("add", {"a": 1, "b": 2}),
    )  # fmt: skip
    for on_error in ("tell", "raise"):
        state = ask.run([add], on_error=on_error, backend=sgl.MockBackend([wrong, "ok"]))
        unknown, missing, no_number, more, broken, no_object, right = told(state)
        assert unknown == "Error: there is no tool 'sub'; the tools are add"
        assert missing == "Error: wrong arguments for add: b: Field required"
        assert "a: Input should be a valid integer" in no_number
        assert "c: Extra inputs are not permitted" in more
        assert "not JSON" in broken
        assert "not a JSON object" in no_object
        assert right == "3"
        assert [call.failed for call in state.tool_calls("answer")] == [True] * 6 + [False]


def test_arguments_of_a_schema_are_checked() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tool = sgl.Tool("twice", parameters=schema, run=lambda n: 2 * n)
    replies = [calls(("twice", {"n": "a"}), ("twice", {}), ("twice", {"n": 4})), "ok"]
    first, second, third = told(ask.run(tool, backend=sgl.MockBackend(replies)))
    assert "'a' is not of type 'integer'" in first
    assert "'n' is a required property" in second
    assert third == "8"


def test_an_error_of_a_tool_is_told_or_raised() -> None:
    def fails(why: str) -> None:
        raise KeyError(why)

    replies = [calls(("fails", {"why": "no key"})), "Sorry."]
    state = ask.run([fails], backend=sgl.MockBackend(replies))
    assert told(state) == ["Error: KeyError: 'no key'"]
    assert state["answer"] == "Sorry."
    state = ask.run([fails], on_error="raise", backend=sgl.MockBackend(replies))
    with pytest.raises(ToolError, match="the tool fails failed: 'no key'") as caught:
        state["answer"]
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.variable == "answer"


def test_a_slow_tool_is_given_up() -> None:
    end = threading.Event()

    def hangs() -> None:
        end.wait()

    async def waits() -> None:
        await asyncio.Event().wait()

    replies = [calls(("hangs", {}), ("waits", {})), "Sorry."]
    try:
        state = ask.run([hangs, waits], limit_s=0.05, backend=sgl.MockBackend(replies))
        assert told(state) == [
            "Error: hangs did not finish within 0.05 s", "Error: waits did not finish within 0.05 s",
        ]  # fmt: skip
        state = ask.run([hangs], limit_s=0.05, on_error="raise", backend=sgl.MockBackend(replies))
        with pytest.raises(ToolError, match="did not finish within"):
            state["answer"]
    finally:
        end.set()


def test_a_loop_ends() -> None:
    backend = sgl.MockBackend(lambda call: calls(("weather", {"city": "Oslo"})))
    state = ask.run([weather], max_steps=3, backend=backend)
    with pytest.raises(ToolLoopLimit, match="after 3 steps the model still calls weather"):
        state["answer"]
    assert len(state.ret_value.steps) == 3
    assert len(backend.calls) == 4


def test_choice_and_parallel_are_said_to_the_backend() -> None:
    backend = sgl.MockBackend([calls(("weather", {"city": "Oslo"})), "ok"])
    ask.run([weather], tool_choice="weather", parallel=False, backend=backend).sync()
    assert [(call.tool_choice, call.parallel_tools) for call in backend.calls] == [
        ("=weather", False), ("auto", False),
    ]  # fmt: skip


def test_a_reply_that_was_cut_off_calls_nothing() -> None:
    """Its arguments may be whole JSON by accident, or by somebody who completed them."""
    whole = calls(("weather", {"city": "Os"}), text="So:")
    cut = Completion(whole.texts, whole.meta | {"finish_reason": {"type": "length"}})
    ran: list[str] = []

    def weather(city: str) -> str:
        ran.append(city)
        return "sun"

    state = ask.run([weather], backend=sgl.MockBackend([cut]))
    assert (state["answer"], ran, told(state), state.tool_calls("answer")) == ("So:", [], [], [])
    assert state.get_meta_info("answer")["finish_reason"] == {"type": "length"}


def test_several_generations_in_one_loop_and_none_outside() -> None:
    @sgl.function
    def chat(s: Any) -> Any:
        s += sgl.tools([weather])
        with s.tool_loop() as loop:
            for name in ("a", "b"):
                s += sgl.user(name)
                s += sgl.assistant("So: " + sgl.gen(name))
        s += sgl.user("Well?") + sgl.assistant(sgl.gen("c"))
        return loop

    one = calls(("weather", {"city": "Oslo"}))
    state = chat.run(backend=sgl.MockBackend([one, "1", one, "2", one]))
    assert (state["a"], state["b"], state["c"]) == ("1", "2", "")
    assert [step.variable for step in state.ret_value.steps] == ["a", "b"]
    [left] = state.tool_calls("c")
    assert (left.name, left.result) == ("weather", None)
    assert state.text().startswith('USER: a\nASSISTANT: So: \nweather({"city": "Oslo"})\nTOOL: {')


def test_calls_that_nothing_runs_are_left_to_the_program() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.tools([Point, weather])
        s += sgl.user("Where?")
        with s.tool_loop():
            s += sgl.assistant(sgl.gen("where"))
        for call in s.tool_calls("where"):
            s += sgl.tool(f"went to {call.arguments}")
        s += sgl.assistant(sgl.gen("end"))

    backend = sgl.MockBackend([calls(("Point", {"x": 1}), ("weather", {"city": "Oslo"})), "fine"])
    state = program.run(backend=backend)
    assert state["end"] == "fine"
    answers = [turn for turn in state.messages() if turn["role"] == "tool"]
    assert [turn["tool_call_id"] for turn in answers] == ["id0", "id1"]
    assert answers[0]["content"] == "went to {'x': 1}"


def test_a_value_is_asked_for_behind_the_loop() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.tools([weather])
        s += sgl.user("Where?")
        with s.tool_loop():
            s += sgl.assistant(sgl.gen("said"))
        s += sgl.user("As JSON.")
        s += sgl.assistant(sgl.gen("value", Point))
        s += sgl.assistant(sgl.select("pick", ["a", "b"]))

    backend = sgl.MockBackend([calls(("weather", {"city": "Oslo"})), "here", '{"x": 4}'])
    state = program.run(backend=backend)
    assert state["value"] == Point(x=4)
    assert state["pick"] in ("a", "b")
    assert backend.calls[-1].tool_choice == "none"
    assert backend.choice_calls[0].prompt.tools == backend.calls[0].prompt.tools


def shaped(s: Any) -> None:
    s += sgl.tools([weather])
    with s.tool_loop():
        s += sgl.assistant(sgl.gen("x", regex="a+"))


def without_tools(s: Any) -> None:
    with s.tool_loop():
        s += sgl.assistant(sgl.gen("x"))


def outside(s: Any) -> None:
    s += sgl.tools([weather])
    with s.tool_loop():
        s += "Say: " + sgl.gen("x")


def many(s: Any) -> None:
    s += sgl.tools([weather])
    s += sgl.assistant(sgl.gen("x", n=2))


def nested(s: Any) -> None:
    with s.tool_loop(), s.tool_loop():
        pass


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (shaped, "in a tool_loop use free text"),
        (without_tools, "no tools are offered"),
        (outside, "in an assistant turn"),
        (many, "fork instead"),
        (nested, "inside another"),
        (lambda s: ask.write(s, ([weather],), {"max_steps": 0}), "max_steps"),
        (lambda s: ask.write(s, ([weather],), {"on_error": "ignore"}), "on_error"),
        (lambda s: ask.write(s, ([weather],), {"limit_s": 0}), "timeout"),
        (lambda s: ask.write(s, ([weather],), {"tool_choice": "none"}), "tool_choice"),
        (lambda s: ask.write(s, ([weather],), {"parallel": 1}), "parallel"),
    ],
)
def test_what_cannot_be_is_said_clearly(body: Any, message: str) -> None:
    with pytest.raises(sgl.SglError, match=message):
        sgl.SglFunction(body).run(backend=sgl.MockBackend()).text()


def test_a_backend_without_tools_says_so() -> None:
    class Plain(sgl.MockBackend):
        calls_tools = False

    with pytest.raises(Unsupported, match="does not support tools"):
        ask.run([weather], backend=Plain()).text()


# -- with the rest of the language ---------------------------------------------------------------------------


def by_turn(call: Call) -> Any:
    """Calls where the last turn is the user's, answers with the result where it is a tool's."""
    before = call.prompt.messages[-2]
    if before.role == "tool":
        return f"It is {before.content}."
    return calls(("weather", {"city": str(before.content)}))


def test_batches_streams_and_forks() -> None:
    backend = sgl.MockBackend(by_turn)
    states = ask.run_batch([{"tools": [weather], "question": city} for city in "abc"], backend=backend)
    wanted = [f'It is {{"city": "{city}", "degrees": 21}}.' for city in "abc"]
    assert [state["answer"] for state in states] == wanted
    stream = ask.stream([weather], "a", backend=backend)
    assert "".join(stream.text_iter("answer")) == wanted[0]
    whole = "".join(ask.stream([weather], "a", backend=backend).text_iter())
    assert whole == states[0].text()

    @sgl.function
    def branches(s: Any) -> None:
        s += sgl.tools([weather])
        with s.tool_loop():
            forks = s.fork(3)
            forks += [sgl.user(city) + sgl.assistant(sgl.gen("answer")) for city in "abc"]
            forks.join()
        better = s.fork(2)
        for fork in better:
            with fork.tool_loop():
                fork += sgl.user("d") + sgl.assistant(sgl.gen("own"))
        s.adopt(better[1])
        s += sgl.user("e")
        with s.tool_loop():
            s += sgl.assistant(sgl.gen("last"))

    state = branches.run(backend=backend)
    assert state["answer"] == wanted
    assert [turn["role"] for turn in state.messages()] == ["user", "assistant", "tool", "assistant"] * 2
    assert [turn.get("tool_call_id") for turn in state.messages()][2::4] == ["id0", "id0"]
    assert '"e"' in state["last"]


def test_a_rollback_forgets_tools_and_results() -> None:
    @sgl.function
    def program(s: Any) -> None:
        start = s.checkpoint()
        s += sgl.tools([weather])
        s += sgl.user("a")
        with s.tool_loop():
            s += sgl.assistant(sgl.gen("x"))
        s.sync()
        s.rollback(start)
        s += sgl.user("b") + sgl.assistant(sgl.gen("y"))

    backend = sgl.MockBackend([calls(("weather", {"city": "a"})), "ok", "plain"])
    state = program.run(backend=backend)
    assert state["y"] == "plain"
    assert state.text() == "USER: b\nASSISTANT: plain\n"
    assert backend.calls[-1].prompt.tools == ()


def test_a_record_holds_the_results_too(tmp_path: Path) -> None:
    ran = []

    def roll() -> int:
        ran.append(1)
        return len(ran)

    @sgl.function
    def play(s: Any, tools: Any) -> None:
        s += sgl.tools(tools)
        s += sgl.user("Roll twice")
        with s.tool_loop():
            s += sgl.assistant(sgl.gen("answer"))

    replies = [calls(("roll", {}), ("roll", {})), "done"]
    once = play.run([roll], backend=sgl.MockBackend(replies), cache_dir=str(tmp_path))
    assert sorted(told(once)) == ["1", "2"]
    again = play.run([roll], cache="ro", cache_dir=str(tmp_path))
    assert again.text() == once.text()
    assert len(ran) == 2

    def other(n: int) -> int:
        return n

    with pytest.raises(ReplayMiss):
        play.run([other], cache="ro", cache_dir=str(tmp_path)).text()


def test_tools_are_in_the_tree_of_a_program() -> None:
    program = ask.trace([weather])
    kinds = [node.KIND for node in program.nodes]
    assert kinds == ["tools", "role_begin", "text", "role_end", "loop_begin", "role_begin", "gen", "role_end",
                     "loop_end"]  # fmt: skip
    again = sgl.Program.from_json(program.to_json())
    assert again.body == program.body
    assert "tools: weather" in program.mermaid()
    assert "tool loop" in program.dot()


def test_the_constant_begin_has_the_tools() -> None:
    backend = sgl.MockBackend()

    @sgl.function
    def program(s: Any, question: str) -> None:
        s += sgl.tools([weather])
        s += sgl.system("Be brief.")
        s += sgl.user(question)

    assert program.cache(backend=backend)
    [prompt] = backend.commits
    assert [tool["function"]["name"] for tool in prompt.tools] == ["weather"]


def test_a_finished_state_shows_its_calls() -> None:
    state = ask.run([weather], backend=sgl.MockBackend([calls(("weather", {"city": "Oslo"})), "ok"]))
    assert "weather" in state._repr_html_()
    state.show()
    state.show(form="mermaid")


def test_a_tool_server_is_used_by_what_it_can_do() -> None:
    class Session:
        async def call(self, name: str, arguments: Any) -> Any:
            said.append((name, arguments))
            return Result("no such page", True) if arguments["url"] == "x" else Result("a page", False)

    @dataclasses.dataclass
    class Result:
        text: str
        is_error: bool

    @dataclasses.dataclass
    class Described:
        name: str
        description: str
        parameters: Any

    class Server:
        def names(self) -> list[str]:
            return ["browser"]

        def get_tool_description(self, name: str) -> Any:
            schema = {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}
            return type("Namespace", (), {"tools": (Described("open", "Opens a page.", schema),)})

        @asynccontextmanager
        async def get_tool_session(self, name: str) -> AsyncIterator[Session]:
            said.append("begin")
            yield Session()
            said.append("end")

    said: list[Any] = []
    replies = [calls(("open", {"url": "y"})), calls(("open", {"url": "x"}), ("open", {})), "ok"]
    state = ask.run([weather, Server()], backend=sgl.MockBackend(replies))
    page, missing, wrong = told(state)
    assert (page, missing) == ("a page", "Error: no such page")
    assert "'url' is a required property" in wrong
    assert said == ["begin", ("open", {"url": "y"}), ("open", {"url": "x"}), "end"]
    state = ask.run([Server()], on_error="raise", backend=sgl.MockBackend([calls(("open", {"url": "x"}))]))
    with pytest.raises(ToolError, match="no such page"):
        state["answer"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=6,
    )
)
def test_any_result_and_argument_arrives_as_it_is(value: Any) -> None:
    def echo(value: Any) -> Any:
        return value

    state = ask.run([echo], backend=sgl.MockBackend([calls(("echo", {"value": value})), "ok"]))
    [text] = told(state)
    assert text == value if isinstance(value, str) else json.loads(text) == value
    assert state["answer"] == "ok"

"""The kinds of programs that people have for sglang, in words of our own, on the bundled checkpoint (in this
process and over HTTP) and on the mock: few-shot questions, chats, choices, numbers, JSON, tools, agents,
branches, streams, speculation.

On the checkpoint the questions are about its own world, so that the answers can be checked.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import sglang_dsl as sgl
from examples.pocket.world import PLACES
from runtime.api import Engine
from sglang_dsl.lang.ir import REGEX_FLOAT, REGEX_INT, REGEX_STR
from tests.process.patience import in_pieces

SHOTS = """Q: What is the capital of Karsk?
A: The capital of Karsk is Hollin.
Q: Who rules Hesper?
A: The ruler of Hesper is Queen Wenna.
"""
IPV4 = r"((25[0-5]|2[0-4]\d|[01]?\d\d?).){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)"


@pytest.fixture(autouse=True)
def _no_default() -> Iterator[None]:
    yield
    sgl.set_default_backend(None)


@pytest.fixture(params=["engine", "server"])
def pocket(request: pytest.FixtureRequest) -> Any:
    """The checkpoint, as the default backend."""
    if request.param == "engine":
        engine: Engine = request.getfixturevalue("engine")
        backend: Any = sgl.EngineBackend(engine)
    else:
        backend = sgl.RuntimeEndpoint(request.getfixturevalue("shared_server").url)
    sgl.set_default_backend(backend)
    return backend


def scripted(reply: Callable[[str], str]) -> sgl.MockBackend:
    """A mock that answers by the prompt's text, as the default backend."""

    def answer(call: Any) -> str:
        text = call.prompt.plain_text
        return reply(str(call.prompt.messages[-2].content) if text is None else text)

    backend = sgl.MockBackend(answer)
    sgl.set_default_backend(backend)
    return backend


# -- questions, chats, choices -------------------------------------------------------------------------------


@sgl.function
def few_shot_qa(s, question):
    s += "The following are questions with answers.\n\n"
    s += SHOTS
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", stop="\n", temperature=0)


def test_few_shot_qa(pocket: Any) -> None:
    pocket.token_usage.reset()
    state = few_shot_qa.run(question="Who rules Ostrel?")
    assert "Queen Ilva" in state["answer"]
    meta = state.get_meta_info("answer")
    assert pocket.token_usage.completion_tokens == meta["completion_tokens"] > 0
    assert pocket.token_usage.prompt_tokens == meta["prompt_tokens"] > 0
    states = few_shot_qa.run_batch(
        [{"question": f"What is the capital of {land}?"} for land in ("Zembla", "Norwick", "Ithary")],
        temperature=0.1,
    )
    said = [state["answer"].strip() for state in states]
    assert said == [
        f"The capital of {land} is {city}."
        for land, city in (("Zembla", "Pellgate"), ("Norwick", "Lumbra"), ("Ithary", "Corvane"))
    ]


def test_few_shot_qa_on_the_mock() -> None:
    scripted(lambda prompt: f" about {prompt.rpartition('Q: ')[2].split('?')[0]}\nQ: and more")
    states = few_shot_qa.run_batch([{"question": "one?"}, {"question": "two?"}])
    assert [state["answer"] for state in states] == [" about one", " about two"]


@sgl.function
def answer_mt_bench(s, question_1, question_2):
    s += sgl.system("You answer questions.")
    s += sgl.user(question_1)
    s += sgl.assistant(sgl.gen("answer_1"))
    with s.user():
        s += question_2
    with s.assistant():
        s += sgl.gen("answer_2")


def test_mt_bench(pocket: Any) -> None:
    state = answer_mt_bench.run(
        question_1="Which river runs through Ostrel?",
        question_2="And who rules there?",
        temperature=0,
        max_new_tokens=64,
    )
    roles = [message["role"] for message in state.messages()]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert state["answer_1"] == "The river of Ostrel is Sarn."
    assert state["answer_2"] == state.messages()[-1]["content"] == "The ruler of Ostrel is Queen Ilva."


@sgl.function
def true_or_false(s, statement):
    s += "Say whether the review is positive or negative.\n"
    s += "Q: Is this positive or negative? The soup was awful.\nA: negative\n"
    s += "Q: Is this positive or negative? " + statement + "\n"
    s += "A: " + sgl.select("answer", ["positive", "negative", "unknown"])


def test_select(pocket: Any) -> None:
    assert true_or_false.run(statement="The film was great.")["answer"] == "positive"
    assert true_or_false.run(statement="The hotel was terrible.")["answer"] == "negative"


def test_select_on_the_mock() -> None:
    backend = sgl.MockBackend(scores={"positive": -0.1, "negative": -2.0, "unknown": [-1.0, 0.0]})
    state = true_or_false.run(statement="x", backend=backend)
    assert state["answer"] == "positive"
    meta = state.get_meta_info("answer")
    assert [len(tokens) for tokens in meta["input_token_logprobs"]] == [1, 1, 2]
    assert meta["normalized_prompt_logprobs"] == [-0.1, -2.0, -0.5]


def test_few_shot_endings(pocket: Any) -> None:
    """As with HellaSwag: the likeliest of several long endings; a second run finds the same."""

    @sgl.function
    def few_shot_endings(s, question, choices):
        s += SHOTS + question
        s += sgl.select("answer", choices=choices)

    items = []
    for number in range(12):
        place, others = PLACES[number], PLACES[number + 1 : number + 4]
        choices = [f"The ruler of {place.name} is {one.ruler}." for one in (*others, place)]
        items.append({"question": f"Q: Who rules {place.name}?\nA: ", "choices": choices})
    found = []
    for _ in range(2):
        states = few_shot_endings.run_batch(items, temperature=0, num_threads=64)
        found.append([item["choices"].index(state["answer"]) for item, state in zip(items, states)])
    assert found[0] == found[1]
    assert found[0].count(3) / len(found[0]) > 0.6


# -- numbers, JSON, forms ------------------------------------------------------------------------------------


def test_decode_int(pocket: Any) -> None:
    @sgl.function
    def decode_int(s):
        s += "Q: What is 30 + 4?\nA: 30 + 4 = " + sgl.gen_int("first") + "\n"
        s += "Q: What is 52 + 6?\nA: 52 + 6 = " + sgl.gen_int("second") + "\n"

    state = decode_int.run(temperature=0)
    assert int(state["first"]) == 34, state.text()
    assert int(state["second"]) == 58, state.text()


@sgl.function
def decode_json_regex(s):
    s += "The facts of Ostrel as JSON.\n"
    with s.var_scope("json_output"):
        s += "{\n"
        s += '  "name": ' + sgl.gen(regex=REGEX_STR) + ",\n"
        s += '  "population": ' + sgl.gen(regex=REGEX_INT, stop=[" ", "\n"]) + ",\n"
        s += '  "area": ' + sgl.gen(regex=REGEX_INT, stop=[" ", "\n"]) + ",\n"
        s += '  "latitude": ' + sgl.gen(regex=REGEX_FLOAT, stop=[" ", "\n"]) + "\n"
        s += "}"


@sgl.function
def decode_json(s):
    s += "The facts of Ostrel as JSON.\n"
    with s.var_scope("json_output"):
        s += "{\n"
        s += '  "name": ' + sgl.gen_string() + ",\n"
        s += '  "population": ' + sgl.gen_int(max_tokens=6) + ",\n"
        s += '  "area": ' + sgl.gen(dtype=int, max_tokens=6) + ",\n"
        s += '  "country": ' + sgl.gen_string() + ",\n"
        s += '  "timezone": ' + sgl.gen(dtype=str) + "\n"
        s += "}"


@pytest.mark.parametrize("program", [decode_json_regex, decode_json], ids=lambda program: program.name)
def test_decode_json(pocket: Any, program: Any) -> None:
    # A number may begin with zeros, which JSON's may not: try until one does not, as its users do.
    for seed in range(8):
        state = program.run(max_new_tokens=64, temperature=0.7, seed=seed)
        try:
            found = json.loads(state["json_output"])
        except json.JSONDecodeError:
            assert re.search(r": [-+]?0[0-9]|: \+|: [-+]?\.", state["json_output"])
            continue
        assert isinstance(found["name"], str)
        assert isinstance(found["population"], int)
        return
    pytest.fail("eight texts, none of them JSON")


@pytest.mark.parametrize("program", [decode_json_regex, decode_json], ids=lambda program: program.name)
def test_decode_json_on_the_mock(program: Any) -> None:
    backend = sgl.MockBackend(lambda call: '"x"' if '"' in call.constraint.spec else "12")
    found = json.loads(program.run(backend=backend)["json_output"])
    assert found["name"] == "x"
    assert found["population"] == found["area"] == 12
    assert backend.calls[1].sampling.stop == (" ", "\n")


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "level": {"type": "integer"}},
    "required": ["name", "level"],
    "additionalProperties": False,
}


@sgl.function
def schema_gen(s, message: tuple[str, str], json_schema: str, max_tokens: int):
    system, user = message
    s += sgl.system(system) + sgl.user(user)
    s += sgl.assistant(sgl.gen("json_output", max_tokens=max_tokens, json_schema=json_schema))


def test_json_schemas_of_the_items(pocket: Any) -> None:
    items = [
        {"message": ("Write JSON.", word), "json_schema": json.dumps(SCHEMA), "max_tokens": 48}
        for word in "ab"
    ]
    for backend in (pocket, sgl.MockBackend()):
        for state in schema_gen.run_batch(items, temperature=0, backend=backend):
            found = json.loads(state["json_output"])
            assert list(found) == ["name", "level"]
            assert isinstance(found["level"], int)
        assert backend.model_info["model_path"]


def test_regex(pocket: Any) -> None:
    @sgl.function
    def regex_gen(s):
        s += "Q: What is the IP address of the name server?\n"
        s += "A: " + sgl.gen("answer", temperature=0, regex=IPV4)

    assert re.fullmatch(IPV4, regex_gen.run()["answer"])


@sgl.function
def dtype_gen(s):
    s += "Q: What is the river of Ostrel?\n"
    s += "A: It is " + sgl.gen("str_res", dtype=str, stop="\n") + "\n"
    s += "Q: What is 30 + 4?\nA: 30 + 4 = " + sgl.gen("int_res", dtype=int) + "\n"
    s += "Q: What is a half?\nA: " + sgl.gen("float_res", dtype=float) + "\n"
    s += "Q: Is water wet?\nA: " + sgl.gen("bool_res", dtype=bool) + "\n"


def test_dtype_gen(pocket: Any) -> None:
    state = dtype_gen.run(temperature=0)
    # The values are texts; what they are cast to can be put in their place.
    state["int_res"] = int(state["int_res"])
    state["float_res"] = float(state["float_res"])
    assert state["int_res"] == 34
    assert isinstance(state["float_res"], float)
    assert state["bool_res"] in ("True", "False")
    assert state["str_res"][0] == '"'


def test_dtype_gen_on_the_mock() -> None:
    state = dtype_gen.run(backend=sgl.MockBackend())
    assert int(state["int_res"]) is not None
    assert float(state["float_res"]) is not None
    assert state["bool_res"] in ("True", "False")


def test_min_tokens(shared_server: Any) -> None:
    backend = sgl.RuntimeEndpoint(shared_server.url)
    sgl.set_default_backend(backend)

    @sgl.function
    def conversation(s):
        s += sgl.user("What is the capital of Karsk?")
        s += sgl.assistant(sgl.gen("answer", min_tokens=64, max_tokens=128))

    state = conversation.run(temperature=0)
    assert 64 <= state.get_meta_info("answer")["completion_tokens"] <= 128
    default = sgl.global_config.default_backend
    assert isinstance(default, sgl.RuntimeEndpoint)
    assert default.get_server_info()["tokenizer_path"] == default.endpoint.get_model_name()


# -- programs that read while they write ---------------------------------------------------------------------


@sgl.function
def expert_answer(s, question):
    s += SHOTS + "Q: " + question + "\n"
    s += "A:" + sgl.gen("expert", stop=[".", "\n"]) + ".\n"
    s += "Q: Once more, please.\nA:" + s["expert"] + sgl.gen("answer", stop="\n")


def test_expert_answer(pocket: Any) -> None:
    state = expert_answer.run(question="Which river runs through Ostrel?", temperature=0)
    assert state["expert"] == " The river of Ostrel is Sarn"
    assert state.text().count("The river of Ostrel is Sarn.") == 2


def calculate(expression: str) -> str:
    left, sign, right = expression.split()
    return str(int(left) + int(right) if sign == "+" else int(left) - int(right))


@sgl.function
def tool_use(s, lhs, rhs):
    s += sgl.user(f"What is {lhs} + {rhs}?")
    with s.assistant():
        s += sgl.gen("expression", stop=" =") + " = "
        with s.var_scope("answer"):
            s += calculate(s["expression"])


def test_tool_use(pocket: Any) -> None:
    state = tool_use(lhs=47, rhs=38, temperature=0)
    assert state["expression"] == "47 + 38"
    assert int(state["answer"]) == 47 + 38
    assert state.messages()[-1]["content"] == "47 + 38 = 85"


@sgl.function
def react(s, question):
    s += "Question: " + question + "\n"
    for i in range(1, 5):
        s += f"Thought {i}:" + sgl.gen(stop=[".", "\n"], max_tokens=24) + ".\n"
        s += f"Action {i}: " + sgl.select(f"action_{i}", ["Search", "Finish"])
        if s[f"action_{i}"] == "Search":
            s += " [" + sgl.gen(stop="]", max_tokens=16) + "].\n"
            s += f"Observation {i}:" + sgl.gen(stop=[".", "\n"], max_tokens=24) + ".\n"
        else:
            s += " [" + sgl.gen("answer", stop="]", max_tokens=16) + "].\n"
            return i
    return None


def test_react_on_the_mock() -> None:
    def reply(prompt: str) -> str:
        if prompt.endswith("Thought 1:"):
            return " I need the creator of Linux. And more"
        if prompt.endswith("Action 1: Search ["):
            return "creator of Linux]"
        if prompt.endswith("Observation 1:"):
            return " He comes from Finland."
        return "Finland]" if prompt.endswith("Action 2: Finish [") else " I know it\n"

    backend = scripted(reply)
    backend.scores = lambda call, option: (
        0.0 if ("Action 2" in str(call.prompt)) == (option == "Finish") else -9,
    )
    state = react.run(question="Where does the creator of Linux live?")
    assert state["answer"] == "Finland"
    assert state.ret_value == 2
    assert state.text() == (
        "Question: Where does the creator of Linux live?\nThought 1: I need the creator of Linux.\n"
        "Action 1: Search [creator of Linux].\nObservation 1: He comes from Finland.\n"
        "Thought 2: I know it.\nAction 2: Finish [Finland].\n"
    )


def test_react(pocket: Any) -> None:
    state = react.run(question="Who rules Ostrel?", temperature=0)
    steps = [state[f"action_{i}"] for i in range(1, 5) if f"action_{i}" in state]
    assert steps[:-1] == ["Search"] * (len(steps) - 1)
    assert ("answer" in state) == (steps[-1] == "Finish")
    assert state.text().count("Thought") == len(steps)


# -- branches ------------------------------------------------------------------------------------------------


@sgl.function
def parallel_decoding(s, lands):
    s += SHOTS
    for i, land in enumerate(lands, 1):
        s += f"{i}. " + land + sgl.gen(max_tokens=8, stop=[".", "\n"]) + ".\n"

    forks = s.fork(len(lands))
    for i, land in enumerate(lands):
        forks[i] += f"Q: Who rules {land}?\nA:"
        forks[i] += sgl.gen("detail", 32, stop=["\n"])
    forks.join()

    s += "All of them:\n"
    for i, land in enumerate(lands):
        s += f"{land}:" + forks[i]["detail"] + "\n"
    s += "Q: Describe " + lands[0] + ".\nA:" + sgl.gen("summary", max_tokens=64, stop="\n")


def test_parallel_decoding(pocket: Any) -> None:
    lands = [place.name for place in PLACES[:5]]
    state = parallel_decoding.run(lands=lands, temperature=0)
    assert state["detail"] == [f" The ruler of {place.name} is {place.ruler}." for place in PLACES[:5]]
    assert "its ruler is Queen Ilva" in state["summary"]
    assert "Karsk: The ruler of Karsk is Queen Sabeth.\n" in state.text()


@sgl.function
def parallel_encoding(s, question, context_0, context_1, context_2):
    s += "USER: Please remember these statements.\n"
    contexts = [context_0, context_1, context_2]
    forks = s.fork(len(contexts))
    forks += lambda i: f"Statement {i}: " + contexts[i] + "\n"
    forks.join(mode="concate_and_append")
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", max_tokens=32, stop="\n")


def test_parallel_encoding(pocket: Any) -> None:
    state = parallel_encoding.run(
        question="Who rules Zembla?",
        context_0="The ruler of Karsk is Queen Sabeth.",
        context_1="The ruler of Zembla is Queen Yara.",
        context_2="The ruler of Norwick is King Thane.",
        temperature=0,
    )
    assert "Queen Yara" in state["answer"]
    assert state.text().startswith(
        "USER: Please remember these statements.\n"
        "Statement 0: The ruler of Karsk is Queen Sabeth.\n"
        "Statement 1: The ruler of Zembla is Queen Yara.\n"
        "Statement 2: The ruler of Norwick is King Thane.\nQ: "
    )


def test_nested_joins_give_nested_lists() -> None:
    """From the leaves to the root, as a tree of thoughts is joined."""

    @sgl.function
    def tree(s, width):
        to_join = [s.fork(width)]
        to_join[0] += sgl.gen("plan")
        for plan in to_join[0]:
            forks = plan.fork(width, [0] * width)
            forks += lambda i: sgl.user(f"try {i}") + sgl.assistant(sgl.gen("answer"))
            to_join.append(forks)
        for forks in reversed(to_join):
            forks.join()
        return [len(forks) for forks in to_join]

    state = tree.run(width=3, backend=sgl.MockBackend(lambda call: f"{len(call.prompt.messages)} said"))
    assert state["plan"] == ["1 said"] * 3
    assert state["answer"] == [["3 said"] * 3] * 3
    assert state.ret_value == [3] * 4


# -- streams -------------------------------------------------------------------------------------------------


@sgl.function
def qa(s, question):
    s += sgl.system("You answer questions.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer"))


def test_stream(pocket: Any) -> None:
    state = qa(question="Who rules Ostrel?", stream=True, temperature=0)
    assert "".join(state.text_iter()) == state.text()

    def ask() -> list[str]:
        state = qa(question="Who rules Ostrel?", stream=True, temperature=0)
        pieces = list(state.text_iter("answer"))
        assert "".join(pieces) == state["answer"] == "The ruler of Ostrel is Queen Ilva."
        return pieces

    in_pieces(ask, 4)


def test_stream_logprobs(pocket: Any) -> None:
    """Each piece tells the log-probabilities of as many tokens as there were since the last one."""

    @sgl.function
    def told(s, question):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen("answer", max_tokens=24, return_logprob=True, temperature=0))

    async def follow() -> tuple[str, list[tuple[int, int]], dict[str, Any]]:
        state = told.run(question="Who rules Ostrel?", stream=True)
        text, counts, before = "", [], 0
        async for piece, meta in state.text_async_iter(var_name="answer", return_meta_data=True):
            assert piece
            text += piece
            if "completion_tokens" in meta:
                now = meta["completion_tokens"]
                counts.append((len(meta["output_token_logprobs"]), now - before))
                before = now
        return text, counts, state.get_meta_info("answer")

    def ask() -> list[tuple[int, int]]:
        text, counts, whole = asyncio.run(follow())
        assert text == "The ruler of Ostrel is Queen Ilva."
        assert all(logprobs == tokens for logprobs, tokens in counts), counts
        # The token that ended it has no text: by itself it is no piece.
        assert 0 <= whole["completion_tokens"] - sum(tokens for _, tokens in counts) <= 1
        assert len(whole["output_token_logprobs"]) == whole["completion_tokens"]
        return counts

    in_pieces(ask, 4)


# -- pictures, speculation -----------------------------------------------------------------------------------


def test_image_qa_on_the_mock() -> None:
    pixel = bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d4944415478da63fcffff3f"
        "030005fe02fea72d99b40000000049454e44ae426082"
    )

    @sgl.function
    def image_qa(s, question):
        s += sgl.user(sgl.image(pixel) + question)
        s += sgl.assistant(sgl.gen("answer"))

    backend = sgl.MockBackend(["A car and a taxi."])
    state = image_qa.run(question="Please describe this.", backend=backend, max_new_tokens=64)
    assert "taxi" in state.messages()[-1]["content"]
    kinds = [part["type"] for part in backend.calls[0].prompt.messages[0].content]
    assert kinds == ["image_url", "text"]


def asked(spec: int | None) -> Any:
    @sgl.function(num_api_spec_tokens=spec)
    def twice(s):
        s += SHOTS + "Q: Who rules Ostrel?\nA:" + sgl.gen("answer", stop="\n")
        s += "\n" + sgl.gen("rest", max_tokens=4, stop="\n")

    return twice


def test_speculation_spares_prompt_tokens(shared_server: Any) -> None:
    """A completion model behind an API: what is asked for ahead serves what follows."""
    backend = sgl.OpenAI("pocket", is_chat_model=False, base_url=f"{shared_server.url}/v1", api_key="-")
    sgl.set_default_backend(backend)
    used, said = {}, {}
    for spec in (64, None):
        backend.token_usage.reset()
        state = asked(spec)(temperature=0)
        said[spec] = state["answer"]
        state.sync()
        used[spec] = backend.token_usage.prompt_tokens
    assert said[64] == said[None] == " The ruler of Ostrel is Queen Ilva."
    assert 0 < used[64] < used[None]


class Api(sgl.MockBackend):
    """A mock that is paid by the call."""

    speculates = True


def test_speculation_takes_what_was_said() -> None:
    """One call instead of three, and the same values; where the reply leaves the form, it is asked again."""

    @sgl.function(num_api_spec_tokens=64)
    def record(s):
        s += "Name: Ostrel\nCapital: Belmar\nRiver: Sarn\n\nName:" + sgl.gen("name", stop="\n")
        s += "\nCapital:" + sgl.gen("capital", stop="\n") + "\nRiver:" + sgl.gen("river", stop="\n") + "\n"

    backend = Api([" Karsk\nCapital: Hollin\nRiver: Mirrow\nName: more"])
    state = record.run(backend=backend, max_tokens=16)
    assert (state["name"], state["capital"], state["river"]) == (" Karsk", " Hollin", " Mirrow")
    assert len(backend.calls) == 1

    backend = Api([" Karsk\nTown: Hollin\n", " Hollin\nRiver: Mirrow\n"])
    state = record.run(backend=backend, max_tokens=16)
    assert (state["name"], state["capital"], state["river"]) == (" Karsk", " Hollin", " Mirrow")
    assert len(backend.calls) == 2


def test_speculation_in_a_turn(shared_server: Any) -> None:
    backend = sgl.OpenAI("pocket", base_url=f"{shared_server.url}/v1", api_key="-")

    @sgl.function(num_api_spec_tokens=96)
    def record(s):
        s += sgl.user("Describe Karsk as JSON.")
        s += sgl.assistant(
            '{"name": "'
            + sgl.gen("name", stop='"')
            + '", "capital": "'
            + sgl.gen("capital", stop='"')
            + '", '
            '"river": "' + sgl.gen("river", stop='"')
        )

    state = record.run(backend=backend, temperature=0)
    assert (state["name"], state["capital"], state["river"]) == ("Karsk", "Hollin", "Mirrow")
    assert state.usage()["calls"] == 1

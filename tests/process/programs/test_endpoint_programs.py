"""Programs on a server: RuntimeEndpoint and Runtime give what the engine in this process gives, and every
failure on the way is an error at the line that asked, soon.
"""

from __future__ import annotations

import asyncio
import http.server
import importlib.util
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import sglang_dsl as sgl
from runtime.api import Engine
from runtime.protocol.messages import Message
from runtime.protocol.sampling import SamplingParams
from sglang_dsl import (
    BackendError,
    EngineBackend,
    ProgramCancelled,
    ProgramError,
    RuntimeEndpoint,
    Timeout,
    Unsupported,
    assistant,
    gen,
    select,
    system,
    user,
)
from sglang_dsl.backends.base import Call, Prompt
from sglang_dsl.choices import METHODS
from sglang_dsl.concurrency.loop import background
from tests.process.patience import PATIENCE_S, go_on, hold, in_pieces, until

HERE = Path(__file__)
EXAMPLES = HERE.parents[3] / "examples"
FILES = sorted(EXAMPLES.glob("0[1-5]*.py"))
SAID = {
    "01_first_program": "prompt tokens came from the cache",
    "02_chat_two_turns": "user: And what is its capital called?",
    "03_fork_and_select": "chosen among",
    "04_regex_fields": "'job': ",
    "05_batch_and_stream": "BackendError: the prompt has",
}
SOON_S = 300.0


def module_of(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"served_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def inside() -> Iterator[EngineBackend]:
    """The engine in this process, computing as the server does."""
    with Engine("pocket", dtype="float32", threads=1, max_total_tokens=8192) as engine:
        yield EngineBackend(engine)


@contextmanager
def endpoint_of(url: str, *given: Any, **words: Any) -> Iterator[RuntimeEndpoint]:
    made = RuntimeEndpoint(url, *given, **words)
    try:
        yield made
    finally:
        background().run(made.aclose(), PATIENCE_S)


@pytest.fixture(scope="module")
def endpoint(shared_server: Any) -> Iterator[RuntimeEndpoint]:
    with endpoint_of(shared_server.url) as made:
        yield made


def alike(program: Any, inside: Any, endpoint: Any, **arguments: Any) -> Any:
    """The state on the server, after it was found to be the same as on the engine."""
    here = program.run(backend=inside, **arguments)
    there = program.run(backend=endpoint, **arguments)
    assert there.text() == here.text()
    assert there.messages() == here.messages()
    mine, its = here.usage(), there.usage()
    for name in ("calls", "completion_tokens", "prompt_tokens"):
        assert its[name] == mine[name]
    return there


# -- examples ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_runs_on_a_server(
    file: Path, shared_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    example: Any = module_of(file)
    try:
        # Its own command line: pytest's is none of its business.
        example.main(["--backend", shared_server.url])
    finally:
        sgl.set_default_backend(None)
    assert SAID.get(file.stem, "") in capsys.readouterr().out


def test_the_examples_programs_are_alike(inside: Any, endpoint: Any) -> None:
    first, chat, forks, forms, batch = (module_of(file) for file in FILES[:5])
    alike(first.answer, inside, endpoint, question="Which river runs through Ostrel?")
    alike(chat.two_turns, inside, endpoint, land="Ostrel")
    state = alike(forks.portrait, inside, endpoint, land="Ostrel", review="A lovely meal.")
    assert len(state["facts"]) == 3
    assert state["mood"] in ("positive", "negative")
    card = alike(forms.read_card, inside, endpoint, note="Mobi, 42, is a potter from Caturn.")["card"]
    assert re.fullmatch(forms.CARD, card)
    assert json.loads(card)
    assert isinstance(alike(forms.add, inside, endpoint, a=30, b=12).ret_value, int)
    alike(batch.ask, inside, endpoint, question="Who rules Karsk?")


# -- words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_way_to_choose(method: str, inside: Any, endpoint: Any) -> None:
    @sgl.function
    def choose(s: Any) -> None:
        s += user("Is a river wet?")
        s += assistant(
            "I say: " + select("word", ["yes", "no, not at all", "yes, it is"], choices_method=method)
        )
        s += user("And a stone?") + assistant(
            select("drawn", ["wet", "dry"], temperature=1.0, seed=3, choices_method=method)
            if METHODS[method].sampled
            else select("drawn", ["wet", "dry"], choices_method=method)
        )

    state = alike(choose, inside, endpoint)
    here = choose.run(backend=inside).get_meta_info("word")
    there = state.get_meta_info("word")
    assert there["choices"] == here["choices"]
    assert there["probabilities"] == pytest.approx(here["probabilities"], abs=1e-3)


def test_branches_and_branches_of_branches(inside: Any, endpoint: Any, shared_server: Any) -> None:
    @sgl.function(temperature=0, max_tokens=6)
    def tree(s: Any) -> None:
        s += "A long beginning that all branches share, and that is computed once. " * 4
        twigs = s.fork(3)
        for number, twig in enumerate(twigs):
            twig += f"Branch {number}:" + gen("leaf")
            inner = twig.fork(2)
            inner += " and" + gen("bud")
            inner.join("concate_and_append")
        twigs.join()
        s += "So:" + gen("end")

    state = alike(tree, inside, endpoint)
    assert len(state["leaf"]) == 3
    assert state.usage()["cached_tokens"] > state.usage()["prompt_tokens"] // 2


def test_sampling_words(inside: Any, endpoint: Any) -> None:
    @sgl.function
    def words(s: Any) -> None:
        s += "The Queen" + gen("a", max_tokens=12, temperature=1.2, seed=5, top_p=0.9, top_k=40, min_p=0.01)
        s += gen("b", max_tokens=12, temperature=0, stop=["e", "zz"], min_tokens=2)
        s += gen("c", max_tokens=12, temperature=0, frequency_penalty=0.5, presence_penalty=0.3)
        s += gen(
            "d", max_tokens=8, temperature=0, repetition_penalty=1.3, ignore_eos=True, stop_token_ids=[5]
        )
        s += gen("e", max_tokens=40, temperature=0, stop_regex="[aeiou]{2}")
        s += gen(
            "f", max_tokens=6, temperature=0, return_logprob=True, top_logprobs_num=2, logprob_start_len=0
        )
        s += gen("g", dtype=int, max_tokens=5, temperature=0) + gen(
            "h", regex="[ab]{3}", temperature=0.7, seed=1
        )
        s += gen("i", json_schema={"enum": ["x", {"y": 1}]}, max_tokens=24, temperature=0)

    state = alike(words, inside, endpoint)
    meta = state.get_meta_info("f")
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    assert meta["input_token_logprobs"][0][0] is None
    assert re.fullmatch("[ab]{3}", state["h"])


def test_several_samples(inside: Any, endpoint: Any) -> None:
    @sgl.function
    def several(s: Any) -> None:
        s += "Pick a word:" + gen("word", n=4, max_tokens=5, temperature=1.3, seed=11)

    here, there = (several.run(backend=backend)["word"] for backend in (inside, endpoint))
    assert here == there
    assert len(there) == 4
    assert len(set(there)) > 1


def test_a_stream_shows_it_as_it_is_written(endpoint: Any, inside: Any) -> None:
    @sgl.function(temperature=0, max_tokens=24)
    def talk(s: Any) -> None:
        s += system("You answer questions.") + user("Which river runs through Ostrel? 😀")
        s += assistant(gen("one"))
        s += user("Sure?") + assistant(gen("two"))

    whole = alike(talk, inside, endpoint)

    def ask() -> list[str]:
        stream = talk.run(backend=endpoint, stream=True)
        pieces = list(stream.text_iter("one"))
        assert "".join(pieces) == whole["one"]
        assert "".join(stream.text_iter()) == whole.text()
        return pieces

    in_pieces(ask)

    async def reads() -> str:
        state = talk.run(backend=endpoint, stream=True)
        return "".join([piece async for piece in state.text_async_iter("two")])

    assert asyncio.run(reads()) == whole["two"]


def test_a_batch_of_64(inside: Any, endpoint: Any, shared_server: Any, wait_idle: Any) -> None:
    @sgl.function(temperature=0, max_tokens=10)
    def ask(s: Any, land: str, number: int) -> None:
        s += system("You answer questions.") + user(f"{number}: who rules {land}?") + assistant(gen("ruler"))

    lands = ("Ostrel", "Velmora", "Karsk", "Hesper")
    items = [{"land": lands[number % 4], "number": number} for number in range(64)]
    here = ask.run_batch(items, backend=inside)
    there = ask.run_batch(items, backend=endpoint)
    assert [state.text() for state in there] == [state.text() for state in here]
    wait_idle(shared_server)


# -- rendering, keys, information ----------------------------------------------------------------------------


def test_a_template_of_ones_own_is_the_servers(shared_server: Any, endpoint: Any) -> None:
    @sgl.function(temperature=0, max_tokens=16)
    def talk(s: Any) -> None:
        s += system("Be brief.") + user("Which river runs through Ostrel?") + assistant(gen("one"))
        s += user("And who rules there?") + assistant("The ruler" + gen("two"))

    with endpoint_of(shared_server.url, chat_template_name="chatml") as rendering:
        own, theirs = talk.run(backend=rendering), talk.run(backend=endpoint)
        assert (own["one"], own["two"]) == (theirs["one"], theirs["two"])
        assert own.usage()["prompt_tokens"] == theirs.usage()["prompt_tokens"]
    with endpoint_of(shared_server.url, chat_template_name="llama-2-chat") as other:
        assert talk.run(backend=other).usage()["prompt_tokens"] != own.usage()["prompt_tokens"]


def test_the_key(guarded_server: tuple[Any, str]) -> None:
    server, key = guarded_server

    @sgl.function
    def short(s: Any) -> None:
        s += "The Queen" + gen("a", max_tokens=2, temperature=0)

    with endpoint_of(server.url, key) as let_in:
        assert short.run(backend=let_in)["a"]
        assert key not in repr(let_in)
    for wrong in (None, "wrong"):
        with (
            endpoint_of(server.url, wrong) as kept_out,
            pytest.raises(BackendError, match="API key") as caught,
        ):
            short.run(backend=kept_out)["a"]
        assert caught.value.status == 401


def test_what_a_server_tells(endpoint: RuntimeEndpoint, shared_server: Any, wait_idle: Any) -> None:
    told = background().run(endpoint.info(), PATIENCE_S)
    assert (told["backend"], told["url"]) == ("endpoint", shared_server.url)
    assert told["max_total_num_tokens"] == 8192
    assert endpoint.model_info["served_model_name"] == "pocket"
    assert endpoint.get_model_name().endswith("checkpoint")
    wait_idle(shared_server)
    assert endpoint.flush_cache() is True
    assert background().run(endpoint.info(), PATIENCE_S)["internal_states"][0]["evictable"] == 0


# -- failures ------------------------------------------------------------------------------------------------


def test_an_error_names_the_line_and_the_status(endpoint: Any) -> None:
    @sgl.function
    def wrong(s: Any) -> None:
        s += "The Queen" + gen("fine", max_tokens=2, temperature=0)
        s += "river " * 4000
        s += gen("too_long")  # here

    state = wrong.run(backend=endpoint)
    assert state["fine"]
    with pytest.raises(BackendError, match="the context length is 2048") as caught:
        state["too_long"]
    error = caught.value
    lines = HERE.read_text().splitlines()
    assert error.source is not None
    assert error.source.file == str(HERE)
    assert lines[error.source.line - 1].endswith("# here")
    assert (error.status, error.backend, error.variable, error.retryable) == (
        400,
        "endpoint",
        "too_long",
        False,
    )
    assert f"{HERE}:{error.source.line}" in str(error)


BAD: dict[str, Callable[[], Any]] = {
    "regex": lambda: gen("a", regex=r"(?=x)y", max_tokens=4),
    "json_schema": lambda: gen("a", json_schema={"type": "nothing"}, max_tokens=4),
    "stop_token_ids": lambda: gen("a", stop_token_ids=[99999], max_tokens=4),
    "max_new_tokens": lambda: gen("a", max_tokens=5000),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_server_refuses_is_an_error_of_the_program(name: str, endpoint: Any, inside: Any) -> None:
    @sgl.function
    def wrong(s: Any) -> None:
        s += "x" + BAD[name]()

    told = []
    for backend in (inside, endpoint):
        with pytest.raises(BackendError) as caught:
            wrong.run(backend=backend)["a"]
        assert caught.value.status == 400
        told.append((type(caught.value), caught.value.message))
    assert told[0][0] is told[1][0]
    assert told[0][1] in told[1][1]


def test_one_bad_item_of_a_batch_fails_alone(endpoint: Any) -> None:
    @sgl.function(temperature=0, max_tokens=4)
    def ask(s: Any, text: str) -> None:
        s += text + gen("a")

    items = [{"text": "The Queen"}, {"text": "river " * 4000}, {"text": "Hello"}]
    good, bad, other = ask.run_batch(items, backend=endpoint, on_error="return")
    assert isinstance(bad, ProgramError)
    assert bad.status == 400
    assert good["a"]
    assert other["a"]


def test_nobody_is_there() -> None:
    @sgl.function
    def short(s: Any) -> None:
        s += "x" + gen("a", max_tokens=2)

    began = time.monotonic()
    with (
        endpoint_of("http://127.0.0.1:9", retries=1, lazy=True) as nowhere,
        pytest.raises(BackendError, match=r"127\.0\.0\.1:9") as caught,
    ):
        short.run(backend=nowhere)["a"]
    assert caught.value.retryable
    assert time.monotonic() - began < SOON_S


def test_a_server_that_is_no_runtime_is_told_from_one(tmp_path: Path) -> None:
    class Other(http.server.SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            body = b"<html>hello</html>"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    @sgl.function
    def short(s: Any) -> None:
        s += "x" + gen("a", max_tokens=2)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            with endpoint_of(f"http://127.0.0.1:{other.server_port}") as wrong, pytest.raises(BackendError):
                short.run(backend=wrong)["a"]
        finally:
            other.shutdown()
            thread.join(PATIENCE_S)


def test_deadlines_and_cancelling(endpoint: Any, shared_server: Any, wait_idle: Any) -> None:
    @sgl.function
    def endless(s: Any) -> None:
        s += "On and on" + gen("a", max_tokens=1900, ignore_eos=True, temperature=0)

    with pytest.raises(Timeout):
        endless.run(backend=endpoint, timeout=0.1)["a"]
    wait_idle(shared_server)
    state = endless.run(backend=endpoint, stream=True)
    next(iter(state.text_iter("a")))
    state.cancel()
    with pytest.raises(ProgramCancelled):
        state["a"]
    wait_idle(shared_server)


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_is_killed_is_an_error_and_no_hang(
    start_server: Any, wait_live: Any, stream: bool
) -> None:
    server = start_server().wait_ready()

    @sgl.function
    def endless(s: Any) -> None:
        s += "On and on" + gen("a", max_tokens=1900, ignore_eos=True, temperature=0)

    with endpoint_of(server.url, retries=1) as endpoint:
        hold(server.url)
        state = endless.run(backend=endpoint, stream=stream)
        wait_live(server, 1)
        go_on(server.url)
        server.children()["scheduler"].kill()
        began = time.monotonic()
        with pytest.raises(BackendError) as caught:
            state["a"]
        assert time.monotonic() - began < SOON_S
        assert caught.value.source is not None
        assert caught.value.retryable
        assert "the scheduler process was killed by SIGKILL" in str(caught.value)
        server.end(0)
        with pytest.raises(BackendError):
            endless.run(backend=endpoint)["a"]
        assert time.monotonic() - began < 2 * SOON_S


# -- Runtime -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runtime() -> Iterator[Any]:
    with sgl.Runtime(
        "pocket",
        api_key="s3cret",
        max_total_tokens=4096,
        threads=1,
        dtype="float32",
        launch_timeout=PATIENCE_S,
    ) as made:
        yield made


def test_a_runtime_is_a_backend(runtime: Any, inside: Any) -> None:
    @sgl.function(temperature=0, max_tokens=8)
    def talk(s: Any) -> None:
        s += user("Who rules Karsk?") + assistant(gen("a"))

    assert alike(talk, inside, runtime)["a"]
    sgl.set_default_backend(runtime)
    try:
        assert talk.run()["a"]
    finally:
        sgl.set_default_backend(None)


def test_a_runtime_can_be_used_without_programs(runtime: Any) -> None:
    greedy = {"max_new_tokens": 4, "temperature": 0}
    one = json.loads(runtime.generate("The Queen", greedy))
    many = json.loads(runtime.generate(["The Queen", "Hello"], greedy))
    assert many[0]["text"] == one["text"]
    assert len(many) == 2
    assert len(json.loads(runtime.encode(["a", "b"]))) == 2

    async def on_a_loop_of_its_own() -> None:
        try:
            pieces = [piece async for piece in runtime.async_generate("The Queen", greedy)]
            assert "".join(pieces) == one["text"]
            assert (await runtime.get_server_info())["backend"] == "endpoint"
        finally:
            await runtime.endpoint.aclose()

    asyncio.run(on_a_loop_of_its_own())
    text = "A long beginning to remember. " * 8
    until(runtime.flush_cache)
    runtime.cache_prefix(text)
    assert json.loads(runtime.generate(text + "Go", greedy))["meta_info"]["cached_tokens"] > 20
    assert "s3cret" not in runtime.log()


def test_a_runtime_that_cannot_start_says_why() -> None:
    for words, message in (
        ({"model_path": "/no/such/model"}, "/no/such/model: there is no such directory"),
        ({"max_total_tokenz": 5}, "max_total_tokens"),
        ({"port": -1}, "port"),
    ):
        with pytest.raises(BackendError, match=message):
            sgl.Runtime(**{"launch_timeout": PATIENCE_S, **words})  # whose end is told in other words
    with pytest.raises(BackendError, match=r"not ready within 0\.1 s"):
        sgl.Runtime("pocket", launch_timeout=0.1)


def test_what_an_endpoint_cannot_do_it_refuses(endpoint: Any) -> None:
    with pytest.raises(ValueError, match="starts with"):
        RuntimeEndpoint("localhost:30000")
    call = Call(Prompt((Message("raw", "x", open=True),)), SamplingParams(), options={"no_such_option": 1})
    with pytest.raises(Unsupported, match="no_such_option"):
        background().run(endpoint.generate(call), PATIENCE_S)

"""Defects of sglang's frontend that must not be here, by their numbers (W1-W12): errors and hangs, streams,
choices, stop texts. tutorials/coming_from_sglang.md says each in one line."""

from __future__ import annotations

import asyncio
import json
import linecache
from collections import Counter
from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl.backends.base import Backend, Call
from tests.unit.sglang_dsl.conformance.parts import TRIES, Api, Watched, event, generated, within


@sgl.function
def two(s: Any) -> None:
    s += sgl.user("One?")
    s += sgl.assistant(sgl.gen("a", max_tokens=4))
    s += sgl.user("Two?")
    s += sgl.assistant(sgl.gen("b", max_tokens=4))


def test_w01_errors_are_raised_where_values_are_read_with_their_place(backend: Backend) -> None:
    cause = ConnectionError("the cable was cut")
    state = two.run(backend=Watched(backend, errors={1: cause}))
    assert state["a"] is not None
    with pytest.raises(sgl.BackendError, match="the cable was cut") as caught:
        state["b"]
    error = caught.value
    assert (error.program, error.variable, error.backend) == ("two", "b", backend.name)
    assert error.source is not None
    assert error.source.file == __file__
    assert 'gen("b"' in linecache.getline(__file__, error.source.line)
    assert error.__cause__ is cause
    assert "gen" in (error.node or "").lower()
    with pytest.raises(sgl.BackendError):
        two.run_batch([{}, {}], backend=Watched(backend, errors={0: cause}))
    kept = two.run_batch(
        [{}, {}], backend=Watched(backend, errors={0: cause}), num_threads=1, on_error="return"
    )
    assert isinstance(kept[0], sgl.BackendError)
    assert kept[1]["b"] is not None


def test_w02_nothing_hangs_after_an_error(backend: Backend) -> None:
    @sgl.function
    def goes_on(s: Any) -> None:
        s += "x" + sgl.gen("a", max_tokens=2)
        s += "more" + sgl.gen("later", max_tokens=2)
        forks = s.fork(2)
        forks += sgl.gen("branch", max_tokens=2)
        s += " and more"

    def broken() -> sgl.ProgramState:
        return goes_on.run(backend=Watched(backend, errors={0: RuntimeError("down")}))

    reads: list[Any] = [
        lambda s: s["a"], lambda s: s["later"], lambda s: s.get_meta_info("later"),
        lambda s: s.text(), lambda s: s.messages(), lambda s: s.sync(),
        lambda s: s.fork(2)[0].text(), lambda s: list(s.text_iter("later")),
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(sgl.BackendError, match="down"):
            within(lambda read=read: read(broken()))
    assert isinstance(within(lambda: broken().error()), sgl.BackendError)
    assert "x" in within(lambda: repr(broken()))


def test_w03_a_returned_state_goes_on(backend: Backend) -> None:
    state = two.run(backend=backend)
    before = state.text()
    state += sgl.user("Three?")
    state += sgl.assistant(sgl.gen("c", max_tokens=4))
    assert within(state.text).startswith(before)
    assert within(lambda: state["c"]) == state.messages()[-1]["content"]


def test_w04_joining_by_appending_works_on_every_backend(backend: Backend) -> None:
    @sgl.function
    def documents(s: Any) -> None:
        s += sgl.user_begin()
        s += "Read these.\n"
        forks = s.fork(3)
        forks += lambda i: f"Document {i}.\n"
        forks.join("concate_and_append")
        s += "Who?" + sgl.user_end()
        s += sgl.assistant(sgl.gen("answer", max_tokens=4))

    state = documents.run(backend=backend)
    assert within(lambda: state["answer"]) is not None
    said = "Read these.\nDocument 0.\nDocument 1.\nDocument 2.\nWho?"
    assert state.messages()[0] == {"role": "user", "content": said}


def test_w05_several_samples_are_a_list_and_streams_do_not_mix_them(backend: Backend) -> None:
    @sgl.function
    def samples(s: Any) -> None:
        s += "The ruler is" + sgl.gen("x", n=3, max_tokens=3, temperature=1.0)

    state = samples.run(backend=backend, seed=4)
    assert isinstance(state["x"], list)
    assert len(state["x"]) == 3
    assert all(isinstance(text, str) for text in state["x"])
    assert state.text() == "The ruler is" + state["x"][0]
    streamed = samples.stream(backend=backend, seed=4)
    assert list(streamed.text_iter("x")) == [streamed["x"][0]]
    assert streamed["x"] == state["x"]


def test_w06_streams_lose_nothing_whichever_way_the_server_sends_them(api: Api) -> None:
    words = ["Hello", " wonder", "ful", " world"]
    whole = ["".join(words[: at + 1]) for at in range(len(words))]
    counted = [
        generated(text, at == 3) | {"output_ids": list(range(at + 1))} for at, text in enumerate(whole)
    ]
    parts = [generated(text, at == 3) | {"output_ids": [at]} for at, text in enumerate(words)]
    for told in (counted, parts):
        for at, one in enumerate(told):
            logprobs = [[-0.5, number, None] for number in range(4)][at if told is parts else 0 : at + 1]
            counts = {"completion_tokens": at + 1, "output_token_logprobs": logprobs}
            one["meta_info"] = one["meta_info"] | counts
        api.say = lambda path, body, told=told: (200, [*map(event, told), b"data: [DONE]\n\n"])
        backend = sgl.RuntimeEndpoint(api.url)
        state = sgl.function(lambda s: s.__iadd__("Say:" + sgl.gen("x"))).stream(backend=backend)
        assert "".join(state.text_iter("x")) == "Hello wonderful world" == state["x"]
        assert [one[1] for one in state.get_meta_info("x")["output_token_logprobs"]] == [0, 1, 2, 3]
        backend.close()


def test_w06_a_streams_pieces_are_the_text(backend: Backend) -> None:
    state = two.stream(backend=backend, temperature=0)
    assert "".join(state.text_iter("b")) == state["b"] == two.run(backend=backend, temperature=0)["b"]
    assert "".join(state.text_iter()) == state.text()


def test_w06_each_piece_comes_with_the_log_probabilities_of_its_own_tokens(pocket: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        words: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2, "temperature": 0}
        s += "The ruler of" + sgl.gen("x", max_tokens=9, **words)

    async def read() -> list[Any]:
        state = program.stream(backend=pocket)
        return [pair async for pair in state.text_async_iter("x", return_meta_data=True)]

    most = before = 0
    for _ in range(TRIES):
        told, before = asyncio.run(read()), 0
        for _, meta in told:
            assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] - before
            assert len(meta["output_top_logprobs"]) == meta["completion_tokens"] - before
            before = meta["completion_tokens"]
        if (most := max(most, len(told))) > 2:
            break
    assert most > 2
    whole = program.stream(backend=pocket).get_meta_info("x")
    assert len(whole["output_token_logprobs"]) == whole["completion_tokens"] == before


def test_w07_a_certain_token_counts(backend: Backend) -> None:
    @sgl.function
    def pick(s: Any) -> None:
        s += "Which?" + sgl.select("x", ["A", "B"])

    for scores in ({"A": [0.0], "B": [-2.5]}, {"A": [0.0, 0.0], "B": [-0.1, 0.0]}):
        state = pick.run(backend=Watched(backend, scores=scores))
        assert state["x"] == "A"
        assert state.choice("x").logprobs[0] == tuple(scores["A"])
    assert pick.run(backend=Watched(backend, scores={"A": [0.0], "B": [0.0]}))["x"] == "A"


def test_w08_options_are_scored_at_a_boundary_that_all_share(backend: Backend) -> None:
    @sgl.function
    def pick(s: Any, prompt: str, options: list[str]) -> None:
        s += prompt + sgl.select("x", options)

    for options in (["yes", "no"], ["a", "ab", "abc"], [" ", "  "], ["é", "e"], ["1", "12"]):
        choice = pick.run("Is it? The answer is ", options, backend=backend).choice("x")
        assert all(len(one) > 0 for one in choice.logprobs)
        assert sum(choice.probabilities) == pytest.approx(1)
    empty = Watched(backend, scores={"yes": [], "no": [-1.0]})
    with pytest.raises(sgl.BackendError, match="no scored token"):
        pick.run("Is it?", ["yes", "no"], backend=empty)["x"]


def test_w08_where_the_prompt_ends_makes_no_difference(pocket: Any) -> None:
    @sgl.function
    def pick(s: Any, prompt: str, options: list[str]) -> None:
        s += prompt + sgl.select("x", options)

    # One text three times, cut inside of words, before and after blanks: tokens of prompt and option merge.
    texts = ["The ruler of Hesper is Queen", "The ruler of Hesper is not", "The ruler of Hesper is"]
    margins = []
    for cut in (14, 17, 19, 20, 21):
        options = [text[cut:] for text in texts]
        state = pick.run(texts[0][:cut], options, backend=pocket)
        for option, tokens in zip(options, state.get_meta_info("x")["input_token_logprobs"], strict=True):
            # From the boundary on, which may stand a little before the option.
            assert "".join(text for _, _, text in tokens).endswith(option)
        choice = state.choice("x")
        sums = [sum(one) for one in choice.logprobs]
        margins.append([one - sums[0] for one in sums])
    for margin in margins:
        assert margin == pytest.approx(margins[0], abs=1e-2)


def test_w09_a_choice_can_be_drawn(backend: Backend) -> None:
    @sgl.function
    def pick(s: Any) -> None:
        s += "Which?" + sgl.select("x", ["A", "B"], temperature=1.0)

    scores = {"A": [-0.7], "B": [-0.7]}
    drawn = Counter(pick.run(backend=Watched(backend, scores=scores), seed=n)["x"] for n in range(60))
    assert min(drawn["A"], drawn["B"]) > 10
    assert pick.run(backend=backend, seed=3)["x"] == pick.run(backend=backend, seed=3)["x"]


def test_w10_there_is_a_method_that_does_not_prefer_long_options(backend: Backend) -> None:
    # The long option predicts itself after its first token: its mean is higher, its probability lower.
    scores = {"Paris": [-1.0], "The United Arab Emirates": [-3.0, -0.1, -0.1, -0.1]}

    @sgl.function
    def pick(s: Any, method: Any) -> None:
        s += "Where?" + sgl.select("x", list(scores), choices_method=method)

    watched = Watched(backend, scores=scores)
    assert pick.run(sgl.token_length_normalized, backend=watched)["x"] == "The United Arab Emirates"
    exact = pick.run(sgl.exact_string_likelihood, backend=watched).choice("x")
    assert exact.text == "Paris"
    assert exact.probability > 0.8


STOP = ["\n"]


def test_w11_the_users_stop_list_stays_theirs(backend: Backend) -> None:
    watched = Watched(backend)

    @sgl.function
    def program(s: Any, number: int) -> None:
        # Different each time, so that nothing that is remembered of the last one hides what grows.
        ended = sgl.gen("n", dtype=int, stop=STOP, max_tokens=4, top_k=100 + number)
        s += sgl.user("Hi")
        s += sgl.assistant(sgl.gen("x", max_tokens=2, stop=STOP, top_k=100 + number) + ended)

    for number in range(10):
        program.run(number, backend=watched).sync()
    assert STOP == ["\n"]
    lengths = [len(call.sampling.stop) for call in watched.calls if isinstance(call, Call)]
    assert lengths[2:] == lengths[:2] * 9


def test_w11_nor_does_a_template_of_the_client_touch_it(api: Api) -> None:
    api.say = lambda path, body: (200, [json.dumps(generated("fine", True)).encode()])
    endpoint = sgl.RuntimeEndpoint(api.url, chat_template_name="chatml")
    stop = ["END"]
    for _ in range(3):
        assert two.run(backend=endpoint, stop=stop)["b"] == "fine"
    endpoint.close()
    assert stop == ["END"]
    assert {tuple(body["sampling_params"]["stop"]) for body in api.bodies()} == {("END", "<|im_end|>")}


def test_w12_a_number_with_a_stop_text(backend: Backend) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "24 + 7 = " + sgl.gen("n", dtype=int, stop=".", max_tokens=8)
        s += " " + sgl.gen_int("m", stop="!", max_tokens=8)

    state = program.run(backend=backend)
    assert isinstance(int(state["n"]), int)
    assert isinstance(int(state["m"]), int)

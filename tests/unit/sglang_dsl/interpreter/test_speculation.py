"""num_api_spec_tokens: one reply for several generations, taken apart, and never more than the model said."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from sglang_dsl import BadProgram, MockBackend, gen
from sglang_dsl.backends.base import Call, Completion
from sglang_dsl.errors import BackendError, ProgramCancelled, ProgramError
from sglang_dsl.interpreter.speculation import match

CARD = "Name: Ada\nBirthday: May 4\nJob: smith\nWelcome.\n"


class Api(MockBackend):
    """The mock as an API would be: each call is paid. `prefills`: it goes on with a turn that has begun;
    `reports_tokens`: it says which tokens it made, here one per character."""

    speculates = True

    def __init__(self, replies: Any, *, prefills: bool = False, reports_tokens: bool = False) -> None:
        super().__init__(replies, tokens="bytes")
        self.prefills, self.reports_tokens = prefills, reports_tokens

    async def generate(self, call: Call) -> Completion:
        if not self.prefills and any(
            one.open and one.role != "raw" and one.content for one in call.prompt.messages
        ):
            raise BackendError("this API cannot go on with a turn that has begun")
        done = await super().generate(call)
        if call.return_logprob:
            done.meta["output_token_logprobs"] = [[0.0, None, char] for char in done.texts[0]]
        return done


def text_model(whole: str) -> Any:
    """A model that knows one text by heart and goes on with it from wherever the prompt has got to."""

    def reply(call: Call) -> str:
        prompt = call.prompt.plain_text
        if prompt is None:
            content = call.prompt.messages[-1].content
            prompt = content if isinstance(content, str) else ""
        known = max(n for n in range(len(prompt) + 1) if whole.startswith(prompt[len(prompt) - n :]))
        return whole[known:]

    return reply


@sgl.function(num_api_spec_tokens=256)
def card(s: Any) -> None:
    s += (
        "Name:"
        + gen("name", stop="\n", temperature=0)
        + "\nBirthday:"
        + gen("birthday", stop="\n", temperature=0)
    )
    s += "\nJob:" + gen("job", stop="\n", temperature=0) + "\nWelcome.\n"


@sgl.function(num_api_spec_tokens=256)
def chat_card(s: Any) -> None:
    s += sgl.user("A card, please.")
    s += sgl.assistant(
        "Name:" + gen("name", stop="\n") + "\nBirthday:" + gen("birthday", stop="\n") + "\nJob:"
        + gen("job", stop="\n") + "\nWelcome.\n"
    )  # fmt: skip
    s += sgl.user("Thanks.")
    s += sgl.assistant(gen("bye", max_tokens=8))


@pytest.mark.parametrize("reports_tokens", [False, True])
def test_following_text_and_values_come_from_one_call(reports_tokens: bool) -> None:
    backend = Api(text_model(CARD), reports_tokens=reports_tokens)
    state = card.run(backend=backend)
    plain = card.options(num_api_spec_tokens=None).run(backend=MockBackend(text_model(CARD)))
    assert state.text() == plain.text() == CARD
    assert [state[name] for name in ("name", "birthday", "job")] == [" Ada", " May 4", " smith"]
    assert len(backend.calls) == 1
    assert backend.calls[0].sampling.max_new_tokens == 256
    assert backend.calls[0].sampling.stop == ()
    assert state.usage()["calls"] == 1
    assert state.get_meta_info("job")["speculated"] is True
    assert state.get_meta_info("job")["finish_reason"] == {"type": "stop", "matched": "\n"}
    assert "speculated" not in state.get_meta_info("name")
    assert "output_token_logprobs" not in state.get_meta_info("name")


def test_text_that_the_model_did_not_say_discards_the_rest() -> None:
    @sgl.function(num_api_spec_tokens=64)
    def other(s: Any) -> None:
        s += (
            "Name:"
            + gen("name", stop="\n", temperature=0)
            + "\nTown:"
            + gen("town", stop="\n", temperature=0)
        )

    backend = Api(
        lambda call: " Rom\n" if "Town" in (call.prompt.plain_text or "") else " Ada\nBirthday: May 4\n"
    )
    assert other.run(backend=backend)["town"] == " Rom"
    assert len(backend.calls) == 2


def test_max_tokens_hold_by_tokens_or_by_a_call_of_its_own() -> None:
    @sgl.function(num_api_spec_tokens=64)
    def short(s: Any) -> None:
        s += "Name:" + gen("name", max_tokens=3, temperature=0) + gen("rest", max_tokens=2, temperature=0)

    for reports_tokens, calls in ((True, 1), (False, 4)):
        backend = Api(text_model(CARD), reports_tokens=reports_tokens)
        state = short.run(backend=backend)
        assert (state["name"], state["rest"]) == (" Ad", "a\n")
        assert state.get_meta_info("name")["finish_reason"]["type"] == "length"
        assert len(backend.calls) == calls


def test_what_samples_otherwise_is_asked_for_by_itself() -> None:
    @sgl.function(num_api_spec_tokens=64, temperature=0)
    def mixed(s: Any) -> None:
        s += "Name:" + gen("name", stop="\n") + "\nBirthday:" + gen("birthday", stop="\n", temperature=0.5)
        s += "\nJob:" + gen("job", regex=" [a-z]+") + sgl.select("end", ["\nWelcome.", "x"])

    backend = Api(text_model(CARD[:-10]))
    state = mixed.run(backend=backend)
    assert state["job"] == " smith"
    assert len(backend.calls) == 3


def test_a_chat_turn_is_one_call_where_turns_cannot_be_gone_on_with() -> None:
    backend = Api([CARD, "bye"])
    state = chat_card.run(backend=backend)
    assert [state[name] for name in ("job", "birthday", "name")] == [" smith", " May 4", " Ada"]
    assert state["bye"] == "bye"
    assert [turn["content"] for turn in state.messages()] == ["A card, please.", CARD, "Thanks.", "bye"]
    assert len(backend.calls) == 2
    # A turn of one generation is an ordinary call.
    assert backend.calls[1].sampling.max_new_tokens == 8


def test_a_chat_turn_goes_on_where_it_can() -> None:
    backend = Api(text_model(CARD), prefills=True, reports_tokens=True)
    state = chat_card.run(backend=backend)
    assert state.messages()[1]["content"] == CARD
    assert len(backend.calls) == 2


def test_a_reply_that_does_not_follow_is_asked_for_again_and_then_told() -> None:
    wrong = CARD.replace("Job", "Work")
    backend = Api([wrong, CARD, "bye"])
    assert chat_card.run(backend=backend)["job"] == " smith"
    backend = Api([wrong, wrong, wrong, CARD])
    state = chat_card.run(backend=backend)
    with pytest.raises(BackendError, match=r"3 replies did not follow.*'\\nJob:' was to come.*Work") as told:
        _ = state["birthday"]
    assert told.value.variable == "name"
    assert told.value.source is not None
    assert len(backend.calls) == 3
    for name in ("name", "job", "bye"):
        with pytest.raises(ProgramError):
            _ = state[name]


@pytest.mark.parametrize("stop", ["early", "inside", "scope", "fork", "end"])
def test_reading_before_the_end_of_a_turn_asks_at_once(stop: str) -> None:
    @sgl.function(num_api_spec_tokens=64)
    def program(s: Any) -> None:
        s += sgl.user("?")
        s += sgl.assistant_begin()
        with s.var_scope("both"):
            s += "A:" + gen("a", stop=";") + ";"
            s += "B:" + gen("b", stop=";") + ";"
        match stop:
            case "early":
                assert s["a"] == "1"
            case "inside":
                assert s.text().endswith("A:1;B:2;")
            case "scope":
                assert s["both"] == "A:1;B:2;"
            case "fork":
                first, second = s.fork(2)
                assert first["b"] == second["b"] == "2"
            case _:
                pass
        s += sgl.assistant_end()

    backend = Api(["A:1;B:2;and so on"])
    state = program.run(backend=backend)
    state.sync()
    assert state["both"] == "A:1;B:2;"
    assert len(backend.calls) == 1


def test_an_open_turn_is_answered_when_it_is_read() -> None:
    @sgl.function(num_api_spec_tokens=64)
    def program(s: Any) -> None:
        s += sgl.user("?") + sgl.assistant_begin() + "A:" + gen("a", stop=";") + ";B:" + gen("b")

    backend = Api(lambda call: "A:1;B:2")
    assert program.run(backend=backend)["b"] == "2"
    state = program.run(backend=backend)
    state.cancel()
    with pytest.raises(ProgramCancelled):
        _ = state["a"]


def test_a_turn_that_one_reply_cannot_hold_is_refused_with_the_reason() -> None:
    def turn(*parts: Any) -> Any:
        @sgl.function(num_api_spec_tokens=64)
        def program(s: Any) -> None:
            s += sgl.user("?")
            s += sgl.assistant(sgl.ir.concat(*parts))

        return program.run(backend=Api(lambda call: "A1;B2;"))

    for parts, words in (
        (("A", gen("a"), ";B", gen("b")), "stop"),
        (("A", gen("a", stop=";"), ";B", gen("b", stop=";", temperature=0.5)), "other sampling parameters"),
        (("A", gen("a", stop=";", n=2), ";B", gen("b", stop=";")), "has n"),
        (("A", gen("a", regex="[0-9]"), ";B", gen("b", stop=";")), "constraint"),
    ):
        with pytest.raises(ProgramError, match=words):
            turn(*parts).sync()


def test_other_backends_run_the_program_as_it_is_and_streams_are_refused() -> None:
    backend = MockBackend(text_model(CARD))
    assert card.run(backend=backend).text() == CARD
    assert len(backend.calls) == 3
    assert "".join(card.stream(backend=MockBackend(text_model(CARD))).text_iter()) == CARD
    with pytest.raises(BadProgram, match="cannot stream"):
        card.stream(backend=Api(text_model(CARD)))
    wrongs: list[Any] = [0, -1, True, "8", 1.5]
    for wrong in wrongs:
        with pytest.raises(BadProgram, match="num_api_spec_tokens"):
            card.options(num_api_spec_tokens=wrong)


def test_bound_arguments_and_other_words_keep_it() -> None:
    @sgl.function(num_api_spec_tokens=64)
    def program(s: Any, title: str) -> None:
        s += title + gen("a", stop="\n") + "\nBirthday:" + gen("b", stop="\n")

    for made in (program.bind(title="Name:"), program.bind(title="Name:").options(temperature=0)):
        backend = Api(text_model(CARD))
        assert made.run(backend=backend)["b"] == " May 4"
        assert len(backend.calls) == 1


def test_many_at_once_keep_their_own() -> None:
    @sgl.function(num_api_spec_tokens=64)
    def program(s: Any, who: int) -> None:
        s += sgl.user(f"I am {who}")
        s += sgl.assistant("A" + gen("a", stop=";") + ";B" + gen("b", stop=";") + ";")
        forks = s.fork(2)
        for index, fork in enumerate(forks):
            fork += sgl.user(f"branch {index}") + sgl.assistant("C" + gen("c", stop=";") + ";D" + gen("d"))
        forks.join()

    def reply(call: Call) -> str:
        who = re.search("I am ([0-9]+)", str(call.prompt.messages[0].content))
        assert who is not None
        branch = re.search("branch ([0-9])", str(call.prompt.messages[-2].content))
        return f"C{who[1]};D{branch[1]}" if branch else f"A{who[1]};B{who[1]};"

    states = program.run_batch([{"who": number} for number in range(40)], backend=Api(reply))
    for number, state in enumerate(states):
        assert (state["a"], state["b"]) == (str(number), str(number))
        assert (state["c"], state["d"]) == ([str(number)] * 2, ["0", "1"])


def test_going_back_forgets_what_was_kept() -> None:
    @sgl.function(num_api_spec_tokens=64, temperature=0)
    def program(s: Any) -> None:
        s += "Name:"
        here = s.checkpoint()
        s += gen("name", stop="\n")
        s.rollback(here)
        s += "\nBirthday:" + gen("b", stop="\n")

    backend = Api(
        lambda call: " Ada\nBirthday: May 4\n" if call.prompt.plain_text == "Name:" else " June 1\n"
    )
    assert program.run(backend=backend)["b"] == " June 1"


def test_replies_replay_from_a_record(tmp_path: Any) -> None:
    first = chat_card.run(backend=Api([CARD, "bye"]), cache_dir=tmp_path, seed=1)
    first.sync()
    again = chat_card.run(backend=Api([]), cache_dir=tmp_path, cache="ro", seed=1)
    assert again.messages() == first.messages()


def test_reading_from_several_threads_ends() -> None:
    state = chat_card.run(backend=Api([CARD, "bye"]))
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(state["job"])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert found == [" smith"] * 4


WORD = st.text("ab ", min_size=0, max_size=4)


@given(
    st.lists(st.tuples(WORD, WORD), min_size=1, max_size=4),
    st.text("ab;", max_size=3),
    st.integers(1, 30),
    st.integers(1, 12),
    st.booleans(),
)
def test_the_text_is_that_of_the_program_as_it_is(
    fields: list[tuple[str, str]], tail: str, ahead: int, most: int, reports_tokens: bool
) -> None:
    """Any text of a model, any number of tokens asked for ahead: values are those of single calls."""
    whole = "".join(f"{title}:{value};" for title, value in fields) + tail

    @sgl.function(temperature=0)
    def program(s: Any) -> None:
        for index, (title, _) in enumerate(fields):
            s += f"{title}:" + gen(f"v{index}", stop=";", max_tokens=most) + ";"

    def exact(call: Call) -> str:
        prompt = call.prompt.plain_text or ""
        return whole[len(prompt) :] if whole.startswith(prompt) else "off;"

    plain = program.run(backend=MockBackend(exact, tokens="bytes"))
    backend = Api(exact, reports_tokens=reports_tokens)
    ahead_of = program.run(backend=backend, num_api_spec_tokens=ahead)
    assert ahead_of.text() == plain.text()
    for index in range(len(fields)):
        assert ahead_of[f"v{index}"] == plain[f"v{index}"]
        kinds = [state.get_meta_info(f"v{index}")["finish_reason"]["type"] for state in (plain, ahead_of)]
        # The mock lets a stop string count for nothing at the limit itself; an engine does not.
        assert kinds[0] == kinds[1] or len(plain[f"v{index}"]) == most


def test_matching_says_what_does_not_match() -> None:
    assert match(["A", (";",), ";B", ("\n", "; ")], "A1;B2", complete=True) == [
        ("1", {"type": "stop", "matched": ";"}),
        ("2", {"type": "stop"}),
    ]
    assert "cut at its token limit" in str(match(["A", (";",), ";"], "A1", complete=False))
    assert "limit ended it" in str(match(["A", (";",), ";BBB"], "A1;B", complete=False))
    assert "it says 'X'" in str(match(["A"], "X", complete=True))


def test_async_programs_and_inline_ones_read_in_the_middle_of_a_turn() -> None:
    @sgl.function(num_api_spec_tokens=64)
    async def program(s: Any) -> list[str]:
        s += sgl.user("?")
        async with s.assistant():
            s += "A:" + gen("a", stop=";") + ";B:" + gen("b", stop=";") + ";"
            return [await s["a"], await s["b"]]

    @sgl.function(num_api_spec_tokens=64)
    def inline(s: Any) -> None:
        s += sgl.user("?")
        s += sgl.assistant("A:" + gen("a", stop=";") + ";B:" + gen("b", stop=";") + ";")

    async def main() -> Any:
        return (await program.arun(backend=Api(["A:1;B:2;"]))).ret_value

    assert asyncio.run(main()) == ["1", "2"]
    backend = Api(["A:1;B:2;"])
    assert inline.run(backend=backend, use_thread=False)["b"] == "2"
    assert len(backend.calls) == 1


def test_budgets_timeouts_and_cancelling_end_a_turn_for_all_its_readers(idle: Callable[[], int]) -> None:
    @sgl.function(num_api_spec_tokens=64)
    def program(s: Any) -> None:
        s += sgl.user("?")
        s += sgl.assistant("A:" + gen("a", stop=";") + ";B:" + gen("b", stop=";") + ";")
        with s.assistant(), s.var_scope("scope"):
            s += "C:" + gen("c", stop=";", timeout=0.05) + ";D:" + gen("d") + ";"

    def slow(call: Call) -> Any:
        return "A:1;B:2;" if len(call.prompt.messages) == 2 else never()

    async def never() -> str:
        await asyncio.sleep(3600)
        return ""

    state = program.run(backend=Api(slow))
    assert state["b"] == "2"
    for name in ("d", "c", "scope"):
        with pytest.raises(ProgramError) as told:
            _ = state[name]
    assert told.value.variable == "c"
    spent = program.run(backend=Api(lambda call: "A:1;B:2;"), budget=sgl.Budget(calls=0))
    for name in ("a", "b", "c"):
        with pytest.raises(sgl.BudgetExceeded):
            _ = spent[name]
    cancelled = program.run(backend=Api(lambda call: never()))
    cancelled.cancel()
    for name in ("a", "scope"):
        with pytest.raises(ProgramCancelled):
            _ = cancelled[name]
    assert idle() == 0


PARTS = st.lists(
    st.one_of(
        st.sampled_from(["x", "y;", ";"]).map(lambda text: ("text", text)),
        st.sampled_from(["a", "b", "c"]).map(lambda name: ("gen", name)),
        st.sampled_from(["a", "b", "c"]).map(lambda name: ("read", name)),
        st.sampled_from(["text", "scope", "fork", "back", "turn", "cancel"]).map(lambda what: (what, "")),
    ),
    max_size=12,
)


@given(PARTS, st.booleans(), st.integers(0, 3))
def test_whatever_a_program_does_it_ends(parts: list[tuple[str, str]], prefills: bool, broken: int) -> None:
    """Values or errors, but every reader gets one, and nothing is left running."""
    backend = Api(lambda call: "x1;y;;x2;y;"[broken:], prefills=prefills)
    backend.errors = {4: RuntimeError("broken")}

    @sgl.function(num_api_spec_tokens=16)
    def program(s: Any) -> None:
        s += sgl.user("?") + sgl.assistant_begin()
        here = s.checkpoint()
        for what, name in parts:
            match what:
                case "text":
                    s += name or s.text()[-2:]
                case "gen":
                    s += gen(name, stop=";", max_tokens=8)
                case "read" if name in s:
                    assert isinstance(s[name], str)
                case "scope":
                    with s.var_scope("scope"):
                        s += "x" + gen("a", stop=";")
                case "fork":
                    forks = s.fork(2)
                    forks += gen("f", stop=";")
                    forks.join()
                case "back":
                    s.rollback(here)
                case "turn" if s.core.open_role() == "assistant":
                    s += sgl.assistant_end() + sgl.user("!") + sgl.assistant_begin()
                    here = s.checkpoint()
                case "cancel":
                    s.cancel()
                case _:
                    pass

    try:
        state = program.run(backend=backend)
        state.sync()
    except (ProgramError, BadProgram):
        return
    for name in ("a", "b", "c", "scope"):
        if name in state:
            assert isinstance(state[name], str)


@given(st.lists(st.tuples(WORD, WORD), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_a_turn_in_one_reply_says_what_calls_one_by_one_say(
    fields: list[tuple[str, str]], ends_open: bool, scoped: bool
) -> None:
    whole = "".join(f"{title}:{value};" for title, value in fields)
    whole = whole[: len(whole) - ends_open]

    @sgl.function(temperature=0)
    def program(s: Any) -> None:
        s += sgl.user("?")
        with s.assistant():
            for index, (title, _) in enumerate(fields):
                s += f"{title}:"
                if scoped:
                    with s.var_scope(f"scope{index}"):
                        s += gen(f"v{index}", stop=";")
                else:
                    s += gen(f"v{index}", stop=";")
                s += "" if ends_open and index == len(fields) - 1 else ";"

    def exact(call: Call) -> str:
        content = call.prompt.messages[-1].content
        assert isinstance(content, str)
        return whole[len(content) :]

    plain = program.run(backend=MockBackend(exact, tokens="bytes"))
    for prefills in (False, True):
        backend = Api(exact, prefills=prefills, reports_tokens=True)
        together = program.run(backend=backend, num_api_spec_tokens=128)
        assert together.messages() == plain.messages()
        for name in plain.stream_executor.variables:
            assert together[name] == plain[name]
        assert len(backend.calls) <= len(fields)
        if not prefills:
            assert len(backend.calls) == 1

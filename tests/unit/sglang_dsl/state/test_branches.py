"""Choosing among branches, going back, joining by policy: in both faces, with failures, with losers
stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from sglang_dsl.errors import BadProgram, MissingVariable, NoWinner, ProgramError, StateClosed, Timeout
from sglang_dsl.interpreter.joins import MODES, joined_values
from sglang_dsl.state.branches import count_votes

NEVER_S = 3600.0


def by_branch(delays: dict[str, float], failing: tuple[str, ...] = ()) -> sgl.MockBackend:
    """Replies with the prompt's last letter, after that letter's delay."""

    async def reply(call: Any) -> str:
        letter = call.prompt.plain_text[-1]
        await asyncio.sleep(delays.get(letter, 0.0))
        if letter in failing:
            raise OSError(f"{letter} is down")
        return str(letter.upper())

    return sgl.MockBackend(reply)


def forked(s: Any, letters: str = "abc") -> Any:
    s += "choose "
    forks = s.fork(len(letters))
    forks += lambda index: letters[index] + sgl.gen("x")
    return forks


FACES = ["sync", "async"]


def run(face: str, body: Callable[[Any], Any], backend: Any) -> Any:
    """`body(forks)`: a choice; gives the winner's x."""
    if face == "sync":

        @sgl.function
        def program(s: Any) -> Any:
            found = body(forked(s))
            if isinstance(found, sgl.ProgramState):
                s.adopt(found)
                return found["x"], s["x"], s.text()
            return found

        return program.run(backend=backend).ret_value

    @sgl.function
    async def aprogram(s: Any) -> Any:
        found = await body(forked(s))
        if isinstance(found, sgl.AsyncProgramState):
            await s.adopt(found)
            return await found["x"], await s["x"], await s.text()
        return found

    return asyncio.run(aprogram.arun(backend=backend)).ret_value


@pytest.mark.parametrize("face", FACES)
def test_the_first_to_end_wins_and_the_others_stop(face: str, idle: Callable[[], int]) -> None:
    backend = by_branch({"a": NEVER_S, "c": NEVER_S})
    assert run(face, lambda forks: forks.race(), backend) == ("B", "B", "choose bB")
    assert idle() == 0
    assert backend.in_flight == 0


@pytest.mark.parametrize("face", FACES)
def test_failed_branches_lose(face: str) -> None:
    assert run(face, lambda forks: forks.race(), by_branch({"c": 0.02}, ("a", "b")))[0] == "C"
    with pytest.raises(ProgramError, match="a is down"):
        run(face, lambda forks: forks.race(), by_branch({}, ("a", "b", "c")))


@pytest.mark.parametrize("face", FACES)
def test_the_first_valid_one(face: str, idle: Callable[[], int]) -> None:
    def is_c(state: Any) -> Any:
        return state["x"] == "C"

    async def is_c_async(state: Any) -> Any:
        return await state["x"] == "C"

    accept = is_c if face == "sync" else is_c_async
    assert run(face, lambda forks: forks.first_valid(accept), by_branch({"c": 0.02}, ("b",)))[0] == "C"
    with pytest.raises(
        NoWinner, match="none of 3 branches was accepted: 2 were rejected, 1 failed"
    ) as caught:
        run(face, lambda forks: forks.first_valid(lambda state: False), by_branch({}, ("b",)))
    assert "b is down" in str(caught.value.__cause__)

    def broken(state: Any) -> bool:
        raise ValueError("a mistake of mine")

    backend = by_branch({"b": NEVER_S, "c": NEVER_S})
    with pytest.raises(ValueError, match="a mistake of mine"):
        run(face, lambda forks: forks.first_valid(broken), backend)
    assert idle() == 0
    assert backend.in_flight == 0


@pytest.mark.parametrize("face", FACES)
def test_the_best_one(face: str) -> None:
    scores = {"A": 1.0, "B": 3.0, "C": float("nan")}

    async def score_async(state: Any) -> float:
        return scores[await state["x"]]

    score: Any = (lambda state: scores[state["x"]]) if face == "sync" else score_async
    assert run(face, lambda forks: forks.best_of(score), by_branch({}))[0] == "B"
    assert run(face, lambda forks: forks.best_of(score), by_branch({}, ("b",)))[0] == "A"
    with pytest.raises(ProgramError, match="a is down"):
        run(face, lambda forks: forks.best_of(score), by_branch({}, ("a", "b", "c")))
    # The earliest on a tie, whichever ended first.
    assert run(face, lambda forks: forks.best_of(lambda state: 1), by_branch({"a": 0.02}))[0] == "A"


@pytest.mark.parametrize("face", FACES)
def test_votes(face: str) -> None:
    backend = sgl.MockBackend(lambda call: "yes" if call.prompt.plain_text[-1] in "bc" else "No")
    vote = run(face, lambda forks: forks.vote("x"), backend)
    assert (vote.value, vote.count, vote.failed) == ("yes", 2, 0)
    assert vote.share == pytest.approx(2 / 3)
    assert run(face, lambda forks: forks.vote("x", key=len), backend).counts == ((3, 2), (2, 1))
    with pytest.raises(NoWinner, match="3 failed"):
        run(face, lambda forks: forks.vote("x"), by_branch({}, ("a", "b", "c")))


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_a_tally_counts_every_vote_and_ties_go_to_the_earliest(values: list[str]) -> None:
    vote = count_votes(values, 0)
    assert dict(vote.counts) == {value: values.count(value) for value in values}
    most = max(values.count(value) for value in values)
    assert vote.value == next(value for value in values if values.count(value) == most)
    assert count_votes([[1], [2], [2]], 0).value == [2]  # also what cannot be hashed


@pytest.mark.parametrize("face", FACES)
def test_choices_have_deadlines(face: str, idle: Callable[[], int]) -> None:
    backend = by_branch(dict.fromkeys("abc", NEVER_S))
    with pytest.raises(Timeout, match=r"3 branches did not finish within 0\.05 s"):
        run(face, lambda forks: forks.race(timeout=0.05), backend)
    assert idle() == 0
    assert backend.in_flight == 0
    with pytest.raises(BadProgram, match="timeout must be a positive"):
        run(face, lambda forks: forks.race(timeout=0), by_branch({}))


@pytest.mark.parametrize("face", FACES)
def test_map_runs_side_by_side_and_keeps_order(face: str, idle: Callable[[], int]) -> None:
    letters = list("edcba")
    others, given = asyncio.Event(), by_branch({})

    async def reply(call: Any) -> str:
        if call.prompt.plain_text[-1] == "e":
            await asyncio.wait_for(others.wait(), 60)  # the first goes on when another has begun
        others.set()
        return await given.replies(call)  # type: ignore[operator, misc, no-any-return]

    backend = sgl.MockBackend(reply)
    if face == "sync":

        def work(state: Any, letter: str) -> Any:
            state += letter + sgl.gen("x")
            return state["x"] if letter != "a" else None

        @sgl.function
        def program(s: Any) -> Any:
            s += "go "
            return s.map(work, letters), s.map(work, [])

        found, nothing = program.run(backend=backend).ret_value
        last = found[-1]["x"]
    else:

        async def awork(state: Any, letter: str) -> Any:
            state += letter + sgl.gen("x")
            return await state["x"] if letter != "a" else None

        @sgl.function
        async def aprogram(s: Any) -> Any:
            s += "go "
            made = await s.map(awork, letters)
            return made, await s.map(awork, []), await made[-1]["x"]

        found, nothing, last = asyncio.run(aprogram.arun(backend=backend)).ret_value
    assert (found[:-1], nothing, last) == (["E", "D", "C", "B"], [], "A")
    assert backend.most_in_flight > 1

    failing = by_branch({"a": NEVER_S}, ("c",))
    with pytest.raises(ProgramError, match="c is down"):
        program.run(backend=failing) if face == "sync" else asyncio.run(aprogram.arun(backend=failing))
    assert idle() == 0


# -- going back ----------------------------------------------------------------------------------------------


def test_a_blocking_choice_refuses_an_async_judge(idle: Callable[[], int]) -> None:
    """Its coroutine would count as true without ever having run."""

    async def judge(state: Any) -> bool:
        await asyncio.sleep(0)
        return False

    for choose in ("first_valid", "best_of"):

        @sgl.function
        def program(s: Any, choose: str = choose) -> None:
            getattr(forked(s), choose)(judge)

        with pytest.raises(BadProgram, match="async"):
            program.run(backend=by_branch({}))
    assert idle() == 0


def test_going_back_forgets_what_was_said_set_and_went_wrong() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("Q")
        s += sgl.assistant_begin() + sgl.gen("kept")
        before = s.checkpoint()
        s += " more " + sgl.gen("lost")
        s["mine"] = 1
        assert s.error() is not None
        s.rollback(before)
        assert s.error() is None
        assert "lost" not in s
        assert "mine" not in s
        s += " again " + sgl.gen("found") + sgl.assistant_end()

    state = program.run(backend=sgl.MockBackend(["one", "never", "two"], errors={1: OSError("down")}))
    assert state["kept"] == "one"
    assert state["found"] in ("never", "two")
    assert state.messages()[1]["content"] == f"one again {state['found']}"
    with pytest.raises(MissingVariable):
        state["lost"]


def test_retry_until_valid() -> None:
    replies = iter(["x", "y", "42", "z"])

    @sgl.function
    def program(s: Any) -> int:
        s += "The answer is "
        before = s.checkpoint()
        for _ in range(5):
            s += sgl.gen("n")
            if s["n"].isdigit():
                return int(s["n"])
            s.rollback(before)
        raise AssertionError

    state = program.run(backend=sgl.MockBackend(lambda call: next(replies)))
    assert (state.ret_value, state.text()) == (42, "The answer is 42")


def test_going_back_over_turns_scopes_and_what_is_under_way(idle: Callable[[], int]) -> None:
    backend = sgl.MockBackend(delay_s=NEVER_S)

    @sgl.function
    def program(s: Any) -> None:
        s += "a"
        before = s.checkpoint()
        s += sgl.user_begin() + "in a turn" + sgl.gen("slow")
        s.cancel()
        s.rollback(before)
        with s.var_scope("all"):
            s += "b"
        s += sgl.user("whole")

    state = program.run(backend=backend)
    assert (state["all"], state.text()) == ("b", "abUSER: whole\n")
    assert idle() == 0


def test_checkpoints_belong_to_their_state_and_streams_cannot_go_back() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a"
        with s.copy() as other:
            other.rollback(s.checkpoint())

    with pytest.raises(BadProgram, match="belongs to another state"):
        program.run()

    @sgl.function
    def streamed(s: Any) -> None:
        s += "a" + sgl.gen("x")
        s.rollback(s.checkpoint())

    with pytest.raises(BadProgram, match="cannot go back"):
        list(streamed.stream(backend=sgl.MockBackend()).text_iter())


def test_forks_of_what_was_rolled_back_go_on() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a"
        before = s.checkpoint()
        s += "b"
        forks = s.fork(2)
        s.rollback(before)
        forks += "c" + sgl.gen("x")
        s += "d"
        assert forks[0].text().startswith("abc")
        forks.join()

    state = program.run(backend=sgl.MockBackend())
    assert (state.text(), len(state["x"])) == ("ad", 2)


# -- joins ---------------------------------------------------------------------------------------------------

NAMES = st.dictionaries(st.sampled_from("xyz"), st.integers(0, 9), max_size=3)


@given(st.lists(NAMES, min_size=1, max_size=4), st.sets(st.sampled_from("xyz")))
def test_join_policies(branches: list[dict[str, int]], known: set[str]) -> None:
    names = {name for values in branches for name in values}
    having = {name: [i for i, values in enumerate(branches) if name in values] for name in names}
    gathered = joined_values("gather_variable", branches, known)
    assert gathered == {name: [branches[i][name] for i in having[name]] for name in names}
    as_dict = joined_values("dict", branches, known)
    assert as_dict == {name: {i: branches[i][name] for i in having[name]} for name in names}
    last = joined_values("overwrite", branches, known)
    assert last == {name: branches[having[name][-1]][name] for name in names}
    assert joined_values("concate_and_append", branches, known) == {}
    if any(len(having[name]) > 1 or name in known for name in names):
        with pytest.raises(BadProgram, match="set"):
            joined_values("error", branches, known)
    else:
        assert joined_values("error", branches, known) == last


@pytest.mark.parametrize("mode", [*MODES, "list"])
@pytest.mark.parametrize("face", FACES)
def test_join_modes_in_programs(mode: str, face: str) -> None:
    wanted = {
        "gather_variable": ["A", "B"],
        "list": ["A", "B"],
        "dict": {0: "A", 1: "B"},
        "overwrite": "B",
    }
    backend = by_branch({})
    if face == "sync":

        @sgl.function
        def program(s: Any) -> None:
            forked(s, "ab").join(mode)

        start: Any = lambda: program.run(backend=backend)  # noqa: E731
    else:

        @sgl.function
        async def aprogram(s: Any) -> None:
            await forked(s, "ab").join(mode)

        start = lambda: aprogram.run(backend=backend)  # noqa: E731
    if mode == "error":
        with pytest.raises(BadProgram, match="the branches 0, 1 all set 'x'"):
            start()
    elif mode == "concate_and_append":
        state = start()
        assert (state.text(), "x" in state) == ("choose aAbB", False)
    else:
        assert start()["x"] == wanted[mode]


def test_unknown_modes_and_joined_branches() -> None:
    @sgl.function
    def program(s: Any) -> None:
        forked(s).join("sideways")

    with pytest.raises(BadProgram, match="unknown join mode 'sideways'"):
        program.run(backend=by_branch({}))

    @sgl.function
    def late(s: Any) -> None:
        forks = forked(s)
        forks.join()
        forks[0] += "more"

    with pytest.raises(StateClosed):
        late.run(backend=by_branch({}))

"""Where text of a program meets text of the model: prompt and gen, gen and literal, options of a select. What
the model computes is what the tokenizer makes of the whole text, and token healing is had where it is asked
for."""

from __future__ import annotations

from typing import Any

import pytest

import sglang_dsl as sgl
from runtime.protocol.io_struct import GenerateOutput, GenerateReqInput
from sglang_dsl.backends.engine import EngineBackend

PROMPT, FORCED = "Who is the Que", "en"


class Watched:
    """An engine, and what was asked of it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.seen: list[tuple[GenerateReqInput, GenerateOutput]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def submit(self, request: GenerateReqInput) -> GenerateOutput:
        output: GenerateOutput = await self._engine.submit(request)
        self.seen.append((request, output))
        return output


@pytest.fixture
def watched(engine: Any) -> Watched:
    return Watched(engine)


@sgl.function(temperature=0)
def seams(s: Any, healing: bool | None) -> None:
    """Every literal begins or ends in the middle of a word."""
    s += PROMPT + sgl.gen("who", regex=FORCED, max_tokens=20, token_healing=healing)
    s += "s of the ri" + sgl.select("where", ["ver", "ch", "vers end"]) + ", and wh"
    s += sgl.gen("said", max_tokens=6, token_healing=healing) + "s."
    s += sgl.select("end", ["s", " End"])


@pytest.mark.parametrize("healing", [None, False, True])
def test_every_call_computes_the_tokenizers_own_ids_of_the_whole_text(
    watched: Watched, healing: bool | None
) -> None:
    state = seams.run(healing, backend=EngineBackend(watched))
    state.sync()
    assert state["who"] == FORCED
    assert len(watched.seen) == 4
    text, encode = state.text(), watched.encode
    for request, output in watched.seen:
        # Gen and literal: what the model wrote goes on as text, and no seam is left in the ids.
        assert request.text is not None
        assert text.startswith(request.text)
        if request.choices is None:
            assert output.meta["prompt_tokens"] == len(encode(request.text))
        assert request.token_healing is bool(healing and request.choices is None)
        for option in output.choices or ():
            whole = encode(request.text + option.text)
            assert whole[len(whole) - len(option.token_ids) :] == list(option.token_ids)
    starts = [watched.seen[n][0].text for n in range(4)]
    assert starts[1] == f"{PROMPT}{FORCED}s of the ri"
    assert starts[3] == text[: -len(state["end"])]


def test_forced_text_joins_the_prompts_last_word_where_healing_is_asked_for(watched: Watched) -> None:
    encode = watched.encode
    seams.run(True, backend=EngineBackend(watched)).sync()
    healed = list(watched.seen[0][1].output_ids)
    whole = encode(PROMPT + FORCED)
    assert healed == whole[len(whole) - len(healed) :]
    assert encode(PROMPT) != whole[: len(encode(PROMPT))], "the prompt alone ends in another token"
    seams.run(None, backend=EngineBackend(watched)).sync()
    plain = list(watched.seen[4][1].output_ids)
    assert encode(PROMPT) + plain != whole


def test_all_options_of_a_select_are_compared_over_the_same_text(watched: Watched) -> None:
    """The prompt's end merges with some options' beginnings: it is scored with every option then."""
    seams.run(None, backend=EngineBackend(watched)).sync()
    request, output = watched.seen[1]
    assert request.text is not None
    assert output.choices is not None
    heads = set()
    for option in output.choices:
        whole = watched.encode(request.text + option.text)
        heads.add(tuple(whole[: len(whole) - len(option.token_ids)]))
        assert len(option.logprobs) == len(option.token_ids)
    assert len(heads) == 1
    assert len(heads.pop()) < len(watched.encode(request.text)), "the last word is healed"


def test_healing_is_a_word_of_programs_and_calls_and_has_no_say_in_a_select(watched: Watched) -> None:
    @sgl.function(temperature=0, max_tokens=3, token_healing=True)
    def program(s: Any) -> None:
        s += "over the la" + sgl.gen("a") + " x" + sgl.gen("b", token_healing=False)

    program.run(backend=EngineBackend(watched)).sync()
    program.run(backend=EngineBackend(watched), token_healing=False).sync()
    assert [request.token_healing for request, _ in watched.seen] == [True, False, False, False]
    with pytest.warns(UserWarning, match="token_healing: no effect with choices"):
        sgl.gen("x", choices=["a", "b"], token_healing=True)
    with pytest.raises(sgl.errors.BadProgram, match="token_healing"):
        sgl.gen("x", token_healing="yes")  # type: ignore[call-overload]

"""What the detokeniser tells, piece by piece: the pieces add up, stop patterns are cut, hostile streams are
cheap."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime.grammar.search import Search
from runtime.processes.checkpoint.tokenizer import TextTable
from runtime.processes.frontend.output_accumulator import OutputAccumulator
from runtime.processes.pipeline.detokenizer import DetokenizerManager
from runtime.protocol.io_struct import (
    BatchTokenIDOutput,
    FinishReason,
    GrammarInfo,
    TextRequest,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary
from tests.exploring import tries
from tests.unit.runtime.processes.shown_text import IncrementalText

BYTES = TextTable(Vocabulary(tuple(bytes([value]) for value in range(256))), {256: b"<end>"})
FALLBACK = TextTable(BYTES.vocabulary, BYTES.special, each_byte=True)
PATTERNS = ["[0-9]{2}", "b+c", "(ab|a)c", "end", "é.", "(?:가|나){2}", "x*y", "ab?z"]
TEXTS = st.text(st.sampled_from("abcxyz 019é가나🦊end"), max_size=24)


def news(ids: list[int], finish: FinishReason | None = None, replaced: int = 0) -> TokenOutput:
    return TokenOutput("r", ids, replaced, finish, output_logprobs=[-float(token) for token in ids])


@settings(deadline=None, max_examples=tries(150))
@given(data=st.data(), table=st.sampled_from([BYTES, FALLBACK]))
def test_pieces_add_up_however_they_are_cut_and_gathered(data: st.DataObject, table: TextTable) -> None:
    """Ids in any pieces, some taken back and told again, several pieces in one call or one in each."""
    ids = data.draw(st.lists(st.integers(0, 256) | st.sampled_from(list("안🦊é".encode())), max_size=30))
    told: list[int] = []
    batches: list[TokenOutput] = []
    while len(told) < len(ids):
        back = data.draw(st.integers(0, min(2, len(told))))
        size = data.draw(st.integers(back + 1, back + 4))
        start = len(told) - back
        told = told[:start] + ids[start : start + size]
        batches.append(news(ids[start : start + size], replaced=back))
    batches.append(news([], FinishReason(type="length")))
    manager = DetokenizerManager(table)
    manager.handle([BatchTokenIDOutput(outputs=[], begun=[TextRequest(rid="r")])])
    request = TokenizedGenerateReqInput(input_ids=[1], sampling_params=SamplingParams(), return_logprob=True)
    part = OutputAccumulator(request)
    shown = [""]
    while batches:
        count = data.draw(st.integers(1, 3))
        made = manager.handle([BatchTokenIDOutput(outputs=[one]) for one in batches[:count]])
        del batches[:count]
        for output in made.outputs if made is not None else ():
            part.add(output)
            shown.append(part.text)
    whole = IncrementalText(table)
    whole.feed(ids, finished=True)
    assert part.text == whole.text
    assert part.ids == ids
    values = part.logprob_meta()["output_token_logprobs"]
    assert values == [[-float(token), token, None] for token in ids]
    assert all(later.startswith(sooner) for sooner, later in itertools.pairwise(shown))
    assert len(manager) == 0


@settings(deadline=None, max_examples=tries(300))
@given(
    text=TEXTS,
    patterns=st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2, unique=True),
    sizes=st.lists(st.integers(1, 5), max_size=40),
    trim=st.booleans(),
)
def test_a_match_of_a_stop_regex_is_cut_and_never_shown_in_part(
    text: str, patterns: list[str], sizes: list[int], trim: bool
) -> None:
    search = Search(patterns)
    made = IncrementalText(BYTES, search=search, no_stop_trim=not trim)
    place, seen, shown, rest = search.begin, "", [""], text
    for size in itertools.chain(sizes, itertools.repeat(3)):
        if not rest:
            break
        piece, rest = rest[:size], rest[size:]
        seen += piece
        place, found = search.feed(place, piece)
        if found is None:
            made.feed(list(piece.encode()))
            shown.append(made.text)
            continue
        made.feed(list(piece.encode()), finished=True, matched=found.text)
        ends = [
            (end, match.start())
            for end in range(len(seen) + 1)
            for pattern in patterns
            if (match := re.search(pattern, seen[:end]))
        ]
        first = min(start for end, start in ends if end == ends[0][0])
        assert made.text == (seen[:first] if trim else seen)
        assert all(made.text.startswith(part) for part in shown)
        return
    made.feed([], finished=True)
    assert made.text == text


def test_a_stop_regex_holds_back_only_what_may_match() -> None:
    manager = DetokenizerManager(BYTES)
    begun = [TextRequest(rid="r", stop_regex=("[0-9]{3}",))]
    manager.handle([BatchTokenIDOutput(outputs=[], begun=begun)])

    def tell(text: str, finish: FinishReason | None = None) -> str:
        made = manager.handle([BatchTokenIDOutput(outputs=[news(list(text.encode()), finish)])])
        assert made is not None
        return made.outputs[0].text

    assert tell("ab") == "ab"
    assert tell("c12") == "c"
    assert tell("d7") == "12d"
    assert tell("89 more", FinishReason("stop", matched="789")) == ""


@pytest.mark.parametrize("table", [BYTES, FALLBACK])
def test_endless_broken_bytes_cost_no_more_than_others(table: TextTable) -> None:
    """200,000 bytes of which none is a character, at once and one by one: linear, and nothing piles up.
    The only clock here is pytest's own limit."""
    for data in ([0xFF] * 200_000, [0xE2, 0x82] * 100_000, [0xF0, 0x9F, 0xA6] * 66_000):
        text = IncrementalText(table)
        assert text.feed(data, finished=True) == bytes(data).decode(errors="replace") or table.each_byte
        streamed = IncrementalText(table, stop=["\ufffd!"])
        for byte in data[:20_000]:
            streamed.feed([byte])
        streamed.feed([], finished=True)
        whole = IncrementalText(table)
        whole.feed(data[:20_000], finished=True)
        assert streamed.text == whole.text


def _lists(draw: st.DrawFn, count: int) -> list[list[tuple[int, float]]]:
    return [[(draw(st.integers(0, 9)), -1.0)] for _ in range(count)]


@st.composite
def streams(draw: st.DrawFn) -> list[TokenOutput]:
    """Outputs of one request, as a scheduler may tell them, and more: any field may come at any time."""
    size, made, logprobs = 0, [], draw(st.booleans())
    parts = draw(st.integers(1, 6))
    ends = draw(st.sampled_from([FinishReason("stop", matched="x"), FinishReason("length")]))
    for part in range(parts):
        count, back = draw(st.integers(0, 3)), draw(st.integers(0, min(size, 3)))
        size += count - back
        counters = [draw(st.integers(0, 50)) for _ in range(6)]
        scored = draw(st.integers(0, 3)) == 0
        grammar = GrammarInfo("x", True, rollbacks=part) if draw(st.booleans()) else None
        one = TokenOutput(
            "r", [draw(st.integers(0, 99)) for _ in range(count)], back,
            ends if part == parts - 1 else None, *counters[:5],
            output_logprobs=[-float(part)] * count if logprobs else [],
            output_top_logprobs=_lists(draw, count) if logprobs else [],
            output_token_ids_logprobs=_lists(draw, count) if logprobs else [],
            input_logprobs=[None, -1.0 * part] if scored else None,
            input_top_logprobs=_lists(draw, 2) if scored else None,
            input_token_ids_logprobs=_lists(draw, 2) if scored else None,
            hidden_states=[[float(part)]] if draw(st.booleans()) else None,
            retractions=counters[5], queue_s=float(part), first_token_s=part / 2, http_worker_ipc="frontend",
            grammar=grammar, healed=int(part == 0),
            output_origins=[draw(st.sampled_from(["sampled", "forced"])) for _ in range(count * logprobs)],
        )  # fmt: skip
        made.append(replace(one, text=draw(st.text("ab", max_size=3))))
    return made


@settings(deadline=None, max_examples=tries(300))
@given(outputs=streams(), data=st.data())
def test_deltas_taken_at_any_moment_add_up_to_the_whole(
    outputs: list[TokenOutput], data: st.DataObject
) -> None:
    request = TokenizedGenerateReqInput(
        input_ids=[1, 2], sampling_params=SamplingParams(), return_logprob=True, top_logprobs_num=1
    )
    whole, drained = OutputAccumulator(request), OutputAccumulator(request)
    text, ids, entries = "", list[int](), list[Any]()
    for at, output in enumerate(outputs, 1):
        whole.add(output)
        drained.add(output)
        if at == len(outputs) or data.draw(st.booleans()):
            meta = drained.logprob_meta()
            for some, new in ((ids, drained.ids), (entries, meta["output_token_logprobs"])):
                del some[len(some) - drained.replaced :]
                some += new
            text += drained.text
            assert meta["output_token_logprobs_length"] == len(ids)
            drained.drain()
    assert (text, ids) == (whole.text, whole.ids)
    assert entries == whole.logprob_meta()["output_token_logprobs"]
    assert drained.finish_reason() == whole.finish_reason()


def test_the_oldest_ends_with_an_error_after_its_output() -> None:
    manager = DetokenizerManager(BYTES, max_states=1)
    begun = [TextRequest(rid=rid) for rid in ("r", "other")]
    made = manager.handle(
        [
            BatchTokenIDOutput(outputs=[news([65])], begun=begun[:1]),
            BatchTokenIDOutput(outputs=[], begun=begun[1:]),
        ]
    )
    assert made is not None
    first, last = made.outputs
    assert (first.text, first.new_ids, first.finish) == ("A", [65], None)
    assert last.finish is not None
    assert last.finish.type == "abort"

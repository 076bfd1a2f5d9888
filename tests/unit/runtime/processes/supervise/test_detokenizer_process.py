"""DetokenizerProcess: every frontend gets its own news, and nobody else's; what cannot travel is told."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from runtime.ipc.mailbox import MemoryMailbox
from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.processes.pipeline.detokenizer import DetokenizerManager
from runtime.processes.supervise.child_detokenizer import DetokenizerProcess
from runtime.protocol.errors import WireError, from_dict
from runtime.protocol.io_struct import (
    BatchEmbeddingOutput,
    BatchStrOutput,
    BatchTokenIDOutput,
    ControlOutput,
    EmbeddingOutput,
    FinishReason,
    TextRequest,
    TokenOutput,
)

VOCAB = 512


class Narrow(MemoryMailbox):
    """Refuses texts with "dog" in them, and vectors and data of more than 3 numbers."""

    def send(self, item: Any) -> None:
        match item:
            case BatchStrOutput():
                wide = any("dog" in output.text for output in item.outputs)
            case BatchEmbeddingOutput():
                wide = any(len(output.embedding) > 3 for output in item.outputs)
            case ControlOutput():
                wide = len(item.data.get("numbers", ())) > 3
            case _:
                wide = False
        if wide:
            raise WireError("too wide", where="test")
        super().send(item)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_files: dict[str, dict[str, Any]]) -> Tokenizer:
    return Tokenizer(tokenizer_files["byte level"], {}, VOCAB)


def news(tokenizer: Tokenizer, *requests: tuple[str, str | None, str]) -> BatchTokenIDOutput:
    """Whole answers: (rid, frontend, text)."""
    return BatchTokenIDOutput(
        rids=[rid for rid, _, _ in requests],
        begun=[TextRequest(rid=rid, http_worker_ipc=frontend) for rid, frontend, _ in requests],
        outputs=[
            TokenOutput(
                rid=rid, new_ids=tokenizer.encode_plain(text), http_worker_ipc=frontend,
                finish=FinishReason(type="length"),
            )
            for rid, frontend, text in requests
        ],
    )  # fmt: skip


def texts(box: MemoryMailbox) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in box.receive(0):
        assert isinstance(item, BatchStrOutput)
        assert item.rids == [output.rid for output in item.outputs]
        found.update({output.rid: output.text for output in item.outputs})
    return found


def make(
    tokenizer: Tokenizer, *names: str, kind: type[MemoryMailbox] = MemoryMailbox
) -> tuple[DetokenizerProcess, dict[str, MemoryMailbox]]:
    frontends = {name: kind() for name in names}
    return DetokenizerProcess(DetokenizerManager(tokenizer.text_table), MemoryMailbox(), frontends), frontends


def test_news_go_to_the_door_their_request_came_from(tokenizer: Tokenizer) -> None:
    process, frontends = make(tokenizer, "a", "b")
    process.handle([news(tokenizer, ("1", "a", "the fox"), ("2", "b", "the dog"), ("3", "a", "well"))])
    assert texts(frontends["a"]) == {"1": "the fox", "3": "well"}
    assert texts(frontends["b"]) == {"2": "the dog"}


def test_other_mail_is_passed_on_as_it_is(tokenizer: Tokenizer) -> None:
    process, frontends = make(tokenizer, "a", "b")
    answer = ControlOutput(rid="q", http_worker_ipc="b", ok=True)
    vectors = [
        EmbeddingOutput(rid=rid, embedding=[1.0], http_worker_ipc=frontend)
        for rid, frontend in (("1", "a"), ("2", "b"))
    ]
    process.handle([answer, BatchEmbeddingOutput(rids=["1", "2"], outputs=vectors)])
    assert frontends["a"].receive(0) == [BatchEmbeddingOutput(rids=["1"], outputs=vectors[:1])]
    assert frontends["b"].receive(0) == [answer, BatchEmbeddingOutput(rids=["2"], outputs=vectors[1:])]


def test_a_single_door_gets_what_names_none(tokenizer: Tokenizer) -> None:
    process, frontends = make(tokenizer, "only")
    process.handle([news(tokenizer, ("1", None, "fox")), ControlOutput(rid="q", ok=True)])
    assert len(frontends["only"].receive(0)) == 2
    assert process.lost == 0


def test_news_for_nobody_are_dropped_and_counted(tokenizer: Tokenizer) -> None:
    process, frontends = make(tokenizer, "a", "b")
    process.handle([news(tokenizer, ("1", "../../elsewhere", "fox"), ("2", None, "fox"), ("3", "a", "dog"))])
    assert process.lost == 2
    assert texts(frontends["a"]) == {"3": "dog"}
    assert texts(frontends["b"]) == {}


def test_what_cannot_travel_is_told_and_the_rest_arrives(tokenizer: Tokenizer) -> None:
    process, frontends = make(tokenizer, "a", kind=Narrow)
    vectors = [EmbeddingOutput(rid="w", embedding=[1.0] * 9), EmbeddingOutput(rid="s", embedding=[1.0])]
    process.handle(
        [
            news(tokenizer, ("1", "a", "fox"), ("2", "a", "dog"), ("3", "a", "well")),
            BatchEmbeddingOutput(rids=["w", "s"], outputs=vectors),
            ControlOutput(rid="q", ok=True, data={"numbers": [1] * 9}),
        ]
    )
    ends: dict[str, FinishReason | None] = {}
    answers: dict[str, ControlOutput] = {}
    for item in frontends["a"].receive(0):
        match item:
            case ControlOutput():
                answers[item.rid] = item
            case _:
                ends.update({output.rid: output.finish for output in item.outputs})
    assert not answers["q"].ok
    assert from_dict(answers["q"].data).code == "wire_error"
    for rid in ("2", "w"):
        finish = ends.pop(rid)
        assert finish is not None
        assert finish.error is not None
        assert "too wide" in finish.error["message"]
    assert sorted(ends) == ["1", "3", "s"]


def test_it_runs_until_its_mailbox_is_closed(tokenizer: Tokenizer) -> None:
    inbox, frontend = MemoryMailbox(), MemoryMailbox()
    process = DetokenizerProcess(DetokenizerManager(tokenizer.text_table), inbox, {"a": frontend})
    thread = threading.Thread(target=process.run)
    thread.start()
    inbox.send(news(tokenizer, ("1", "a", "fox")))
    [item] = frontend.receive(30)
    assert item.outputs[0].text == "fox"
    inbox.close()
    thread.join(300)
    assert not thread.is_alive()
    assert process.stalled_s == 0

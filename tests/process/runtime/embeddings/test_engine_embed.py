"""Engine.embed on a tiny BERT and on decoders: the same numbers as transformers, whatever runs beside."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from runtime.api import Engine
from runtime.config.checkpoints import find_checkpoint
from runtime.protocol.errors import (
    Aborted,
    BadRequest,
    DeadlineExceeded,
    EngineDead,
    ModelLoadError,
    PromptTooLong,
    RuntimeFault,
)
from runtime.protocol.io_struct import EmbeddingOutput, EmbeddingReqInput, GenerateReqInput

TEXTS = [
    "the fox runs over the lazy dog",
    "the",
    "What is red, what is blue? The sky!",
    "zebra 42",
    "the cat sleeps. " * 4,
]


def engine_of(path: Path | str, **options: Any) -> Engine:
    fixed = {"dtype": "float32", "device": "cpu", "threads": 1}
    return Engine(str(path), **{**fixed, **options})


def unit(vector: np.ndarray) -> np.ndarray:
    return np.asarray(vector / np.linalg.norm(vector))


def near(found: Sequence[float], wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.fixture(scope="module")
def bert(tiny: Callable[[str], Any]) -> Any:
    return tiny("bert")


@pytest.fixture(scope="module")
def engine(bert: Any) -> Iterator[Engine]:
    with engine_of(bert.path) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer(bert: Any) -> Tokenizer:
    return Tokenizer.from_file(str(bert.path / "tokenizer.json"))


def test_texts_are_framed_and_their_vectors_have_length_1(
    engine: Engine, bert: Any, tokenizer: Tokenizer
) -> None:
    found = engine.embed(TEXTS)
    assert len(found) == len(TEXTS)
    for text, output in zip(TEXTS, found, strict=True):
        ids = tokenizer.encode(text).ids
        assert (ids[0], ids[-1]) == (2, 3)  # [CLS] ... [SEP]
        near(output.embedding, unit(bert.hidden(ids)[0]))
        assert output.prompt_tokens == len(ids)
        assert output.finish is None
        assert output.meta["e2e_latency"] > 0


def test_a_batch_gives_what_its_items_give_alone_as_ids_or_async(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    together = [one.embedding for one in engine.embed(TEXTS)]
    alone = [engine.embed(text)[0].embedding for text in TEXTS]
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    by_ids = [one.embedding for one in engine.embed(ids)]
    near(engine.embed(ids[0])[0].embedding, np.array(together[0]))

    async def ask() -> list[Any]:
        return await engine.embed_async(EmbeddingReqInput(text=TEXTS, rid=list("abcde")))

    later = asyncio.run(ask())
    assert [one.rid for one in later] == list("abcde")
    for first, *others in zip(together, alone, by_ids, (one.embedding for one in later), strict=True):
        for other in others:
            near(other, np.array(first))


def test_dimensions_cut_and_scale_again(engine: Engine) -> None:
    whole = np.array(engine.embed(TEXTS[0])[0].embedding)
    near(engine.embed(TEXTS[0], 5)[0].embedding, unit(whole[:5]))
    near(engine.embed(TEXTS[0], dimensions=48)[0].embedding, whole)
    for wrong in (0, 49):
        with pytest.raises(BadRequest) as caught:
            engine.embed(TEXTS[0], wrong)
        assert caught.value.where == "dimensions"


def test_an_encoder_is_not_shared_by_several_processes(tiny: Callable[[str], Any]) -> None:
    with pytest.raises(BadRequest, match="tp_size: not supported for encoders"):
        Engine(str(tiny("bert").path), tp_size=2)


def test_one_bad_item_reports_itself(engine: Engine) -> None:
    texts = ["the fox", "", "dog " * 70, "the cat"]
    found = engine.embed(texts, on_error="return")
    assert [type(one) for one in found] == [EmbeddingOutput, BadRequest, PromptTooLong, EmbeddingOutput]
    assert "64" in str(found[2])
    last = found[3]
    assert isinstance(last, EmbeddingOutput)
    near(last.embedding, np.array(engine.embed("the cat")[0].embedding))
    with pytest.raises(BadRequest, match="is empty"):
        engine.embed(texts)
    (single,) = engine.embed("", on_error="return")
    assert isinstance(single, BadRequest)


@pytest.mark.parametrize(
    ("given", "fields", "words"),
    [
        ([], {}, "empty|provided"),
        (7, {}, "text"),
        ("a", {"colour": 1}, "colour"),
        ([3, 500], {}, "500"),
        ([["a", "b"]], {"is_cross_encoder_request": True}, "no classifier"),
        ("a", {"image_data": "x"}, "image_data"),
        ([["the", "fox"]], {}, "pairs are for cross-encoders"),
    ],
)
def test_wrong_requests(engine: Engine, given: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        engine.embed(given, **fields)


def test_an_encoder_generates_nothing(engine: Engine) -> None:
    engine.embed("the fox")
    done = engine.state()["finished"]
    for ask in (
        lambda: engine.generate("the fox"),
        lambda: engine.generate(["the", "fox"]),
        lambda: asyncio.run(engine.submit(GenerateReqInput(text="the"))),
    ):
        with pytest.raises(BadRequest, match="computes vectors"):
            ask()
    state = engine.state()
    assert state["num_queue_reqs"] == 0
    assert state["finished"] == done > 0
    assert engine.flush_cache()


def test_pause_abort_deadline_and_close(bert: Any) -> None:
    made = engine_of(bert.path)
    try:
        made.pause("in_place")
        with pytest.raises(DeadlineExceeded):
            made.embed("the fox", timeout_s=0.05)
        with ThreadPoolExecutor(3) as pool:
            waiting = pool.submit(made.embed, "the fox", rid="one")
            kept = pool.submit(made.embed, "the dog", rid="two")
            until(lambda: made.state()["waiting"] == 2)
            made.abort("one")
            with pytest.raises(Aborted, match=r"^one: "):
                waiting.result(300)
            made.resume()
            assert len(kept.result(300)) == 1
            made.pause("in_place")
            cancelled = pool.submit(asyncio.run, given_up(made))
            cancelled.result(300)
            until(lambda: made.state()["waiting"] == 0)
            left = pool.submit(made.embed, ["the", "dog"])
            until(lambda: made.state()["waiting"] == 2)
            made.close()
            with pytest.raises(EngineDead):
                left.result(300)
        with pytest.raises(EngineDead):
            made.embed("the fox")
    finally:
        made.close()


async def given_up(engine: Engine) -> None:
    task = asyncio.create_task(engine.embed_async("the cat"))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def until(true: Callable[[], bool]) -> None:
    tick = threading.Event()
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        tick.wait(0.005)


@pytest.mark.parametrize(("mode", "normalize"), [("mean", True), ("max", False)])
def test_the_checkpoint_says_how_to_pool_and_options_overrule_it(
    make: Callable[..., Any], mode: str, normalize: bool
) -> None:
    case = make("bert", (mode, normalize))
    ids = Tokenizer.from_file(str(case.path / "tokenizer.json")).encode(TEXTS[0]).ids
    states = case.hidden(ids)
    wanted = states.mean(0) if mode == "mean" else states.max(0)
    with engine_of(case.path) as made:
        near(made.embed(TEXTS[0])[0].embedding, unit(wanted) if normalize else wanted)
        near(made.embed(TEXTS[0], 9)[0].embedding, unit(wanted[:9]))
    with engine_of(case.path, pooling="last", normalize_embeddings=not normalize) as made:
        near(made.embed(TEXTS[0])[0].embedding, states[-1] if normalize else unit(states[-1]))


def test_a_cross_encoder_scores_pairs(tiny: Callable[[str], Any]) -> None:
    case = tiny("bert, 1")
    pairs = [["what is blue?", "the sky is blue"], ["what is red?", "the lazy dog sleeps"]]
    tokenizer = Tokenizer.from_file(str(case.path / "tokenizer.json"))
    with engine_of(case.path) as made:
        found = made.embed(pairs, is_cross_encoder_request=True)
        for pair, output in zip(pairs, found, strict=True):
            framed = tokenizer.encode(*pair)
            assert set(framed.type_ids) == {0, 1}
            near(output.embedding, 1 / (1 + np.exp(-case.logits(framed.ids, framed.type_ids))))
        near(made.embed(pairs[0], is_cross_encoder_request=True)[0].embedding, np.array(found[0].embedding))
        with pytest.raises(BadRequest, match="scores"):
            made.embed("the", 1)


@pytest.mark.parametrize("family", ["Roberta", "XLMRoberta"])
def test_pairs_as_other_tokenizers_frame_them(tmp_path: Path, family: str) -> None:
    """<s> a </s></s> b </s>, without token types, in byte-level BPE and in Unigram."""
    framed = write_roberta_tokenizer(tmp_path, byte_level=family == "Roberta")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=310, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40,
        max_position_embeddings=40, pad_token_id=1, type_vocab_size=1, num_labels=1, initializer_range=0.3,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    model.save_pretrained(tmp_path)
    ids = framed.encode("hello world", "fox").ids
    assert ids.count(2) == 3
    with engine_of(tmp_path) as made, torch.inference_mode():
        (output,) = made.embed([["hello world", "fox"]], is_cross_encoder_request=True)
        near(output.embedding, np.asarray(model(torch.tensor([ids])).logits.sigmoid()[0]))


def write_roberta_tokenizer(path: Path, *, byte_level: bool) -> Tokenizer:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    texts = ["hello world the sky is blue", "fox and dog"] * 20
    if byte_level:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    else:
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    made.train_from_iterator(texts, trainer)
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    made.save(str(path / "tokenizer.json"))
    return made


def test_a_classifier_tells_its_logits(tiny: Callable[[str], Any]) -> None:
    case = tiny("bert, 3")
    ids = Tokenizer.from_file(str(case.path / "tokenizer.json")).encode(TEXTS[2]).ids
    with engine_of(case.path) as made:
        near(made.embed(TEXTS[2])[0].embedding, case.logits(ids))


def test_options_that_do_not_fit_an_encoder(bert: Any, make: Callable[..., Any]) -> None:
    with pytest.raises(BadRequest, match="64"):
        engine_of(bert.path, context_length=65)
    with pytest.raises(BadRequest, match="reads no turns"):
        engine_of(bert.path, chat_template="chatml")
    with engine_of(bert.path, context_length=6) as made, pytest.raises(PromptTooLong, match="6"):
        made.embed(TEXTS[0])
    case = make("bert")
    (case.path / "modules.json").write_text(json.dumps([{"type": "x.Dense", "path": "2_Dense"}]))
    with pytest.raises(ModelLoadError, match="Dense"):
        engine_of(case.path)


# -- decoders ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pocket() -> Iterator[Engine]:
    with engine_of("pocket", max_total_tokens=8192) as made:
        yield made


def states_of(path: Path, ids: Sequence[int]) -> np.ndarray:
    """[tokens, hidden] after the final norm, from transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        out = model(torch.tensor([list(ids)]), output_hidden_states=True)
    return np.asarray(out.hidden_states[-1][0])


def test_the_bundled_checkpoints_last_hidden_state(pocket: Engine) -> None:
    texts = ["The sky is", "Hello", "What is 3 + 4?" * 20]
    tokenizer = Tokenizer.from_file(pocket.model_path + "/tokenizer.json")
    for text, output in zip(texts, pocket.embed(texts), strict=True):
        ids = tokenizer.encode(text).ids
        near(output.embedding, unit(states_of(find_checkpoint("pocket"), ids)[-1]))
        assert output.prompt_tokens == len(ids)
    # Again, mostly from the cache: the same numbers.
    first, again = pocket.embed(texts[2])[0], pocket.embed(texts[2])[0]
    assert again.cached_tokens > 0
    near(again.embedding, np.array(first.embedding))


def test_vectors_beside_generations_change_neither(pocket: Engine) -> None:
    prompts = [f"Tell me about number {n}." for n in range(6)]
    params = {"max_new_tokens": 12, "temperature": 0.0}
    texts = [one.text for one in pocket.generate(prompts, params)]
    vectors = [one.embedding for one in pocket.embed(prompts)]
    with ThreadPoolExecutor(2) as pool:
        both = pool.submit(pocket.generate, prompts, params), pool.submit(pocket.embed, prompts)
        generated, embedded = both[0].result(300), both[1].result(300)
    assert [one.text for one in generated] == texts
    for found, wanted in zip(embedded, vectors, strict=True):
        near(found.embedding, np.array(wanted))
    assert pocket.state()["live"] == 0


def test_dimensions_and_pairs_of_a_decoder(pocket: Engine) -> None:
    size = pocket.spec.hidden_size
    whole = np.array(pocket.embed("Hello")[0].embedding)
    near(pocket.embed("Hello", 7)[0].embedding, unit(whole[:7]))
    with pytest.raises(BadRequest, match=f"from 1 to {size}"):
        pocket.embed("Hello", size + 1)
    with pytest.raises(BadRequest, match="no classifier"):
        pocket.embed(["a", "b"], is_cross_encoder_request=True)
    long = pocket.embed(["Hello", "word " * 9000], on_error="return")
    assert isinstance(long[1], RuntimeFault)
    assert long[1].status == 400
    near(long[0].embedding, whole)  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["Qwen2", "Llama"])
@pytest.mark.parametrize("mode", ["last", "mean", "max", "cls"])
def test_pooling_of_other_decoders(tmp_path: Path, family: str, mode: str) -> None:
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=pocket_vocab(), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((find_checkpoint("pocket") / name).read_bytes())
    draw = np.random.default_rng(1)
    batch = [draw.integers(10, 90, size=length).tolist() for length in (1, 40, 13)]
    with engine_of(tmp_path, max_total_tokens=512, pooling=mode, chunked_prefill_size=16) as made:
        found = made.embed(batch)
    for ids, output in zip(batch, found, strict=True):
        states = states_of(tmp_path, ids)
        wanted = {"cls": states[0], "mean": states.mean(0), "last": states[-1], "max": states.max(0)}[mode]
        near(output.embedding, unit(wanted))


def pocket_vocab() -> int:
    config = json.loads((find_checkpoint("pocket") / "config.json").read_text())
    return int(config["vocab_size"])

"""Loading tokenizers, begin-of-text, plain encoding."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.protocol.errors import ModelLoadError


def write(folder: Path, data: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_begin_of_text_is_put_in_front_once_and_nothing_behind(
    tmp_path: Path, tokenizer_files: dict[str, dict[str, Any]]
) -> None:
    made = Tokenizer.load(write(tmp_path, tokenizer_files["sentencepiece"]), 512)
    assert made.bos == 1
    plain = made.encode("the dog", add_special_tokens=False)
    assert made.encode("the dog") == [1, *plain]
    assert made.encode("<s>the dog")[:2] != [1, 1]
    assert made.encode("<s>the dog")[0] == 1
    assert made.encode("") == [1]


def test_the_config_overrules_the_post_processor(tokenizer_files: dict[str, dict[str, Any]]) -> None:
    data = tokenizer_files["sentencepiece"]
    without = Tokenizer(data, {"add_bos_token": False, "bos_token": "<s>"}, 512)
    assert 1 not in without.encode("the dog")
    assert without.bos == 1
    bare = {**data, "post_processor": None}
    assert Tokenizer(bare, {}, 512).encode("the dog")[0] != 1
    asked = Tokenizer(bare, {"add_bos_token": True, "bos_token": {"content": "<s>"}}, 512)
    assert asked.encode("the dog")[0] == 1


def test_byte_level_has_no_begin_of_text(tokenizer_files: dict[str, dict[str, Any]]) -> None:
    made = Tokenizer(tokenizer_files["byte level"], {"eos_token": "<|im_end|>"}, 512, eos=[0])
    assert made.bos is None
    assert made.encode("") == []
    assert made.eos == {0, 2}
    assert made.vocabulary.eos == {0, 2}
    assert len(made.vocabulary) == 512
    assert made.added_id("<|im_start|>") == 1
    assert made.added_id("the") is None


@pytest.mark.parametrize("text", ["dog", " dog", "  two", "<|im_end|>", "</s>", "안녕", "🦊 x", "", "\n"])
def test_plain_ids_spell_exactly_their_text(
    tokenizer_files: dict[str, dict[str, Any]], kind: str, text: str
) -> None:
    made = Tokenizer(tokenizer_files[kind], {}, 512)
    ids = made.encode_plain(text)
    assert b"".join(made.vocabulary.tokens[token] for token in ids) == text.encode()
    assert not made.vocabulary.special & set(ids)


def test_the_same_ids_as_transformers(
    tmp_path: Path, tokenizer_files: dict[str, dict[str, Any]], kind: str
) -> None:
    made = Tokenizer.load(write(tmp_path, tokenizer_files[kind]), 512)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in ("The quick  fox", "서울 🦊", " leading", '{"a": 1}\n'):
        assert made.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


def test_lone_surrogates_do_not_crash(tokenizer_files: dict[str, dict[str, Any]], kind: str) -> None:
    made = Tokenizer(tokenizer_files[kind], {}, 512)
    assert made.decode(made.encode("a\ud83d")).endswith("\ufffd")
    assert made.decode(made.encode("a\ud83e\udd8a")).endswith("🦊")


def test_truncation_and_padding_of_the_file_are_not_for_prompts(
    tokenizer_files: dict[str, dict[str, Any]],
) -> None:
    data = copy.deepcopy(tokenizer_files["byte level"])
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    assert len(Tokenizer(data, {}, 512).encode("xyz xyz xyz xyz")) > 2


def test_a_vocabulary_larger_than_the_models_names_both_numbers(
    tmp_path: Path, tokenizer_files: dict[str, dict[str, Any]]
) -> None:
    data = tokenizer_files["byte level"]
    largest = max(token["id"] for token in data["added_tokens"])
    with pytest.raises(ModelLoadError, match=rf"{largest}.*300") as caught:
        Tokenizer.load(write(tmp_path, data), 300)
    assert caught.value.where == str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        ("{}", "tokenizer"),
        ('{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "no tokens"),
        ('{"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a"}}', "tokenizer"),
        ("\xff", "token|UTF-8|JSON"),
    ],
)
def test_broken_files_are_load_errors_with_their_path(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelLoadError, match=message) as caught:
        Tokenizer.load(tmp_path, 512)
    assert "tokenizer.json" in str(caught.value.where)


def test_slow_tokenizers_come_with_the_way_to_convert_them(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="missing"):
        Tokenizer.load(tmp_path, 512)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model.*save_pretrained"):
        Tokenizer.load(tmp_path, 512)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60) | st.text(st.sampled_from("the dogs \u00e9\u0301<|im_end>"), max_size=60))
def test_no_id_stands_for_more_characters_than_the_longest(
    tokenizer_files: dict[str, dict[str, Any]], kind: str, text: str
) -> None:
    tokenizer = Tokenizer(tokenizer_files[kind], {}, 512)
    assert tokenizer.longest < 100
    assert len(text) <= tokenizer.longest * len(tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.count(text) == len(tokenizer.encode(text, add_special_tokens=False))


def test_where_text_can_vanish_the_longest_is_out_of_reach(
    tokenizer_files: dict[str, dict[str, Any]],
) -> None:
    data = tokenizer_files["byte level"]
    exact = Tokenizer(data, {}, 512).longest
    for more in (
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "aa"}, "content": "a"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"added_tokens": [{**token, "rstrip": True} for token in data["added_tokens"]]},
    ):
        assert Tokenizer({**data, **more}, {}, 512).longest > 10 * exact
    composed = Tokenizer({**data, "normalizer": {"type": "NFC"}}, {}, 512)
    for text in ("\u0041\u030a" * 50, "\u1112\u1161\u11ab" * 50, "\u03b1\u0313\u0300\u0345" * 50):
        assert len(text) <= composed.longest * len(composed.encode(text))


@pytest.mark.parametrize("what", ["encode", "plain", "whole", "decode"])
def test_others_go_on_while_a_long_text_is_read(
    tokenizer_files: dict[str, dict[str, Any]], what: str
) -> None:
    tokenizer = Tokenizer(tokenizer_files["byte level"], {}, 512)
    text = "The quick brown fox jumps over the lazy dog. " * 12_000
    ids = tokenizer.encode(text)
    work: dict[str, Callable[[], Any]] = {
        "encode": lambda: tokenizer.encode(text),
        "plain": lambda: tokenizer.encode_plain(text),
        "whole": lambda: tokenizer.encode_whole(text),
        "decode": lambda: tokenizer.decode(ids),
    }
    done = threading.Event()
    began = threading.Event()

    def read() -> None:
        began.set()
        work[what]()
        done.set()

    thread = threading.Thread(target=read)
    thread.start()
    began.wait()
    turns = 0
    while not done.is_set():
        turns += 1
        time.sleep(0)
    thread.join()
    assert turns > 100, "this thread stood still"

"""Guessing tokens ahead: the same answers on a real model, and what is told about the guesses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.api import Engine
from runtime.protocol.errors import BadRequest, ModelLoadError
from tests.process.runtime.api.test_differential import GUESSING, ROOMY

TEXT = "one two three four five six seven eight nine ten "


def test_what_is_told_of_guesses() -> None:
    with Engine("pocket", **ROOMY, **GUESSING, speculative_num_draft_tokens=6) as engine:
        made = engine.generate(
            TEXT * 3,
            sampling_params={"temperature": 0, "max_new_tokens": 60, "ignore_eos": True},
        )
        meta, state = made["meta_info"], engine.state()
    steps, accepted = meta["spec_verify_ct"], meta["spec_accept_token_num"]
    assert 0 < accepted <= meta["spec_draft_token_num"] <= 5 * steps
    assert len(meta["spec_accept_histogram"]) == 6
    assert sum(meta["spec_accept_histogram"]) == steps
    assert meta["spec_accept_rate"] == accepted / meta["spec_draft_token_num"]
    assert meta["spec_accept_length"] == (accepted + steps) / steps
    assert meta["completion_tokens"] == meta["decode_steps"] == 60
    assert state["spec_accepted_tokens_total"] == accepted
    assert state["steps"] == 60 - accepted


def test_nothing_is_told_where_nothing_is_guessed(engine: Engine) -> None:
    made = engine.generate("one two", sampling_params={"max_new_tokens": 3})
    assert not [name for name in made["meta_info"] if name.startswith("spec_")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"speculative_algorithm": "STANDALONE"}, "speculative-draft-model-path"),
        ({**GUESSING, "speculative_num_draft_tokens": 1}, "2 to 128"),
        ({**GUESSING, "speculative_ngram_max_match_window_size": 0}, "max_match_window_size"),
        ({"speculative_algorithm": "GUESS"}, "must be one of NGRAM, STANDALONE, got 'GUESS'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        Engine("pocket", **ROOMY, **options)


def test_what_another_engine_calls_speculation_changes_nothing() -> None:
    with (
        pytest.warns(UserWarning, match="speculative_algorithm=EAGLE, speculative_num_steps=3"),
        Engine("pocket", **ROOMY, speculative_algorithm="EAGLE", speculative_num_steps=3) as engine,
    ):
        assert "spec_accept_rate" not in engine.state()


@pytest.mark.parametrize("process", [False, True])
def test_a_draft_model(
    engine: Engine, checkpoint: Path, process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is the model itself is nearly always right, under a constraint as far as that leaves it a
    choice. Guesses cost nothing here: what passes take on this machine now does not decide."""
    monkeypatch.setattr("runtime.scheduler.speculation.Pace.price", lambda self, rows: 0.0)
    asked: list[tuple[str, dict[str, Any]]] = [
        ("The quick", {"temperature": 0, "max_new_tokens": 30}),
        ("She said", {"temperature": 1.1, "seed": 6, "max_new_tokens": 40}),
        ("fox", {"temperature": 0, "regex": "[a-z ]{9,20}[.!]"}),
        ("dog", {"temperature": 0, "frequency_penalty": 1.0, "max_new_tokens": 20}),
    ]
    options = {**ROOMY, "speculative_algorithm": "STANDALONE", "speculative_num_steps": 4}
    with Engine(
        str(checkpoint), **options, speculative_draft_model_path=str(checkpoint), runner_process=process
    ) as drafting:
        for text, params in asked:
            expected, made = (one.generate(text, sampling_params=params) for one in (engine, drafting))
            assert made["output_ids"] == expected["output_ids"]
            assert "regex" in params or made["meta_info"]["spec_accept_rate"] > 0.8
        assert drafting.state()["spec_accept_length"] > 3
        drafting.release_memory_occupation()  # of both models
        drafting.resume_memory_occupation()
        (text, params), *_ = asked
        expected, made = (one.generate(text, sampling_params=params) for one in (engine, drafting))
        assert made["output_ids"] == expected["output_ids"]
        assert made["meta_info"]["spec_accept_rate"] > 0.8


def test_a_draft_model_that_cannot_be(checkpoint: Path) -> None:
    options: dict[str, Any] = {**ROOMY, "speculative_algorithm": "STANDALONE"}
    with pytest.raises(ModelLoadError, match="384 ids, the model"):
        Engine("pocket", **options, speculative_draft_model_path=str(checkpoint))
    with pytest.raises(BadRequest, match="cannot be combined with tp_size"):
        Engine("pocket", **options, speculative_draft_model_path="pocket", tp_size=2)

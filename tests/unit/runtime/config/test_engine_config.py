"""EngineConfig and where checkpoints are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.config.checkpoints import BUNDLED, find_checkpoint
from runtime.config.engine import EngineConfig
from runtime.protocol.errors import BadRequest, ModelLoadError


def test_every_option_has_a_help_text() -> None:
    texts = EngineConfig.help_texts()
    assert "page_size" in texts
    assert all(len(text) > 10 for text in texts.values())


def test_options_reach_their_owners() -> None:
    config = EngineConfig.of({"page_size": 4, "schedule_policy": "fcfs", "dtype": "float32", "seed": 7})
    assert (config.runner().dtype, config.runner().seed) == ("float32", 7)
    assert EngineConfig.of({}) == EngineConfig()


def test_the_loop_overlaps_where_the_model_computes_elsewhere() -> None:
    _, spec = EngineConfig().locate()
    for given, meant in ((None, (False, True)), (True, (True, True)), (False, (False, False))):
        config = EngineConfig.of({"overlap": given})
        assert tuple(config.scheduler(spec, beside=beside).overlap for beside in (False, True)) == meant


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pagesize": 1}, "did you mean 'page_size'"),
        ({"zzz": 1}, "Engine: unknown option 'zzz' (`python -m runtime serve --help` lists the options)"),
        ({"max_model_len": 1}, "lists the options"),
        ({"x" * 10_000: 1}, "lists the options"),
        ({"page_size": "1"}, "page_size"),
        ({"page_size": 0}, "page_size"),
        ({"radix_cache": "yes"}, "radix_cache"),
        ({"dtype": "int3"}, "dtype"),
        ({"memory_fraction": 2.0}, "memory_fraction"),
        ({"step_timeout_s": 0.0}, "step_timeout_s"),
        ({"load_timeout_s": float("nan")}, "load_timeout_s"),
        ({"grammar_workers": 0}, "grammar_workers"),
        ({"max_running_requests": -1}, "max_running_requests"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        EngineConfig.of(options)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_directory_is_found_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    assert find_checkpoint(str(folder)) == folder.resolve()
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("some-model") == folder.resolve()


def test_a_bundled_name_is_not_mistaken_for_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled = tmp_path / "bundled"
    bundled.mkdir()
    monkeypatch.setitem(BUNDLED, "pocket", bundled)
    (tmp_path / "pocket").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("pocket") == bundled
    assert find_checkpoint("./pocket") == (tmp_path / "pocket").resolve()
    bundled.rmdir()
    with pytest.raises(ModelLoadError, match="the bundled checkpoint is missing"):
        find_checkpoint("pocket")


def test_what_is_no_directory_is_named_with_the_bundled_ones(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for model, says in (
        (str(tmp_path / "none"), "no such directory"),
        (str(tmp_path / "file"), "is a file"),
        ("", ""),
    ):
        with pytest.raises(ModelLoadError, match=f"{says}.*pocket") as caught:
            find_checkpoint(model)
        assert caught.value.where == (model or "model")

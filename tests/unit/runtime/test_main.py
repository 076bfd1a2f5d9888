"""python -m runtime: one clear line for what is wrong, and the right exit code."""

from __future__ import annotations

import sys

import pytest

from runtime.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["serv"], {}, "unknown command 'serv'; known: router, serve"),
        (["serve", "--prt", "1"], {}, "did you mean '--port'?"),
        (["serve", "--port", "x"], {}, "must be a whole number"),
        (["serve", "--schedule-policy"], {}, "expected one argument"),
        (["serve", "--config", "/nowhere.yaml"], {}, "/nowhere.yaml: cannot be read"),
        (["serve"], {"SGLANG_DSL_PORT": "-1"}, "port: must be in 0 to 65535"),
        (["serve", "--host", "::1::"], {}, "host ::1::: cannot be resolved"),  # asks no name server
        (["serve", "--host", "a..b"], {}, "host a..b: cannot be resolved"),
        (["serve", "--host", "192.0.2.1", "--port", "0"], {}, "cannot listen there"),
        (["serve", "--context-length", "1000000"], {}, "the model supports at most"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    arguments: list[str], environment: dict[str, str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments, environment) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1


def test_a_model_that_is_nowhere_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "/nowhere"], {}) == 2
    assert capsys.readouterr().err.startswith("error: /nowhere: there is no such directory")


def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("runtime.processes.supervise.supervisor", "runtime.config.flags"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["serve"], {}) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "pip install 'sglang-dsl[server]'" in told


def test_help_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"], {}) == 0
    assert "serve" in capsys.readouterr().out
    assert main([], {}) == 2
    assert "usage:" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"], {})
    assert caught.value.code == 0
    assert "--http-workers" in capsys.readouterr().out

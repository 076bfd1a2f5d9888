"""Options from the command line, the environment and a file: one answer, and a reason for each wrong one."""

from __future__ import annotations

import contextlib
import dataclasses
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config.engine import EngineConfig
from runtime.config.flags import GROUPS, make_parser, parse, read_options
from runtime.config.options import help_of, options_of
from runtime.config.serving.server import ServerConfig
from runtime.protocol.errors import BadRequest
from tests.exploring import tries


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "server.yaml"


def refusal(arguments: list[str], environment: dict[str, str] | None = None) -> str:
    with pytest.raises(BadRequest) as caught:
        read_options(arguments, environment or {})
    return str(caught.value)


def test_without_options_all_is_default() -> None:
    made = read_options([], {})
    assert (made.engine, made.server) == (EngineConfig(), ServerConfig())
    assert made.server.host == "127.0.0.1"


def test_a_flag_overrules_the_environment_that_the_file_and_that_the_default(file: Path) -> None:
    file.write_text("port: 1\npage_size: 2\nmax-total-tokens: 3\nlog_level: debug\n")
    environment = {"SGLANG_DSL_PORT": "11", "SGLANG_DSL_PAGE_SIZE": "12", "SGLANG_DSL_OTHER": "x"}
    made = read_options(["--config", str(file), "--port", "21"], environment)
    assert (made.server.port, made.engine.page_size, made.engine.max_total_tokens) == (21, 12, 3)
    assert made.server.log_level == "debug"
    assert made.server.http_workers == ServerConfig().http_workers


@pytest.mark.parametrize(
    ("variable", "meant"),
    [("HTTP_WORKER", "HTTP_WORKERS"), ("PORTS", "PORT"), ("MAX_RUNING_REQUESTS", "MAX_RUNNING_REQUESTS"),
     ("port", "PORT"), ("PROBE_INTERVAL", "PROBE_INTERVAL_S"), ("CONFIGS", "CONFIG")],
)  # fmt: skip
def test_a_misspelt_variable_is_refused_with_the_one_that_was_meant(variable: str, meant: str) -> None:
    told = refusal([], {f"SGLANG_DSL_{variable}": "1"})
    assert told == f"SGLANG_DSL_{variable}: there is no such option (did you mean SGLANG_DSL_{meant}?)"


def test_a_variable_that_kubernetes_made_is_told_apart() -> None:
    told = refusal([], {"SGLANG_DSL_PORT": "tcp://10.0.0.1:30000"})
    assert told.startswith("SGLANG_DSL_PORT: must be a whole number")
    assert "enableServiceLinks: false" in told


def test_variables_of_others_are_left_alone() -> None:
    names = ("DATA", "VOCABULARIES", "FULL_TRACEBACK", "PROBE_INTERVAL_S", "TRANSFER_FAULTS")
    others = {f"SGLANG_DSL_{name}": "1" for name in names}
    assert read_options([], {**others, "SGLANG_PORT": "7"}).server == ServerConfig()


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_options(["--version"], {})
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"sglang-dsl {metadata.version('sglang-dsl')}\n"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ([], None),
        (["--overlap"], True),
        (["--no-overlap"], False),
        (["--overlap", "false"], False),
        (["--overlap=yes"], True),
        (["--overlap", "none"], None),
        (["--overlap", "--port", "1"], True),
    ],
)
def test_what_may_be_left_open_is_a_switch_and_a_value(arguments: list[str], meant: bool | None) -> None:
    assert read_options(arguments, {}).engine.overlap is meant


def test_the_file_may_be_named_by_the_environment(file: Path) -> None:
    file.write_text("port: 7\n")
    assert read_options([], {"SGLANG_DSL_CONFIG": str(file)}).server.port == 7


def test_every_option_has_a_flag_and_a_help_text() -> None:
    text = " ".join(make_parser("serve").format_help().split())
    for _, config in GROUPS:
        for one in options_of(config):
            assert "--" + one.name.replace("_", "-") in text
            assert len(help_of(config, one.name)) > 10
        assert len(options_of(config)) == len(dataclasses.fields(config))


def test_no_option_belongs_to_two_configs() -> None:
    names = [one.name for _, config in GROUPS for one in options_of(config)]
    assert len(names) == len(set(names))


def test_words_for_all_kinds() -> None:
    made = read_options(
        ["--no-radix-cache", "--restart", "--cors-origins", "https://a.example, http://b", "--seed", "None",
         "--memory-fraction", "0.5", "--model-path", "pocket", "--chat-template", "{{ messages }}"],
        {"SGLANG_DSL_JUMP_FORWARD": "off", "SGLANG_DSL_ENABLE_METRICS": "TRUE"},
    )  # fmt: skip
    assert not made.engine.radix_cache
    assert not made.engine.jump_forward
    assert made.server.restart
    assert made.server.cors_origins == ("https://a.example", "http://b")
    assert made.engine.seed is None
    assert made.engine.memory_fraction == 0.5
    assert made.engine.chat_template == "{{ messages }}"


def test_named_templates_may_be_json_text_or_yaml(file: Path) -> None:
    named = {"default": "{{ messages }}", "tools": "x"}
    file.write_text(yaml.safe_dump({"chat_template": named}))
    assert read_options(["--config", str(file)], {}).engine.chat_template == named
    text = '{"default": "{{ messages }}", "tools": "x"}'
    assert read_options(["--chat-template", text], {}).engine.chat_template == named


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["--prot", "1"], {}, "did you mean '--port'"),
        (["--port"], {}, "expected one argument"),
        (["--port", "ten"], {}, "whole number, got 'ten'"),
        (["--port", "70000"], {}, "65535"),
        (["--memory-fraction", "much"], {}, "a number"),
        (["--page-size", "0"], {}, "page_size"),
        (["--log-level", "loud"], {}, "must be one of debug, info, warning, error"),
        (["extra"], {}, "unknown argument 'extra'"),
        (["--http-workers", "0"], {}, "http_workers"),
        (["--drain-timeout-s", "-1"], {}, "drain_timeout_s"),
        (["--drain-timeout-s", "nan"], {}, "drain_timeout_s"),
        (["--config", "/nowhere/x.yaml"], {}, "No such file"),
        (["--api-key", " "], {}, "api_key"),
        (["--api-key-file", "/nowhere/key"], {}, "/nowhere/key"),
        ([], {"SGLANG_DSL_PORT": "x"}, "SGLANG_DSL_PORT"),
        ([], {"SGLANG_DSL_RESTART": "perhaps"}, "SGLANG_DSL_RESTART: must be one of 1, true"),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], environment: dict[str, str], says: str) -> None:
    assert says in refusal(arguments, environment)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 1", "unknown option 'prot' (did you mean 'port'?)"),
        ("port: ten", "port"),
        ("port: [1", "is not YAML"),
        ("- port", "contains a list"),
        ("max_total_tokens: 1\nmax-total-tokens: 2", "twice"),
        ("a: !!python/object/apply:os.system ['true']", "is not YAML"),
        ("\x00", "is not YAML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_file(file: Path, text: str, says: str) -> None:
    file.write_text(text)
    told = refusal(["--config", str(file)])
    assert says in told
    assert "server.yaml" in told or says == "port"


def test_an_empty_file_is_no_error(file: Path) -> None:
    file.write_text("# nothing\n")
    assert read_options(["--config", str(file)], {}).server == ServerConfig()


def test_a_huge_file_is_refused(file: Path) -> None:
    file.write_text("# " + "x" * (2 << 20))
    assert "larger than" in refusal(["--config", str(file)])


def test_the_key_may_come_from_anywhere_and_is_never_shown(tmp_path: Path, file: Path) -> None:
    key = tmp_path / "key"
    key.write_text("from-file\nrest\n")
    file.write_text("api_key: in-config\n")
    ways: list[tuple[list[str], dict[str, str], str]] = [
        (["--api-key", "flagged"], {"SGLANG_DSL_API_KEY": "env"}, "flagged"),
        ([], {"SGLANG_DSL_API_KEY": "env"}, "env"),
        (["--config", str(file)], {}, "in-config"),
        (["--api-key-file", str(key)], {}, "from-file"),
        (["--api-key-file", str(key)], {"SGLANG_DSL_API_KEY": "env"}, "from-file"),
        (["--config", str(file), "--api-key-file", str(key)], {}, "from-file"),
        (["--config", str(file)], {"SGLANG_DSL_API_KEY_FILE": str(key)}, "from-file"),
    ]
    for arguments, environment, expected in ways:
        made = read_options(arguments, environment)
        assert made.server.api_key == expected
        assert expected not in repr(made)
    assert "api_key" in refusal(["--api-key", "a", "--api-key-file", str(key)])
    key.write_text("\n")
    assert "empty" in refusal(["--api-key-file", str(key)])


def test_help_ends_with_success(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_options(["--help"], {})
    assert caught.value.code == 0
    assert "--max-running-requests" in capsys.readouterr().out


@settings(deadline=None, max_examples=tries(60))
@given(st.data())
def test_all_three_places_read_a_value_alike(tmp_path_factory: Any, data: st.DataObject) -> None:
    options = {
        "port": st.integers(0, 65535),
        "restart": st.booleans(),
        "drain_timeout_s": st.floats(0, 1e6),
        "served_model_name": st.from_regex(r"[a-z][a-z0-9_.-]{2,8}", fullmatch=True).filter(
            lambda text: text not in ("none", "null", "yes", "off", "true", "false")
        ),
        "max_total_tokens": st.none() | st.integers(1, 10**6),
    }
    name = data.draw(st.sampled_from(sorted(options)))
    value = data.draw(options[name])
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        arguments = [flag if value else flag.replace("--", "--no-", 1)]
    else:
        arguments = [f"{flag}={value}"]
    file = tmp_path_factory.mktemp("options") / "x.yaml"
    file.write_text(yaml.safe_dump({name: value}))
    by_flag = read_options(arguments, {})
    assert by_flag == read_options([], {f"SGLANG_DSL_{name.upper()}": str(value)})
    assert by_flag == read_options(["--config", str(file)], {})


@settings(deadline=None, max_examples=tries(100))
@given(st.text(max_size=12))
def test_no_text_breaks_the_reader_of_values(text: str) -> None:
    for kind in (int, float, bool, str, int | None, float | None, tuple[str, ...], str | dict[str, str]):
        with contextlib.suppress(ValueError):
            parse(text, kind)

"""ServerArgs: what is given, read, parsed and refused."""

from __future__ import annotations

import argparse

import pytest

from runtime.config.engine import EngineConfig
from runtime.config.server_args import ServerArgs
from runtime.config.serving.server import ServerConfig
from runtime.protocol.errors import BadRequest


def test_it_knows_every_option_and_its_default() -> None:
    args = ServerArgs("a/model", port=30005, page_size=16)
    assert (args.model_path, args.port, args.page_size) == ("a/model", 30005, 16)
    for config in (EngineConfig, ServerConfig):
        for name in config.help_texts():
            getattr(args, name)
    assert args.host == ServerConfig().host
    with pytest.raises(AttributeError, match="no option 'hots'"):
        args.hots  # noqa: B018


def test_as_a_mapping_it_is_what_was_given() -> None:
    args = ServerArgs("a/model", port=30005, page_size=16)
    assert dict(**args) == {"model_path": "a/model", "port": 30005, "page_size": 16}
    assert args.of_engine() == {"model_path": "a/model", "page_size": 16}
    assert ServerArgs(**args).of_engine() == args.of_engine()
    assert len(args) == 3


def test_wrong_options_are_refused_by_name() -> None:
    with pytest.raises(BadRequest, match="did you mean 'page_size'"):
        ServerArgs(pagesize=16)
    with pytest.raises(BadRequest, match="port"):
        ServerArgs(port="many")
    with pytest.raises(BadRequest, match="page_size"):
        ServerArgs(page_size=1.5)


def test_tool_servers_are_named_as_elsewhere() -> None:
    assert ServerArgs(tool_server="demo").tool_server == "demo"
    assert ServerArgs(tool_server=None).tool_server is None


def test_secrets_are_not_shown() -> None:
    args = ServerArgs(api_key="k3y")
    assert "k3y" not in repr(args)
    assert args["api_key"] == "k3y"


def test_a_programs_own_parser_reads_it() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--questions", type=int, default=3)
    ServerArgs.add_cli_args(parser)
    read = parser.parse_args(["--questions", "5", "--model-path", "m", "--port", "0", "--no-overlap"])
    args = ServerArgs.from_cli_args(read)
    assert dict(**args) == {"model_path": "m", "port": 0, "overlap": False}
    assert dict(**ServerArgs.from_cli_args(parser.parse_args([]))) == {"model_path": "pocket"}

"""The router's page: its command lines are valid, and the options, paths and policies that it names exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from runtime.config.engine import EngineConfig
from runtime.config.flags import make_parser, read_options, read_values
from runtime.config.serving.router import RouterConfig
from runtime.config.serving.server import ServerConfig
from runtime.server.router.app import Router
from runtime.server.router.command import GROUPS
from runtime.server.router.policies import POLICIES

PAGE = (Path(__file__).resolve().parents[3] / "tutorials" / "router.md").read_text(encoding="utf-8")


def test_the_command_lines_are_valid() -> None:
    made = []
    blocks = "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", " ")
    for line in blocks.splitlines():
        words = shlex.split(line)
        if words[0] == "export":
            continue
        assert words[:3] == ["python", "-m", "runtime"]
        if words[3] == "serve":
            read_options(words[4:], {})
        else:
            values = read_values(words[4:], {}, make_parser("router", groups=GROUPS), GROUPS)["router"]
            made.append(Router(RouterConfig.of(values)))
    assert [[worker.role for worker in one.workers] for one in made] == [
        ["worker"] * 2,
        ["prefill", "decode"],
    ]


def test_what_it_names_exists() -> None:
    kinds = (EngineConfig, ServerConfig, RouterConfig)
    known = {name.replace("_", "-") for kind in kinds for name in kind.__dataclass_fields__}
    assert set(re.findall(r"--([a-z][a-z-]+[a-z])", PAGE)) - known == {"help"}
    assert set(re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE)) == set(POLICIES.names())
    assert RouterConfig().policy == "cache_aware"

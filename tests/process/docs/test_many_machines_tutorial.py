"""tutorials/many_machines.md: its command lines are valid, its options exist, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from runtime.config.flags import SERVE, Options, make_parser, read_options, read_values
from runtime.config.options import options_of
from runtime.config.serving.router import RouterConfig
from runtime.server.router.command import GROUPS

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "tutorials" / "many_machines.md").read_text(encoding="utf-8")


def test_the_command_lines_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key.txt").write_text("secret\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    served: list[Options] = []
    routed = []
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line)
            at = words.index("runtime") + 1
            if words[at] == "serve":
                served.append(read_options(words[at + 1 :], {}))
            else:
                values = read_values(words[at + 1 :], {}, make_parser("router", groups=GROUPS), GROUPS)
                routed.append(RouterConfig.of(values["router"]))
    assert [one.replicas.engine for one in served] == ["local"] * 3 + ["ray"] * 4
    assert len(routed[0].worker) == 2
    assert served[4].replicas.most == 8
    assert served[5].replicas.roles == ("prefill", "decode")
    assert served[6].server.api_key == "secret"


def test_every_option_it_names_exists() -> None:
    known = {
        one.name.replace("_", "-")
        for config in (*(config for _, config in SERVE), RouterConfig)
        for one in options_of(config)
    }
    named = {name.removeprefix("no-") for name in re.findall(r"--([a-z][a-z-]+[a-z])", PAGE)}
    # Of Ray and Docker.
    others = {"generate", "head", "address", "disable-usage-stats", "target", "tp"}
    assert named - known - others == set()


def test_what_it_points_to_is_there() -> None:
    for link in re.findall(r"\]\((?!http)([^)]+)\)", PAGE):
        assert (ROOT / "tutorials" / link.partition("#")[0]).exists(), link
    for path in re.findall(r"`((?:examples|tests|benchmarks)/[^`]+)`", PAGE):
        assert (ROOT / path).exists(), path

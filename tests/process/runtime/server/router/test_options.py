"""The router's options: every wrong one is a line that names it, before anything is listened on."""

from __future__ import annotations

import pytest

from runtime.__main__ import main
from runtime.config.flags import make_parser, read_values
from runtime.server.router.command import GROUPS

A, B, C = (f"http://127.0.0.1:{port}" for port in (30001, 30002, 30003))


def values(*arguments: str, **environment: str) -> dict[str, object]:
    return read_values(arguments, environment, make_parser("router", groups=GROUPS), GROUPS)["router"]


def test_several_urls_after_one_flag_or_several_or_between_commas() -> None:
    expected = [A, B, C]
    assert values("--worker", A, B, C)["worker"] == expected
    assert values("--worker", A, "--port", "1", "--worker", f"{B},{C}")["worker"] == expected
    assert values(SGLANG_DSL_WORKER=",".join(expected))["worker"] == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "worker: is required, or --prefill and --decode"),
        (["--worker", "127.0.0.1:1"], "'127.0.0.1:1' is not the URL of a server"),
        (["--worker", "http://h:port"], "is not the URL of a server"),
        (["--worker", A, A + "/"], f"{A} occurs twice"),
        (["--worker", A, "--prefill", B], "worker: cannot be combined with --prefill"),
        (["--prefill", A], "decode: is required"),
        (["--worker", A, "--policy", "best"], "unknown router policy 'best'; known: cache_aware"),
        (["--worker", A, "--retries", "-1"], "retries: must be at least 0"),
        (["--worker", A, "--cooldown-s", "0"], "cooldown_s: must be a positive number"),
        (["--worker", A, "--balance-rel-threshold", "nan"], "balance_rel_threshold: must be"),
        (["--worker", A, "--model", "pocket"], "unknown argument '--model'"),
        (["--worker", A, "--host", "192.0.2.1", "--port", "0"], "cannot listen there"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["router", *arguments], {}) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert says in told
    assert told.count("\n") == 1

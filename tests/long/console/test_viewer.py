"""The viewer in a real browser: two runs of a program on the bundled checkpoint are opened, clicked through,
searched and compared; then the page of a server while it works."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import sglang_dsl as sgl
from runtime import viewer
from sglang_dsl.concurrency.loop import background
from sglang_dsl.console.view import ViewServer
from sglang_dsl.views.run_file import write_run
from tests.process.browser import NAMES, Page, browser, executable
from tests.process.conftest import Served

pytestmark = [
    pytest.mark.skipif(executable() is None, reason=f"no browser is installed: none of {', '.join(NAMES)}"),
]
HOSTILE = "<img src=x onerror=window.caught=1><script>window.caught=1</script>"


@sgl.function
def guide(s: Any, place: str) -> None:
    asked: Any = {
        "max_tokens": 16,
        "return_logprob": True,
        "top_logprobs_num": 3,
        "return_text_in_logprobs": True,
    }
    s += sgl.system("You answer questions.") + sgl.user(f"Where does {place} lie?")
    s += sgl.assistant(sgl.gen("where", **asked))
    forks = s.fork(2)
    forks += sgl.user("What is it known for?") + sgl.assistant(sgl.gen("more", **asked))
    forks.join()
    s += sgl.user("Its river?") + sgl.assistant(
        sgl.gen("river", regex=r'\{"river": "[A-Z][a-z]{2,4}"\}', **asked)
    )
    s += sgl.user("Large or small?") + sgl.assistant(sgl.select("size", ["large", "small"]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs over the same places; the second is sampled, and one of its places is hostile."""
    folder = tmp_path_factory.mktemp("runs")
    made = []
    with sgl.Engine("pocket", threads=1) as engine:
        backend = sgl.EngineBackend(engine)
        for name, temperature, places in (
            ("cold", 0.0, ["Hesper", "Orrin"]),
            ("warm", 2.0, ["Hesper", HOSTILE]),
        ):
            made.append(folder / f"{name}.jsonl")
            program = guide.options(temperature=temperature, seed=3)
            with write_run(made[-1]) as written:
                program.run_batch([{"place": place} for place in places], backend=backend)
                tree = background().run(backend.prefix_cache())
                assert tree is not None
                written.cache(tree)
    return made


@sgl.function
def chain(s: Any) -> None:
    for name in "abc":
        s += sgl.user(name) + sgl.assistant(sgl.gen(name))


def test_bars_of_calls_without_parts_are_as_wide_as_their_time(tmp_path: Path, page: Page) -> None:
    file = tmp_path / "mock.jsonl"
    with write_run(file):
        chain.run(backend=sgl.MockBackend(delay_s=0.2)).sync()
    with shown([file]) as url:
        page.open(f"{url}#timeline")
        page.wait("document.querySelectorAll('svg.chart .phase.call').length === 3")
        bars = "[...document.querySelectorAll('svg.chart .phase')].map((one) => one.getBBox().width)"
        assert max(page.evaluate(bars)) < page.evaluate("document.querySelector('svg.chart').clientWidth") / 2


def test_no_rule_falls_on_parts_that_have_a_name_by_their_data() -> None:
    folder = Path(viewer.__file__).parent / "page"
    css = re.sub(r"/\*.*?\*/", "", (folder / "page.css").read_text(), flags=re.DOTALL)
    scripts = "".join(file.read_text() for file in folder.glob("*.js"))
    phases = re.search(r"const PHASES = \[(.*?)\]", scripts)
    assert phases is not None
    kinds, states = {"gen", "select", "tool", "request"}, {"done", "failed", "running"}
    names = {*re.findall(r'"(\w+)"', phases[1]), *kinds, *states}
    assert {"call", "decode"} <= names
    rules = [one.split()[-1] for rule in re.findall(r"([^{}]+)\{", css) for one in rule.split(",")]
    assert ".badge.gen" in rules
    assert {f".{name}" for name in names}.isdisjoint(re.split(r"[:\[]", rule)[0] for rule in rules)
    # All other classes are written out: a name of a program or a role is never one.
    made = set(re.findall(r"class: `(\w+) \$\{([^}]*)\}", scripts))
    assert {part for part, _ in made} <= {"phase", "badge", "call", "text", "token"}


@contextmanager
def shown(files: list[Path], *, live: bool = False) -> Iterator[str]:
    with ViewServer(files, live=live) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join(300)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browser(tmp_path / "profile") as made:
        yield made
        assert made.complaints == []
        assert made.evaluate("window.caught") is None


def calls(page: Page) -> int:
    return int(page.evaluate("document.querySelectorAll('#view [data-call]').length"))


def test_two_runs_are_looked_at_and_compared(page: Page, runs: list[Path]) -> None:
    with shown(runs) as url:
        page.open(url)
        page.wait("document.querySelectorAll('#view [data-call]').length === 20")
        assert page.text("#count") == "20 of 20 calls"
        # the tree
        assert page.evaluate("document.querySelectorAll('details.branch').length") == 8
        page.click("#view [data-call]")
        detail = page.wait(
            "document.querySelector('#detail .reply') && document.querySelector('#detail').innerText"
        )
        for said in ("where", "You answer questions.", "Where does Hesper lie?", "prefill", "decode"):
            assert said in detail
        # search and filters
        page.type("#search", "onerror")
        page.wait("document.querySelector('#count').innerText.startsWith('5 of 20')")
        page.type("#search", "hesper known")
        page.wait("document.querySelectorAll('#view [data-call]').length < 12")
        assert calls(page) >= 4
        page.evaluate("document.querySelector('#search').value = ''")
        page.type("#search", " ")
        page.choose("#kind", "select")
        page.wait("document.querySelector('#count').innerText.startsWith('4 of 20')")
        page.choose("#kind", "")
        # the timeline
        page.click("[data-tab=timeline]")
        page.wait("document.querySelectorAll('svg.chart .phase.decode').length >= 16")
        assert page.evaluate("document.querySelectorAll('svg.chart .phase.jump').length") >= 2
        width = page.evaluate("document.querySelector('svg.chart').clientWidth")
        page.click("button[title='Show less time']")
        page.wait(f"document.querySelector('svg.chart').clientWidth > {width * 1.8}")
        page.evaluate("document.querySelectorAll('g.bar')[1].dispatchEvent(new MouseEvent('click'))")
        page.wait("document.querySelector('g.bar.chosen') !== null")
        # the tokens
        page.click("[data-tab=tokens]")
        page.wait("document.querySelectorAll('.tokens-table tbody tr').length > 60")
        page.choose("#order", "unsure")
        page.choose("#below", "0.5")
        shares = page.wait(
            "(() => { const all = [...document.querySelectorAll('.tokens-table tbody tr td:nth-child(4)')];"
            "return all.length && all.map((one) => parseFloat(one.innerText.replace('<', ''))); })()"
        )
        assert shares == sorted(shares)
        assert all(share <= 50 for share in shares)
        page.choose("#below", "1")
        page.choose("#origin", "forced")
        forced = page.evaluate("document.querySelectorAll('.tokens-table tbody tr').length")
        assert forced == page.evaluate("document.querySelectorAll('.tokens-table code.forced').length") > 4
        # the prefix cache
        page.click("[data-tab=cache]")
        page.wait("document.querySelectorAll('table.radix tbody tr').length > 8")
        cells = "[...document.querySelectorAll('table.radix tbody tr td:nth-child(2)')]"
        hits = page.evaluate(f"{cells}.map((one) => Number(one.innerText))")
        assert hits[0] == max(hits) >= 4
        assert "You·answer·questions." in page.text("table.radix tbody tr")
        page.click("table.radix .fold[aria-expanded=true]")
        page.wait("document.querySelectorAll('table.radix tbody tr').length === 1")
        page.click("table.radix .fold[aria-expanded=false]")
        page.click("svg.map g.prefix")
        page.wait("document.querySelector('table.radix tr.chosen') !== null")
        # both
        page.click("[data-tab=compare]")
        assert "of 10 calls differ" in page.wait("document.querySelector('#differences')?.innerText")
        assert page.evaluate("document.querySelectorAll('table.compare tr.different').length") > 0
        everything = page.evaluate("document.querySelectorAll('table.compare tbody tr').length")
        page.click("#only-different")
        page.wait(f"document.querySelectorAll('table.compare tbody tr').length < {everything}")
        assert page.evaluate("document.querySelectorAll('table.compare tr.same').length") == 0
        # light and dark
        page.click("#theme")
        assert page.wait("document.documentElement.dataset.theme") == "dark"
        assert len(page.picture()) > 10_000


def test_a_growing_file_is_followed(page: Page, runs: list[Path], tmp_path: Path) -> None:
    lines = runs[0].read_bytes().splitlines(keepends=True)
    path = tmp_path / "later.jsonl"
    with shown([path], live=True) as url:
        page.open(url)
        page.wait("document.querySelector('#view').innerText.startsWith('Waiting')")
        path.write_bytes(b"".join(lines[:2]))
        page.wait("document.querySelectorAll('#view .call.running').length === 1")
        with path.open("ab") as file:
            file.write(b"".join(lines[2:]))
        page.wait("document.querySelector('#count').innerText === '10 of 10 calls'")
        assert page.evaluate("document.querySelectorAll('#view .call.running').length") == 0
        with path.open("ab") as file:
            file.write(b"no line\n")
        page.wait(f"document.querySelector('#notice').innerText.includes('line {len(lines) + 1}')")


def test_a_servers_page_shows_its_requests_and_its_cache(page: Page, tmp_path: Path) -> None:
    server = Served(tmp_path, "--log-level", "warning")
    try:
        url = server.wait_ready().url
        page.open(f"{url}/")
        assert "pocket" in page.text("main")
        page.click("a[href='/viewer']")
        page.wait("document.querySelector('#view')?.innerText.startsWith('No request')")
        body = {"text": HOSTILE, "sampling_params": {"max_new_tokens": 8}}
        for _ in range(2):
            assert httpx.post(f"{url}/generate", json=body, timeout=300).status_code == 200
        page.wait("document.querySelectorAll('svg.chart g.bar').length === 2")
        page.click("[data-tab=cache]")
        page.wait("document.querySelector('table.radix')?.innerText.includes('onerror')")
        page.open(f"{url}/docs")
        page.click("details summary")
        page.wait("document.querySelector('details').open")
    finally:
        server.kill()


def test_a_file_of_this_machine_is_opened_in_the_page(page: Page, runs: list[Path]) -> None:
    with shown(runs[:1]) as url:
        page.open(url)
        page.wait("document.querySelectorAll('#view [data-call]').length === 10")
        node = page.send("DOM.getDocument")["root"]["nodeId"]
        found = page.send("DOM.querySelector", nodeId=node, selector="#file")["nodeId"]
        page.send("DOM.setFileInputFiles", nodeId=found, files=[str(runs[1])])
        titles = "[...document.querySelector('#unit').options].map((one) => one.text)"
        page.wait(f"['cold.jsonl', 'warm.jsonl'].every((one) => {titles}.includes(one))")
        page.wait("document.querySelector('#count').innerText === '10 of 10 calls'")
        assert json.loads(runs[1].read_text().splitlines()[0])["version"] == 1

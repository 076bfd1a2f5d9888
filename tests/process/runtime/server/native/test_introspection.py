"""Looking into a server: its pages, its prefix cache and its recent requests, and who is shown what."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from runtime import viewer
from runtime.config.scheduler import SchedulerConfig
from runtime.config.serving.server import ServerConfig
from runtime.processes.frontend.client import CLIENT, Begun, Client
from runtime.processes.pipeline.launch import Pipeline
from runtime.processes.pipeline.verbs import surveyed
from runtime.protocol.control import FlushCacheReq, GetPrefixesReq
from runtime.protocol.errors import DeadlineExceeded
from runtime.scheduler.embedding_scheduler import EmbeddingScheduler, TextLimits
from runtime.server.app import build_app
from runtime.server.http.auth import PAGE_PATHS
from runtime.server.native import introspection
from runtime.server.native.introspection import Recent

Serving = Callable[..., AbstractContextManager[Any]]
ALICE, BOB, ADMIN = ({"authorization": f"Bearer {key}"} for key in ("of-alice", "of-bob", "of-admin"))
HTML = {"accept": "text/html"}


@pytest.fixture
def asked(pipeline: Pipeline, serving: Serving, wait_until: Any) -> Iterator[Callable[..., httpx.Client]]:
    """A client of a server with these options around the pocket model."""
    open_ones: list[Any] = []
    # Else what an earlier test has cached may share a beginning with what this one caches.
    wait_until(lambda: pipeline.manager.control(FlushCacheReq(), 60).ok)

    def make(**options: Any) -> httpx.Client:
        config = ServerConfig(**{"served_model_name": "pocket", **options})
        server = serving(build_app(pipeline.manager, config), config)
        client = httpx.Client(base_url=server.__enter__().url, timeout=300)
        open_ones.extend((server, client))
        return client

    yield make
    for one in reversed(open_ones):
        one.__exit__(None, None, None)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    """Options of a server with two clients and an admin."""
    file = tmp_path / "keys.yaml"
    file.touch(0o600)
    file.write_text("alice: {key: of-alice}\nbob: {key: of-bob}\n")
    return {"api_keys_file": str(file), "admin_api_key": "of-admin"}


def generate(client: httpx.Client, text: str, headers: dict[str, str] | None = None, **fields: Any) -> None:
    body = {"text": text, "sampling_params": {"max_new_tokens": 2}, **fields}
    answer = client.post("/generate", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


# -- the prefix cache ----------------------------------------------------------------------------------------


def test_the_tree_tells_what_was_cached(client: httpx.Client) -> None:
    client.post("/flush_cache", json={})
    start = f"{uuid4().hex} Hesper lies on the river Sarn. "
    for end in ("Its bridges", "Its people", "Its cheese"):
        generate(client, start + end)
    tree = client.get("/radix_tree").json()
    assert tree["texts"] is True
    [top] = [node for node in tree["nodes"] if node["parent"] == 0 and node["text"].startswith(start[:20])]
    assert top["hits"] >= 2
    assert top["tokens"] > 10
    below = [node for node in tree["nodes"] if node["parent"] == top["id"]]
    assert top["children"] == len(below) > 0
    assert all(node["start"] == top["tokens"] for node in below)
    assert "ids" not in top


def test_a_tree_has_a_size(client: httpx.Client) -> None:
    client.post("/flush_cache", json={})
    for letter in "abc":
        generate(client, f"{letter}{uuid4().hex}" + " long" * 60)
    tree = client.get("/radix_tree", params={"limit": 1}).json()
    [node] = tree["nodes"]
    assert tree["left_out"] > 0
    assert node["cut"] is (node["tokens"] > 48)
    for wrong in ("0", "5001", "-1", "x", "9" * 5000):
        answer = client.get("/radix_tree", params={"limit": wrong})
        assert answer.status_code == 400
        assert "limit" in answer.json()["error"]["message"]
        assert len(answer.content) < 1000


def test_clients_among_several_do_not_see_it(asked: Callable[..., httpx.Client], keys: Any) -> None:
    client = asked(**keys)
    secret = uuid4().hex
    generate(client, f"{secret} is the secret", ALICE)
    assert client.get("/radix_tree").status_code == 401
    for who in (ALICE, BOB):
        answer = client.get("/radix_tree", headers=who)
        assert answer.status_code == 403
        assert secret[:8] not in answer.text
    assert secret[:8] in client.get("/radix_tree", headers=ADMIN).text


@pytest.mark.parametrize(
    ("options", "headers"),
    [
        ({"api_key": "one", "admin_api_key": "two"}, {"authorization": "Bearer one"}),
        ({"host": "0.0.0.0"}, {}),
        ({"admin_api_key": "two"}, {}),
    ],
)
def test_texts_are_for_who_may_give_orders(
    asked: Callable[..., httpx.Client], options: Any, headers: Any
) -> None:
    client = asked(**options)
    secret = uuid4().hex
    generate(client, f"{secret} is the secret", headers)
    answer = client.get("/radix_tree", headers=headers)
    assert answer.status_code == 200
    assert answer.json()["texts"] is False
    assert answer.json()["nodes"]
    assert "text" not in answer.json()["nodes"][0]
    assert secret[:8] not in answer.text
    if "admin_api_key" in options:
        admin = {"authorization": "Bearer two"}
        assert secret[:8] in client.get("/radix_tree", headers=admin).text


def test_who_has_the_only_key_sees_all(asked: Callable[..., httpx.Client]) -> None:
    client = asked(api_key="one")
    answer = client.get("/radix_tree", headers={"authorization": "Bearer one"})
    assert answer.json()["texts"] is True


# -- recent requests -----------------------------------------------------------------------------------------


def test_requests_are_told_with_their_times(client: httpx.Client) -> None:
    rid = uuid4().hex
    before = time.time()
    generate(client, "Hesper lies on", rid=rid)
    told = client.get("/recent_requests").json()
    [one] = [one for one in told["requests"] if one["rid"] == rid]
    assert before - 1 <= one["began"] <= told["now"] + 1
    assert 0 < one["first_token_s"] <= one["seconds"]
    assert 0 <= one["queue_s"] <= one["first_token_s"]
    assert one["prompt_tokens"] > 0
    assert one["completion_tokens"] == 2
    assert (one["finish"], one["failed"]) == ("length", False)
    assert "text" not in one


def test_clients_see_their_own_requests(asked: Callable[..., httpx.Client], keys: Any) -> None:
    client = asked(**keys)
    generate(client, "a", ALICE, rid=f"alice{uuid4().hex}")
    generate(client, "b", BOB, rid=f"bob{uuid4().hex}")
    told = {
        name: [one["client"] for one in client.get("/recent_requests", headers=who).json()["requests"]]
        for name, who in (("alice", ALICE), ("bob", BOB), ("admin", ADMIN))
    }
    assert told == {"alice": ["key:alice"], "bob": ["key:bob"], "admin": ["key:alice", "key:bob"]}
    assert client.get("/recent_requests").status_code == 401


def test_no_more_are_kept_than_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introspection, "KEPT", 3)
    kept = Recent()
    CLIENT.set(Client("me"))
    for number in range(9):
        kept.on_begin(Begun(str(number), 1, False, 0.0))
    assert [(one.rid, one.finish) for one in kept.all()] == [("6", None), ("7", None), ("8", None)]
    for number in range(9):
        begun = Begun(str(number), 1, False, 0.0)
        kept.on_first_token(begun, 0.5)
        kept.on_abort(begun, DeadlineExceeded("late"), 1.0)
    found = [(one.rid, one.finish, one.failed, one.first_token_s) for one in kept.all()]
    assert found == [(rid, "deadline_exceeded", True, 0.5) for rid in "678"]


# -- pages ---------------------------------------------------------------------------------------------------


class Loaded(HTMLParser):
    """What a page loads, and scripts and styles that stand in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.inline: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        self.inline += [name for name in told if name.startswith("on") or name == "style"]
        if tag == "a":
            self.links.append(str(told["href"]))
        elif "src" in told or "href" in told:
            self.addresses.append(str(told.get("src") or told.get("href")))
        elif tag in ("script", "style"):
            self.inline.append(tag)


@pytest.mark.parametrize("path", ["/", "/docs", "/viewer"])
def test_pages_load_what_is_there_and_nothing_else(client: httpx.Client, path: str) -> None:
    answer = client.get(path, headers=HTML)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    page = Loaded(answer.text)
    assert page.inline == []
    assert page.addresses
    for address in page.addresses:
        found = client.get(client.base_url.join(path).join(address))
        assert found.status_code == 200
        assert found.headers["content-security-policy"] == policy
        assert found.headers["x-content-type-options"] == "nosniff"
    for link in page.links:
        assert client.get(link).status_code == 200


def test_the_script_sets_no_markup_and_knows_no_other_place() -> None:
    for name in viewer.NAMES:
        text = viewer.asset(name)[0].decode()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        )
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}
        for other in re.findall(r"from \"\./([^\"]+)\"", text):
            assert other in viewer.NAMES
    with pytest.raises(KeyError):
        viewer.asset("../__init__.py")


def test_the_first_page_says_what_it_is(asked: Callable[..., httpx.Client]) -> None:
    client = asked(served_model_name="<script>alert(1)</script>")
    told = client.get("/").json()
    assert told["model"] == "<script>alert(1)</script>"
    assert told["viewer"] == "/viewer"
    assert "/generate" in told["routes"]
    page = client.get("/", headers=HTML).text
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert {"/viewer", "/docs", "/openapi.json"} <= set(Loaded(page).links)
    docs = client.get("/docs").text
    assert "/v1/chat/completions" in docs
    assert "max_completion_tokens" in docs
    assert client.post("/viewer").status_code == 405


def test_behind_a_key_the_pages_are_there_and_tell_nothing(asked: Callable[..., httpx.Client]) -> None:
    client = asked(api_key="one", served_model_name="the-model")
    for path in PAGE_PATHS:
        answer = client.get(path, headers=HTML)
        assert answer.status_code == 200, path
        assert "the-model" not in answer.text
    assert client.get("/viewer/sources.json").json()["wants_key"] is True
    for path in ("/radix_tree", "/recent_requests", "/openapi.json", "/viewer/other"):
        assert client.get(path).status_code == 401


def test_a_name_that_leads_here_is_not_answered(client: httpx.Client) -> None:
    for path in ("/", "/viewer", "/viewer/page.js", "/radix_tree", "/recent_requests"):
        assert client.get(path, headers={"host": "pages.example.com"}).status_code == 403


def test_a_scheduler_of_vectors_has_no_cache_to_show() -> None:
    scheduler = EmbeddingScheduler(SchedulerConfig(), TextLimits(9, 9, 1, 9, False))
    assert surveyed(scheduler, GetPrefixesReq(most=10**9, ids=10**9))["nodes"] == []

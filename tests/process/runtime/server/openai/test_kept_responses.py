"""What is kept of responses has limits: in number, bytes and time, and for each client."""

from __future__ import annotations

import pytest

from runtime.config.serving.server import ServerConfig
from runtime.processes.frontend.client import CLIENT, Client
from runtime.protocol.errors import BadRequest
from runtime.protocol.messages import Message
from runtime.server.openai.responses.types import Kept, ResponseObject, Store, check_metadata


def kept(name: str, size: int = 0, whose: str = "") -> Kept:
    made = ResponseObject(id=name, created_at=0, model="m", status="completed")
    return Kept(made, [Message("user", "x" * size)], owner=whose)


def there(store: Store, *names: str) -> list[str]:
    return [name for name in names if store.find(name) is not None]


def test_the_oldest_give_way_by_number() -> None:
    told: list[tuple[int, int]] = []
    store = Store(ServerConfig(max_kept_responses=2), lambda count, size: told.append((count, size)))
    for name in "abc":
        store.put(kept(name))
    assert there(store, "a", "b", "c") == ["b", "c"]
    assert told[-1][0] == 2
    assert told[-1][1] == sum(one.size for name in "bc" if (one := store.find(name)))


def test_the_oldest_give_way_by_size() -> None:
    store = Store(ServerConfig(max_kept_response_bytes=50_000))
    for name in "abcd":
        store.put(kept(name, 15_000))
    assert there(store, *"abcd") == ["b", "c", "d"]
    store.put(kept("huge", 60_000))
    assert there(store, *"abcd", "huge") == []
    # What came of a response since it began counts as it is now.
    store.put(kept("a", 100))
    for _ in range(20):
        store.put(kept("b", 15_000))
    assert there(store, "a", "b") == ["a", "b"]


def test_one_client_has_half_of_the_room() -> None:
    store = Store(ServerConfig(max_kept_response_bytes=100_000))
    store.put(kept("first", 15_000, "key:bob"))
    for number in range(20):
        store.put(kept(f"a{number}", 15_000, "key:alice"))
    assert there(store, "first", *(f"a{number}" for number in range(20))) == ["first", "a17", "a18", "a19"]


def test_they_expire() -> None:
    now = [0.0]
    store = Store(ServerConfig(keep_responses_s=10.0), clock=lambda: now[0])
    store.put(kept("a"))
    now[0] = 9.0
    store.put(kept("b"))
    store.put(kept("a"))  # it was finished: its time does not begin anew
    assert there(store, "a", "b") == ["a", "b"]
    now[0] = 10.0
    assert there(store, "a", "b") == ["b"]


def test_others_do_not_know_of_it() -> None:
    CLIENT.set(Client("key:alice", is_tenant=True))
    mine = kept("a", whose=CLIENT.get().owner)
    assert mine.is_of_client
    CLIENT.set(Client("key:bob", is_tenant=True))
    assert not mine.is_of_client
    CLIENT.set(Client("127.0.0.1"))
    assert not mine.is_of_client
    assert kept("b", whose=CLIENT.get().owner).is_of_client


@pytest.mark.parametrize(
    "given",
    [{str(n): "" for n in range(17)}, {"n" * 65: ""}, {"n": "v" * 513}],
    ids=["many", "name", "value"],
)
def test_metadata_beyond_openais_limits(given: dict[str, str]) -> None:
    with pytest.raises(BadRequest, match="metadata"):
        check_metadata(given)
    check_metadata({"n" * 64: "v" * 512})
    check_metadata(None)

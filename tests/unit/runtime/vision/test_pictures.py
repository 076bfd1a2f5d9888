"""Pictures from where requests say they are: what is taken, and what is refused before it costs anything."""

from __future__ import annotations

import base64
import io
import os
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from runtime.config.engine import EngineConfig
from runtime.config.parts.vision import ImageOptions, VisionSpec
from runtime.processes.frontend.images.pictures import PictureReader
from runtime.protocol.errors import BadRequest
from runtime.protocol.messages import ImageData
from tests.unit.runtime.vision.making import data_url, picture, png

SPEC = VisionSpec(hidden_size=32, layers=1, heads=2, ffn_size=8, out_size=64)
ROOM = 100_000


def reader(**options: Any) -> PictureReader:
    return PictureReader(SPEC, ImageOptions(**options))


def refused(url: str, message: str, **options: Any) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        reader(**options).read([ImageData(url)], ROOM)
    assert caught.value.where == "images[0]"
    assert caught.value.status == 400


def encoded(one: Image.Image, kind: str, **words: Any) -> str:
    held = io.BytesIO()
    one.save(held, format=kind, **words)
    return base64.b64encode(held.getvalue()).decode()


# -- what it is ------------------------------------------------------------------------------------------


def test_data_urls_and_plain_base64_are_the_same() -> None:
    url = data_url(picture(90, 60))
    took = reader()
    one, other = took.read([ImageData(url), ImageData(url.partition(",")[2])], ROOM)
    assert one == other
    assert (one.height, one.width, one.tokens) == (56, 84, 6)
    assert took.decoded == 1  # the second was known


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "CMYK", "I;16"])
def test_all_kinds_of_colours(mode: str) -> None:
    one = picture(56, 56).convert("L").convert(mode)
    (found,) = reader().read([ImageData(encoded(one, "JPEG" if mode == "CMYK" else "PNG"))], ROOM)
    assert len(found.pixels) == 56 * 56 * 3


def test_a_palette_with_transparency_and_moving_pictures() -> None:
    frames = [picture(56, 56, seed).convert("P") for seed in range(3)]
    moving = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], transparency=0)
    (found,) = reader().read([ImageData(moving)], ROOM)
    assert found.tokens == 4


def test_photographs_stand_upright() -> None:
    one = picture(84, 56)
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    (found,) = reader().read([ImageData(encoded(one, "JPEG", exif=exif))], ROOM)
    assert (found.height, found.width) == (84, 56)


def test_with_little_detail_it_has_fewer_tokens() -> None:
    url = data_url(picture(1000, 900))
    low, auto, high = reader().read([ImageData(url, detail) for detail in ("low", "auto", "high")], ROOM)
    assert low.height * low.width <= 512 * 512 < auto.height * auto.width
    assert auto == high


# -- what is refused -------------------------------------------------------------------------------------


def bomb(side: int) -> str:
    """A PNG that says it has side x side pixels, and has none."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + head + body + chunk(b"IEND", b"")).decode()


@pytest.mark.parametrize("side", [7_000, 12_000, 60_000, 2_000_000])
def test_pixels_are_counted_before_they_are_decoded(side: int) -> None:
    """Below, at and above what Pillow itself takes for an attack."""
    refused(bomb(side), "more than 40000000 pixels")


def test_what_is_too_large_in_any_way() -> None:
    url = data_url(picture(300, 200))
    refused(url, "more than 500 bytes", max_image_bytes=500)
    refused(url, "more than 59999 pixels", max_image_pixels=59_999)
    assert reader(max_image_pixels=60_000).read([ImageData(url)], ROOM)
    refused(data_url(picture(900, 4)), "too long and narrow")
    with pytest.raises(BadRequest, match="at most 2 are allowed"):
        reader(max_images=2).read([ImageData(url)] * 3, ROOM)
    with pytest.raises(BadRequest, match=r"exceed the available tokens by") as caught:
        reader().read([ImageData(url)] * 3, 170)
    assert caught.value.where == "images[2]"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png,abc", "not a data URL in base64"),
        ("data:image/png;base64,!!!", "not valid base64"),
        ("a.png", "not valid base64"),
        ("é", "not valid base64"),
        (base64.b64encode(b"nothing that is known").decode(), "not an image that can be read"),
        (base64.b64encode(png(picture(56, 56))[:300]).decode(), "not an image that can be read"),
        (base64.b64encode(b"II*\x00" + bytes(64)).decode(), "not an image that can be read"),
        ("file:///etc/hostname", "does not read files"),
        ("https://example.org/a.png", "does not fetch images"),
        ("http://127.0.0.1/a.png", "does not fetch images"),
    ],
)
def test_what_is_none(url: str, message: str) -> None:
    refused(url, message)


@pytest.mark.parametrize(
    "options",
    [
        {"max_images": 0},
        {"max_image_pixels": 0},
        {"media_timeout_s": 0.0},
        {"allowed_local_media_path": "/no/such"},
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        EngineConfig.of(options)
    assert caught.value.where == next(iter(options))


# -- files -----------------------------------------------------------------------------------------------


def test_files_of_one_folder(tmp_path: Path) -> None:
    folder, secret = tmp_path / "open", tmp_path / "secret.png"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a b.png").write_bytes(png(picture(56, 56)))
    secret.write_bytes(png(picture(56, 56)))
    (folder / "link.png").symlink_to(secret)
    os.mkfifo(folder / "pipe.png")
    options = {"allowed_local_media_path": str(folder)}
    assert reader(**options).read([ImageData(f"file://{folder}/inner/a%20b.png")], ROOM)
    for name in (
        "../secret.png",
        "link.png",
        "%2e%2e/secret.png",
        "none.png",
        "inner",
        "pipe.png",
        "a\0.png",
    ):
        refused(f"file://{folder}/{name}", "not an image that requests may name", **options)
    refused(f"file://elsewhere{folder}/inner/a%20b.png", "does not read files", **options)
    refused(str(secret), "not valid base64", **options)


# -- addresses -------------------------------------------------------------------------------------------


class Host(ThreadingHTTPServer):
    """On this machine. asked: (path, the host it was asked as)."""

    daemon_threads = True

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.asked = answers, []
        super().__init__(("127.0.0.1", 0), _Answer)

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Answer(BaseHTTPRequestHandler):
    server: Host

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["host"]))
        self.server.answers[self.path](self)

    def log_message(self, *_: Any) -> None: ...


def gives(status: int, data: bytes = b"", **headers: str) -> Callable[[_Answer], None]:
    def answer(to: _Answer) -> None:
        to.send_response(status)
        for name, value in headers.items():
            to.send_header(name, value)
        to.send_header("content-length", str(len(data)))
        to.end_headers()
        to.wfile.write(data)

    return answer


def drips(to: _Answer, head: bytes = b"HTTP/1.0 200 OK\r\n\r\n") -> None:
    """Byte after byte, as long as anybody listens."""
    try:
        to.wfile.write(head)
        while True:
            to.wfile.write(b"a")
            to.wfile.flush()
            threading.Event().wait(0.02)
    except OSError:
        return


@pytest.fixture
def host() -> Iterator[Host]:
    data = png(picture(56, 84))
    made = Host({})
    made.answers |= {
        "/a.png": gives(200, data),
        "/gone": gives(404, b"secret words"),
        "/moved": gives(302, location="/a.png"),
        "/round": gives(302, location="/round"),
        "/inside": gives(302, location=f"http://localhost:{made.port}/a.png"),
        "/file": gives(302, location="file:///etc/hostname"),
        "/drips": drips,
        "/drips-before": lambda to: drips(to, b"HTTP/1.0 200 OK\r\na: "),
    }
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_hosts_that_are_allowed_by_name(host: Host) -> None:
    options = {"allowed_media_domains": ("127.0.0.1",)}
    base = f"http://127.0.0.1:{host.port}"
    (one,) = reader(**options).read([ImageData(f"{base}/a.png")], ROOM)
    (moved,) = reader(**options).read([ImageData(f"{base}/moved")], ROOM)
    assert one == moved
    refused(f"{base}/gone", "answered 404$", **options)  # and nothing of what it said
    refused(f"{base}/round", "redirects too many times", **options)
    refused(f"{base}/a.png", "more than 100 bytes", max_image_bytes=100, **options)
    refused(f"http://127.0.0.1:{free_port()}/a.png", "cannot be fetched", **options)


def test_redirects_lead_nowhere_else(host: Host) -> None:
    options = {"allowed_media_domains": ("127.0.0.1",)}
    refused(f"http://127.0.0.1:{host.port}/inside", "does not fetch images", **options)
    refused(f"http://127.0.0.1:{host.port}/file", "not an http", **options)
    assert [path for path, _ in host.asked] == ["/inside", "/file"]


@pytest.mark.parametrize(
    "name",
    [
        "127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "10.1.2.3", "192.168.0.1",
        "169.254.169.254", "[fe80::1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "224.0.0.1", "100.64.0.1",
        "[::127.0.0.1]", "[64:ff9b:1::7f00:1]", "2130706433", "[2001:db8::5efe:10.0.0.1]",
    ],
)  # fmt: skip
def test_with_any_host_allowed_none_that_is_not_public(name: str, host: Host) -> None:
    refused(f"http://{name}:{host.port}/a.png", "public address|not known", allowed_media_domains=("*",))
    assert not host.asked


def test_the_address_that_was_looked_at_is_the_one_that_is_asked(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that means something else the second time (DNS rebinding)."""
    answers = iter(["127.0.0.1"])
    real = socket.getaddrinfo

    def once(name: Any, port: Any, *more: Any, **words: Any) -> Any:
        return real(next(answers) if name == "pictures.test" else name, port, *more, **words)

    monkeypatch.setattr(socket, "getaddrinfo", once)
    url = f"http://pictures.test:{host.port}/a.png"
    assert reader(allowed_media_domains=("pictures.test",)).read([ImageData(url)], ROOM)
    assert host.asked == [("/a.png", f"pictures.test:{host.port}")]


def test_a_host_that_drips_is_given_up(host: Host) -> None:
    options = {"allowed_media_domains": ("127.0.0.1",), "media_timeout_s": 0.3}
    for path in ("drips", "drips-before"):
        refused(f"http://127.0.0.1:{host.port}/{path}", "not fetched within 0.3 s", **options)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])

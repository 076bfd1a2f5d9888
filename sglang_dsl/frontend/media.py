"""Images, videos and sounds (paths, bytes, arrays, PIL images, addresses) as parts of messages. Formats are
recognized by their first bytes; nothing is decoded or fetched.
"""

from __future__ import annotations

import base64
import io
import os
import struct
import wave
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from sglang_dsl.errors import BadProgram

Kind = Literal["image", "video", "audio"]
MAX_BYTES = 256 << 20
_ADDRESSES = ("http://", "https://", "data:")

_PNG, _JPEG, _GIF = "image/png", "image/jpeg", "image/gif"


@runtime_checkable
class Savable(Protocol):
    """A PIL image."""

    @property
    def mode(self) -> str: ...
    def save(self, target: Any, format: str) -> Any: ...


@runtime_checkable
class ArrayLike(Protocol):
    """A numpy array, or a similar object."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    def tobytes(self) -> bytes: ...


def part_of(kind: Kind, source: object, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a message for `source`.

    image {"type": "image_url", "image_url": {"url", ...}}, video {"type": "video_url", ...}, audio
    {"type": "audio_url", ...}; data is sent as a data URI (RFC 2397) with its media type. `attributes` that
    are not None are added beside the url. Raises BadProgram for a missing file, an unknown format, a wrong
    shape.
    """
    present = {word: value for word, value in attributes.items() if value is not None}
    return {"type": f"{kind}_url", f"{kind}_url": {"url": address(kind, source), **present}}


def address(kind: Kind, source: object) -> str:
    """An http(s) address or a data URI."""
    if isinstance(source, str) and source.startswith(_ADDRESSES):
        return source
    match source:
        case str() | os.PathLike():
            data = _read(kind, source)
        case bytes() | bytearray() | memoryview():
            data = bytes(source)
        case (values, int(rate)) if kind == "audio" and isinstance(array := _array(values), ArrayLike):
            data = _wav(array, rate)
        case Savable() if kind == "image":
            held = io.BytesIO()
            source.save(held, format="PNG")
            data = held.getvalue()
        case _ if kind == "image" and isinstance(array := _array(source), ArrayLike):
            data = _png(array)
        case _:
            raise BadProgram(_TAKES[kind] + f"; got {type(source).__name__}")
    if len(data) > MAX_BYTES:
        raise BadProgram(f"{kind}: {len(data)} bytes are more than the limit of {MAX_BYTES}")
    return f"data:{_format(kind, data)};base64,{base64.b64encode(data).decode()}"


_TAKES: dict[Kind, str] = {
    "image": "image takes a path, an address, bytes, a PIL image, or an array of height x width (x 1, 3 or "
    "4) numbers from 0 to 255",
    "video": "video takes a path, an address or bytes",
    "audio": "audio takes a path, an address, bytes, or (array of samples from -1 to 1, sample rate)",
}


def _read(kind: Kind, path: str | os.PathLike[str]) -> bytes:
    try:
        size = Path(path).stat().st_size
        if size > MAX_BYTES:
            raise BadProgram(
                f"{kind} {os.fspath(path)!r} has {size} bytes, more than the limit of {MAX_BYTES}"
            )
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise BadProgram(f"{kind} {os.fspath(path)!r:.200} cannot be read: {error}") from error


def _format(kind: Kind, data: bytes) -> str:
    """The media type, by the first bytes. Raises BadProgram for an unknown format."""
    for media_type, matches in _SIGNS[kind]:
        if matches(data):
            return media_type
    known = ", ".join(dict.fromkeys(media_type.partition("/")[2] for media_type, _ in _SIGNS[kind]))
    raise BadProgram(f"these bytes ({data[:8]!r}...) are not in a known {kind} format ({known})")


def _starts(*signs: bytes) -> Callable[[bytes], bool]:
    return lambda data: data.startswith(signs)


def _box(*brands: bytes) -> Callable[[bytes], bool]:
    """ISO base media files (ISO/IEC 14496-12): the brand is behind "ftyp"."""
    return lambda data: data[4:8] == b"ftyp" and (not brands or data[8:12] in brands)


def _riff(kind: bytes) -> Callable[[bytes], bool]:
    return lambda data: data[:4] == b"RIFF" and data[8:12] == kind


_SIGNS: dict[Kind, tuple[tuple[str, Callable[[bytes], bool]], ...]] = {
    "image": (
        (_PNG, _starts(b"\x89PNG\r\n\x1a\n")),
        (_JPEG, _starts(b"\xff\xd8\xff")),
        (_GIF, _starts(b"GIF87a", b"GIF89a")),
        ("image/webp", _riff(b"WEBP")),
        ("image/bmp", _starts(b"BM")),
        ("image/tiff", _starts(b"II*\x00", b"MM\x00*")),
        ("image/avif", _box(b"avif", b"avis")),
        ("image/heic", _box(b"heic", b"heix", b"mif1")),
    ),
    "video": (
        ("video/quicktime", _box(b"qt  ")),
        ("video/mp4", _box()),
        ("video/webm", lambda data: data.startswith(b"\x1aE\xdf\xa3") and b"webm" in data[:64]),
        ("video/x-matroska", _starts(b"\x1aE\xdf\xa3")),
        ("video/x-msvideo", _riff(b"AVI ")),
        ("video/mpeg", _starts(b"\x00\x00\x01\xba", b"\x00\x00\x01\xb3")),
        (_GIF, _starts(b"GIF87a", b"GIF89a")),
    ),
    "audio": (
        ("audio/wav", _riff(b"WAVE")),
        ("audio/mpeg", _starts(b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")),
        ("audio/flac", _starts(b"fLaC")),
        ("audio/ogg", _starts(b"OggS")),
        ("audio/mp4", _box(b"M4A ", b"mp42", b"isom")),
        ("audio/aac", _starts(b"\xff\xf1", b"\xff\xf9")),
        ("audio/webm", _starts(b"\x1aE\xdf\xa3")),
    ),
}


def _array(values: Any) -> Any:
    """A tensor of torch as an array; other values as they are."""
    return values.detach().cpu().numpy() if callable(getattr(values, "detach", None)) else values


def _png(pixels: ArrayLike) -> bytes:
    """8-bit PNG (ISO/IEC 15948) of uint8 pixels: grey, RGB or RGBA. Uncommon forms are for Pillow."""
    shape = tuple(pixels.shape)
    channels = shape[2] if len(shape) == 3 else 1
    colour = {1: 0, 3: 2, 4: 6}.get(channels)
    if len(shape) not in (2, 3) or colour is None or not all(shape) or str(pixels.dtype) != "uint8":
        raise BadProgram(
            f"{_TAKES['image']}; got shape {shape} of {pixels.dtype} (convert to uint8, channels last)"
        )
    height, width = shape[:2]
    raw, stride = pixels.tobytes(), width * channels
    rows = b"".join(b"\0" + raw[at : at + stride] for at in range(0, height * stride, stride))
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def _wav(samples: Any, rate: int) -> bytes:
    """16-bit WAV of samples [n] or [n, channels]: floats from -1 to 1, or int16."""
    shape = tuple(samples.shape)
    if len(shape) not in (1, 2) or not all(shape) or rate < 1 or (len(shape) == 2 and shape[1] > 8):
        raise BadProgram(f"{_TAKES['audio']}; got shape {shape} at {rate} Hz")
    if str(samples.dtype) != "int16":
        samples = (samples.clip(-1, 1) * 32767).round().astype("<i2")
    held = io.BytesIO()
    with wave.open(held, "wb") as out:
        out.setnchannels(1 if len(shape) == 1 else shape[1])
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(samples.tobytes())
    return held.getvalue()

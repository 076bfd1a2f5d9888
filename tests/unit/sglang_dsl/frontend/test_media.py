"""Pictures, videos and sounds in programs: what travels, what is told apart, what is refused where
written."""

from __future__ import annotations

import base64
import io
import struct
import wave
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import sglang_dsl as sgl
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.errors import BadProgram
from sglang_dsl.frontend.media import address

PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)
JPEG = b"\xff\xd8\xff\xe0" + bytes(20)
MP4 = bytes(4) + b"ftypisom" + bytes(20)
WAV = b"RIFF" + bytes(4) + b"WAVE" + bytes(20)


@sgl.function
def ask(s: Any, picture: Any) -> None:
    with s.user():
        s += "Look: "
        s += sgl.image(picture, detail="low")
        s += " what is it?"
    forks = s.fork(2)
    forks += sgl.assistant(sgl.gen("answer", max_tokens=8))
    forks.join()


def content(state: Any) -> Any:
    return state.messages()[0]["content"]


def test_a_picture_travels_with_its_own_type_also_into_forks(tmp_path: Path) -> None:
    file = tmp_path / "p.dat"
    file.write_bytes(JPEG)
    backend = sgl.MockBackend(["a cat", "a dog"])
    state = ask.run(str(file), backend=backend)
    assert state["answer"] == ["a cat", "a dog"]
    url = "data:image/jpeg;base64," + base64.b64encode(JPEG).decode()
    wanted = [
        {"type": "text", "text": "Look: "},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "text", "text": " what is it?"},
    ]
    assert content(state) == wanted
    for call in backend.calls:  # the open role's media reach the backend from every fork
        assert call.prompt.messages[0].content == wanted
    assert "<image>" in state.text()


def test_addresses_stay_addresses_and_bytes_become_data() -> None:
    assert address("image", "https://host/a.png") == "https://host/a.png"
    assert address("video", "data:video/mp4;base64,AA") == "data:video/mp4;base64,AA"
    for kind, data, told in (
        ("image", PNG, "image/png"),
        ("image", b"RIFF1234WEBP", "image/webp"),
        ("video", MP4, "video/mp4"),
        ("video", b"\x1aE\xdf\xa3" + bytes(9) + b"webm", "video/webm"),
        ("audio", WAV, "audio/wav"),
        ("audio", b"ID3" + bytes(9), "audio/mpeg"),
    ):
        made: Any = address(kind, data)  # type: ignore[arg-type]
        assert made == f"data:{told};base64,{base64.b64encode(data).decode()}"


def unpacked(png: bytes) -> tuple[dict[str, Any], bytes]:
    """Head and pixels of a PNG, its checksums checked."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        name, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + data)
        chunks[name], at = data, at + 12 + size
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    raw = zlib.decompress(chunks[b"IDAT"])
    stride = len(raw) // height
    assert all(raw[row * stride] == 0 for row in range(height))
    pixels = b"".join(raw[row * stride + 1 : (row + 1) * stride] for row in range(height))
    return {"width": width, "height": height, "depth": depth, "colour": colour}, pixels


@given(
    arrays.arrays(
        np.uint8,
        st.one_of(
            st.tuples(st.integers(1, 5), st.integers(1, 5)),
            st.tuples(st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 3, 4])),
        ),
    )
)
def test_arrays_become_png(pixels: Any) -> None:
    head, found = unpacked(base64.b64decode(address("image", pixels).partition(",")[2]))
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    assert head == {
        "width": pixels.shape[1],
        "height": pixels.shape[0],
        "depth": 8,
        "colour": {1: 0, 3: 2, 4: 6}[channels],
    }
    assert found == pixels.tobytes()


def test_samples_become_wav_and_tensors_are_arrays() -> None:
    import torch

    samples = np.array([0.0, 0.5, -1.0, 2.0])
    for given_ in (samples, torch.tensor(samples)):
        data = base64.b64decode(address("audio", (given_, 8000)).partition(",")[2])
        with wave.open(io.BytesIO(data)) as sound:
            assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (8000, 1, 2)
            told = np.frombuffer(sound.readframes(9), dtype="<i2").tolist()
        assert told == [0, 16384, -32767, 32767]
    picture = torch.zeros((2, 2, 3), dtype=torch.uint8)
    assert address("image", picture) == address("image", picture.numpy())


def test_a_pil_image_saves_itself() -> None:
    class Picture:
        mode = "RGB"

        def save(self, target: Any, format: str) -> None:
            assert format == "PNG"
            target.write(PNG)

    assert address("image", Picture()) == address("image", PNG)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sgl.image("no/such/file.png"), "cannot be read"),
        (lambda: sgl.image(b"hello"), "not in a known image format"),
        (lambda: sgl.image(MP4), "not in a known image format"),
        (lambda: sgl.image(np.zeros((2, 2, 3))), "convert to uint8"),
        (lambda: sgl.image(np.zeros((3, 2, 2), np.uint8)), "channels last"),
        (lambda: sgl.image(np.zeros((0, 2), np.uint8)), "got shape"),
        (lambda: sgl.image(7), "image takes a path"),
        (lambda: sgl.video(WAV), "not in a known video format"),
        (lambda: sgl.video(MP4, num_frames=0), "num_frames"),
        (lambda: sgl.audio((np.zeros(3), 0)), "at 0 Hz"),
        (lambda: sgl.audio(np.zeros(3)), "audio takes a path"),
    ],
)
def test_what_is_no_medium_is_refused_where_it_is_written(make: Any, words: str) -> None:
    with pytest.raises(BadProgram, match=words):
        make()


def test_media_in_compiled_programs() -> None:
    program = ask.trace(PNG)
    assert "Media(image, data:image/png;base64," in program.tree()
    assert len(program.tree().splitlines()[3]) < 200
    assert sgl.Program.from_json(program.to_json()) == program
    state = ask.run(PNG, backend=sgl.MockBackend(["x", "y"]))
    assert content(state)[1]["type"] == "image_url"


def test_transcripts_replay_media() -> None:
    part = {"type": "image_url", "image_url": {"url": "https://a/b"}}
    said = Transcript.EMPTY.open("user").say("a").show(part).say("b").close()
    again = said.replay(Transcript.EMPTY)
    assert again.messages() == said.messages()
    assert said.messages()[0].content == [
        {"type": "text", "text": "a"},
        part,
        {"type": "text", "text": "b"},
    ]
    raw = Transcript.EMPTY.say("look ").show(part)
    assert raw.messages()[0].content == [{"type": "text", "text": "look "}, part]
    assert raw.prompt().plain_text is None


def test_concatenating_forks_keep_their_media() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user_begin()
        forks = s.fork(2)
        forks += lambda index: sgl.image([PNG, JPEG][index])
        forks.join("concate_and_append")
        s += sgl.user_end()

    parts = content(program.run())
    assert [part["image_url"]["url"][:15] for part in parts] == ["data:image/png;", "data:image/jpeg"]


def test_turns_of_other_roles() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.developer("Be brief.")
        s += sgl.role("critic", "No.")
        with s.tool():
            s += "42"
        s += sgl.role_begin("user") + "Hi" + sgl.role_end("user")

    assert [turn["role"] for turn in program.run().messages()] == ["developer", "critic", "tool", "user"]
    with pytest.raises(BadProgram, match="a role's name"):
        sgl.role("", "x")

"""Pictures and the bundled model, which reads text only: refused with the reason, the engine goes on."""

from __future__ import annotations

from typing import Any

import pytest

import sglang_dsl as sgl


def test_the_bundled_model_refuses_pictures_with_the_reason(backend: Any) -> None:
    @sgl.function
    def ask(s: Any, picture: bytes | None) -> None:
        s += sgl.user("Look: " + sgl.image(picture) if picture else "Hello")
        s += sgl.assistant(sgl.gen("answer", max_tokens=4))

    with pytest.raises(sgl.ProgramError, match="image") as caught:
        ask.run(b"\x89PNG\r\n\x1a\n", backend=backend)["answer"]
    assert caught.value.status == 400
    assert ask.run(None, backend=backend)["answer"]

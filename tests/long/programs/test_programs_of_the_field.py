"""process/programs/test_programs_of_the_field.py, at length."""

from __future__ import annotations

from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl.srt.hf_transformers_utils import get_tokenizer
from tests.process.programs.test_programs_of_the_field import _no_default, few_shot_qa, pocket


@pytest.mark.timeout(1800)
def test_the_tokenizer_of_a_server(shared_server: Any) -> None:
    backend = sgl.RuntimeEndpoint(shared_server.url)
    tokenizer = get_tokenizer(backend.get_server_info()["tokenizer_path"])
    state = few_shot_qa.run(question="Who rules Ostrel?", backend=backend)
    assert tokenizer.decode(tokenizer.encode(state["answer"])) == state["answer"]
    assert get_tokenizer("pocket").encode("Ostrel") == tokenizer.encode("Ostrel")

"""A model that takes pictures behind the real server: the clients of three APIs, programs over HTTP, and what
is refused. The checkpoint is a random one of Qwen2.5-VL's family; what is right, transformers says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from tokenizers import Tokenizer

import sglang_dsl as sgl
from runtime.api import Engine
from sglang_dsl.backends.endpoint import RuntimeEndpoint
from sglang_dsl.backends.engine import EngineBackend
from tests.process.conftest import Served
from tests.unit.runtime.vision.making import Case, data_url, ids_of, make, picture, png

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
COUNT = 8
A, B = picture(140, 100, 1), picture(60, 200, 2)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make(tmp_path_factory.mktemp("vl"))


@pytest.fixture(scope="module")
def server(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(
        tmp_path_factory.mktemp("server"), "--model", str(case.path), "--dtype", "float32",
        "--served-model-name", "tiny-vl", "--max-images", "3", "--log-level", "warning",
    )  # fmt: skip
    try:
        yield made.wait_ready()
        assert "Traceback" not in made.log, made.log
    finally:
        made.kill()


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def turns(*parts: str) -> str:
    """What the checkpoint's template makes of one user's message."""
    return f"<|im_start|>user\n{''.join(parts)}<|im_end|>\n<|im_start|>assistant\n"


def text_of(case: Case, prompt: str, pictures: list[Any]) -> str:
    """Greedy, as the server decodes it: letters, no marks, up to the end of the turn."""
    ids = case.greedy(ids_of(prompt), pictures, COUNT)
    end = ids_of("<|im_end|>")[0]
    ids = ids[: ids.index(end)] if end in ids else ids
    return decoded(case, ids)


def decoded(case: Case, ids: list[int]) -> str:
    return str(Tokenizer.from_file(str(case.path / "tokenizer.json")).decode(ids, skip_special_tokens=True))


def part(one: Any, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(one), **more}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def chat(client: openai.OpenAI, content: Any, **words: Any) -> Any:
    return client.chat.completions.create(
        model="tiny-vl", messages=[{"role": "user", "content": content}], max_tokens=COUNT, temperature=0,
        **words,
    )  # fmt: skip


def test_chat_completions(client: openai.OpenAI, case: Case) -> None:
    prompt = turns("compare ", IMAGE, " and ", IMAGE)
    wanted = [(one, other, text_of(case, prompt, [one, other])) for one, other in ((A, B), (B, A))]
    assert wanted[0][2] != wanted[1][2]  # the pictures matter
    for one, other, text in wanted:
        content = [said("compare "), part(one), said(" and "), part(other, detail="high")]
        whole = chat(client, content)
        assert whole.choices[0].message.content == text
        assert whole.usage.prompt_tokens == len(case.inputs(ids_of(prompt), [one, other])["input_ids"][0])
        pieces = chat(client, content, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == text
    assert chat(client, "no picture").choices[0].message.content == text_of(case, turns("no picture"), [])


def test_responses(client: openai.OpenAI, case: Case) -> None:
    found = client.responses.create(
        model="tiny-vl", max_output_tokens=COUNT, temperature=0,
        input=[{"role": "user", "content": [
            {"type": "input_text", "text": "look "},
            {"type": "input_image", "image_url": data_url(B), "detail": "auto"},
        ]}],
    )  # fmt: skip
    assert found.output_text == text_of(case, turns("look ", IMAGE), [B])


def test_anthropics_messages(server: Served, case: Case) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": data_url(A).partition(",")[2]}
    content: Any = [{"type": "image", "source": source}, said(" look")]
    messages: Any = [{"role": "user", "content": content}]
    found = client.messages.create(
        model="tiny-vl", max_tokens=COUNT, messages=messages, extra_body={"temperature": 0}
    )
    (block,) = found.content
    assert block.type == "text"
    assert block.text == text_of(case, turns(IMAGE, " look"), [A])
    counted = client.messages.count_tokens(model="tiny-vl", messages=messages)
    assert counted.input_tokens == len(case.inputs(ids_of(turns(IMAGE, " look")), [A])["input_ids"][0])


def test_generate_and_what_is_refused(server: Served, case: Case) -> None:
    params = {"max_new_tokens": COUNT, "temperature": 0}

    def post(**body: Any) -> httpx.Response:
        return httpx.post(f"{server.url}/generate", json={"sampling_params": params, **body}, timeout=300)

    several = post(text=[f"a {IMAGE}", f"b {IMAGE}"], image_data=[data_url(A), [{"url": data_url(B)}]]).json()
    right = [text_of(case, f"{name} {IMAGE}", [one]) for name, one in (("a", A), ("b", B))]
    assert [one["text"] for one in several] == right
    for data, message in (
        ("http://169.254.169.254/latest", "does not fetch images"),
        ("file:///etc/hostname", "does not read files"),
        ("bm8=", "not an image that can be read"),
        (None, "1 image placeholders"),
        ([data_url(A)] * 4, "at most 3|1 image placeholders"),
    ):
        answer = post(text=IMAGE, image_data=data)
        assert answer.status_code == 400, data
        assert any(one in answer.text for one in message.split("|")), answer.text
    facts = httpx.get(f"{server.url}/model_info", timeout=300).json()
    assert facts["has_image_understanding"] is True


def ask(s: Any, one: Any, other: Any) -> None:
    s += sgl.user("first " + sgl.image(one))
    s += sgl.assistant(sgl.gen("one", max_tokens=COUNT, temperature=0))
    s += sgl.user(sgl.image(other) + " second")
    forks = s.fork(2)
    for fork, text in zip(forks, "xy"):
        fork += sgl.assistant(text + sgl.gen("two", max_tokens=COUNT, temperature=0))
    s["twos"] = [fork["two"] for fork in forks]


def told(case: Case) -> tuple[str, list[str]]:
    first = turns("first ", IMAGE)
    one = text_of(case, first, [A])
    rest = f"{first}{one}<|im_end|>\n{turns(IMAGE, ' second')}"
    return one, [text_of(case, rest + text, [A, B]) for text in "xy"]


def test_programs_over_http_and_in_process(server: Served, case: Case, tmp_path: Path) -> None:
    """As bytes, and as a file; a fork keeps the pictures."""
    one, twos = told(case)
    program = sgl.function(ask)
    path = tmp_path / "b.png"
    path.write_bytes(png(B))
    state = program.run(png(A), str(path), backend=RuntimeEndpoint(server.url))
    assert (state["one"], state["twos"]) == (one, twos)
    with Engine(str(case.path), dtype="float32", max_total_tokens=2048, threads=1) as engine:
        state = program.run(A, B, backend=EngineBackend(engine))
        assert (state["one"], state["twos"]) == (one, twos)


def test_a_template_that_is_chosen_at_the_client(server: Served, case: Case) -> None:
    """The text is rendered there, and the pictures go beside it."""

    @sgl.function
    def look(s: Any) -> None:
        s += sgl.user("look " + sgl.image(png(A)))
        s += sgl.assistant(sgl.gen("seen", max_tokens=COUNT, temperature=0))

    backend = RuntimeEndpoint(server.url, chat_template_name="qwen2-vl")
    assert look.run(backend=backend)["seen"] == text_of(case, turns("look ", IMAGE), [A])


def test_a_choice_and_text_outside_of_turns(server: Served, case: Case) -> None:
    @sgl.function
    def pick(s: Any) -> None:
        s += "this is " + sgl.image(png(B)) + " "
        s += sgl.select("what", ["red", "blue"], choices_method=sgl.token_length_normalized)

    state = pick.run(backend=RuntimeEndpoint(server.url))
    scores = {}
    for option in ("red", "blue"):
        logits = case.logits(ids_of(f"this is {IMAGE} {option}"), [B]).log_softmax(-1)
        own = ids_of(option)
        scores[option] = sum(float(logits[at - len(own) - 1, token]) for at, token in enumerate(own)) / len(
            own
        )
    assert state["what"] == max(scores, key=scores.__getitem__)

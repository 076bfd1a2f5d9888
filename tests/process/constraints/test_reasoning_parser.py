"""--reasoning-parser: the reasoning of every reply is kept apart, through the SDKs and a real server."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai

from tests.process.patience import PATIENCE_S

PROBLEM = (
    "There are 7 apples on a table. Then 5 more come. How many apples are there now? Think step by step."
)
ASKED: Any = [{"role": "user", "content": PROBLEM}]
GREEDY: Any = {"model": "pocket", "temperature": 0, "max_tokens": 80}


def deltas(client: openai.OpenAI, **words: Any) -> list[tuple[str, str]]:
    """(reasoning, content) of each piece of a stream."""
    with client.chat.completions.create(stream=True, **GREEDY, messages=ASKED, **words) as chunks:
        found = [chunk.choices[0].delta for chunk in chunks]
    return [(getattr(one, "reasoning_content", None) or "", one.content or "") for one in found]


def test_reasoning_is_kept_apart(start_server: Any) -> None:
    server = start_server(
        "--reasoning-parser", "qwen3", "--log-level", "warning", "--dtype", "float32"
    ).wait_ready()
    assert httpx.get(f"{server.url}/model_info", timeout=PATIENCE_S).json()["reasoning_parser"] == "qwen3"
    words: Any = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE_S}
    with openai.OpenAI(base_url=f"{server.url}/v1", **words) as client:

        def message(**more: Any) -> Any:
            made = client.chat.completions.create(**GREEDY, messages=ASKED, **more)
            return made.choices[0].message

        plain = message(extra_body={"separate_reasoning": False})
        assert plain.content.startswith("<think>")
        apart = message()
        thought, answer = apart.reasoning_content, apart.content
        assert thought
        assert answer
        assert "think>" not in thought + answer
        assert plain.content == f"<think>{thought}</think>{answer}"
        pieces = deltas(client)
        assert ("".join(one for one, _ in pieces), "".join(one for _, one in pieces)) == (thought, answer)
        first = next(at for at, (_, content) in enumerate(pieces) if content)
        assert not any(one for one, _ in pieces[first + 1 :])
        held = deltas(client, extra_body={"stream_reasoning": False})
        assert [one for one, _ in held if one] == [thought]
        asked: Any = {"model": "pocket", "temperature": 0, "input": ASKED, "max_output_tokens": 80}
        made = client.responses.create(**asked)
        assert [item.type for item in made.output] == ["reasoning", "message"]
        assert made.output_text == answer
        with client.responses.stream(**asked) as stream:
            events = list(stream)
        for kind, wanted in (("reasoning_text", thought), ("output_text", answer)):
            told = [getattr(one, "delta", "") for one in events if one.type == f"response.{kind}.delta"]
            assert "".join(told) == wanted
        called = client.chat.completions.create(
            **GREEDY, messages=ASKED, tools=[TOOL], tool_choice="required"
        ).choices[0]
        assert called.finish_reason == "tool_calls"
    with anthropic.Anthropic(base_url=server.url, **words) as claude:
        asked = {"model": "pocket", "max_tokens": 80, "messages": ASKED, "extra_body": {"temperature": 0}}
        blocks = claude.messages.create(**asked).content
        assert [block.type for block in blocks] == ["thinking", "text"]
        with claude.messages.stream(**asked) as said:
            final = said.get_final_message().content
        assert [block.type for block in final] == ["thinking", "text"]
        assert final[1].text == blocks[1].text == answer


TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def test_a_request_asks_for_it_by_itself(shared_server: Any) -> None:
    def message(**fields: Any) -> Any:
        body = {**GREEDY, "messages": ASKED, **fields}
        made = httpx.post(f"{shared_server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        return made.json()["choices"][0]["message"]

    plain, apart = message(), message(separate_reasoning=True)
    assert plain["reasoning_content"] is None
    assert plain["content"] == f"<think>{apart['reasoning_content']}</think>{apart['content']}"

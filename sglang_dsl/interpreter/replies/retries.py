"""How a model is asked again for a value that does not fit its type. Knows prompts alone."""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.protocol.messages import Message
from sglang_dsl.conversation.requests import Prompt

_CUE = 400
"""Characters of a line that are said again, at most."""


def corrected(prompt: Prompt, text: str, kind: str, fault: str, cut: bool) -> Prompt:
    """The prompt that asks again for a `kind` after the model said `text`: in an assistant's turn by a turn
    of the user behind it, elsewhere by words in the text, and the prompt's last line once more. cut: the text
    ended at its token limit."""
    *before, last = prompt.messages
    said = f"That is not a valid {kind}: {fault}."
    if cut:
        said += " It was cut off at the token limit: write less."
    failed = _behind(last.content, text)
    if last.role == "assistant":
        said += f" Answer again, with a valid {kind} and nothing else."
        if not failed and before and before[-1].role == "user":
            # Nothing was said, and APIs take no empty turn: the request is said again in the one before.
            turn = _behind(before[-1].content, f"\n\n({said})")
            asked = msgspec.structs.replace(before[-1], content=turn)
            return Prompt((*before[:-1], asked, last), prompt.tools)
        asked = Message("user", said)
        done = msgspec.structs.replace(last, content=failed, open=False)
        return Prompt((*before, done, asked, last), prompt.tools)
    line = _behind(last.content, "")
    cue = (line if isinstance(line, str) else str(line[-1]["text"])).rsplit("\n", 1)[-1][-_CUE:]
    again = _behind(failed, f"\n\n({said} Once more, valid:)\n\n{cue}")
    return Prompt((*before, msgspec.structs.replace(last, content=again)), prompt.tools)


def _behind(content: str | list[dict[str, Any]], text: str) -> str | list[dict[str, Any]]:
    """A message's content with text behind it."""
    if isinstance(content, str):
        return content + text
    if content and content[-1]["type"] == "text":
        return [*content[:-1], {"type": "text", "text": content[-1]["text"] + text}]
    return [*content, {"type": "text", "text": text}]

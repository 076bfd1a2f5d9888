"""How a generation is requested again if its text is no value of its type. Knows prompts alone."""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.protocol.messages import Message
from sglang_dsl.conversation.requests import Prompt

_CUE = 400
"""Characters of a line that are repeated, at most."""


def corrected(prompt: Prompt, text: str, kind: str, fault: str, cut: bool) -> Prompt:
    """The prompt that requests a `kind` again after the model wrote `text`: in an assistant's turn by a turn
    of the user behind it, elsewhere by a remark in the text and the prompt's last line. `cut`: the text ended
    at its token limit."""
    *before, last = prompt.messages
    message = f"That is not a valid {kind}: {fault}."
    if cut:
        message += " It was cut off at the token limit: write less."
    failed = _behind(last.content, text)
    if last.role == "assistant":
        message += f" Answer again, with a valid {kind} and nothing else."
        if not failed and before and before[-1].role == "user":
            # The reply was empty, and APIs take no empty turn: the remark goes into the turn before.
            content = _behind(before[-1].content, f"\n\n({message})")
            turn = msgspec.structs.replace(before[-1], content=content)
            return Prompt((*before[:-1], turn, last), prompt.tools)
        turn = Message("user", message)
        done = msgspec.structs.replace(last, content=failed, open=False)
        return Prompt((*before, done, turn, last), prompt.tools)
    line = _behind(last.content, "")
    cue = (line if isinstance(line, str) else str(line[-1]["text"])).rsplit("\n", 1)[-1][-_CUE:]
    again = _behind(failed, f"\n\n({message} Once more, valid:)\n\n{cue}")
    return Prompt((*before, msgspec.structs.replace(last, content=again)), prompt.tools)


def _behind(content: str | list[dict[str, Any]], text: str) -> str | list[dict[str, Any]]:
    """A message's content with text behind it."""
    if isinstance(content, str):
        return content + text
    if content and content[-1]["type"] == "text":
        return [*content[:-1], {"type": "text", "text": content[-1]["text"] + text}]
    return [*content, {"type": "text", "text": text}]

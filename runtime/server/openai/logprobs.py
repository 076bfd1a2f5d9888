"""Log-probabilities of tokens as OpenAI's clients read them: a token's text, and the bytes it stands for.

A token may be a part of a character. Its text is then written as "bytes:\\xf0\\x9f", so that different tokens
have different texts; joined, the bytes of all tokens are the bytes of the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.protocol.io_struct import OutputDelta
from runtime.protocol.vocabulary import Vocabulary

UNKNOWN = -9999.0
"""Where no probability is known: what OpenAI says of a very unlikely token."""


def spelled(vocabulary: Vocabulary, token: int | None, text: str | None) -> tuple[str, bytes]:
    """A token's text and its bytes. `text`: what the runtime calls it, with U+FFFD for broken bytes."""
    own = b"" if token is None or not 0 <= token < len(vocabulary) else vocabulary.tokens[token]
    if not own:
        # Control tokens are no text; they have their name.
        name = text or f"token_id:{token}"
        return name, name.encode("utf-8", "surrogatepass")
    try:
        return own.decode(), own
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own), own


def token_entries(output: OutputDelta, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """[{token, logprob, bytes, top_logprobs}] of an output's tokens; of a stream's those that do not take the
    place of tokens sent before."""
    tokens = output.meta.get("output_token_logprobs") or []
    tops = output.meta.get("output_top_logprobs") or []
    return [
        {
            **_entry(vocabulary, tokens[at]),
            "top_logprobs": [_entry(vocabulary, one) for one in (tops[at] if at < len(tops) else ()) or ()],
        }
        for at in range(output.replaced, len(tokens))
    ]


def _entry(vocabulary: Vocabulary, given: Sequence[Any]) -> dict[str, Any]:
    logprob, token, text = given
    name, own = spelled(vocabulary, token, text)
    return {"token": name, "logprob": UNKNOWN if logprob is None else logprob, "bytes": list(own)}

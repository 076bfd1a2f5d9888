"""Log-probabilities of tokens as OpenAI's clients read them: a token's text, and the bytes it stands for.

A token may be a part of a character. Its text is then "bytes:\\xf0\\x9f", so that different tokens have
different texts; the bytes of all tokens are the bytes of the whole text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.protocol.io_struct import OutputDelta
from runtime.protocol.vocabulary import Vocabulary

UNKNOWN = -9999.0
"""For an unknown probability, as OpenAI sends it for a very unlikely token."""


def spelled(vocabulary: Vocabulary, token: int | None, text: str | None) -> tuple[str, bytes]:
    """A token's text and its bytes. `text`: its text in the runtime, with U+FFFD for incomplete bytes."""
    raw = b"" if token is None or not 0 <= token < len(vocabulary) else vocabulary.tokens[token]
    if not raw:
        # Control tokens have a name, and no text.
        name = text or f"token_id:{token}"
        return name, name.encode("utf-8", "surrogatepass")
    try:
        return raw.decode(), raw
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def prompt_entries(meta: Mapping[str, Any], top: int) -> list[dict[str, Any] | None]:
    """For each token of the prompt {id: {logprob, rank, decoded_token}}: of the token and of the `top`
    likeliest at its position; null for the first token. rank: 1 for the likeliest, null beyond `top`. As in
    vLLM."""
    entries: list[dict[str, Any] | None] = []
    tops = meta.get("input_top_logprobs") or ()
    for at, (logprob, token, text) in enumerate(meta.get("input_token_logprobs") or ()):
        if logprob is None:
            entries.append(None)
            continue
        ranked = list(tops[at] or ())[:top] if at < len(tops) else []
        entry = {
            str(one): {"logprob": value, "rank": rank, "decoded_token": name}
            for rank, (value, one, name) in enumerate(ranked, 1)
        }
        entry.setdefault(str(token), {"logprob": logprob, "rank": None, "decoded_token": text})
        entries.append(entry)
    return entries


def token_entries(
    output: OutputDelta, vocabulary: Vocabulary, top: int = 1 << 30, *, as_ids: bool = False
) -> list[dict[str, Any]]:
    """[{token, logprob, bytes, top_logprobs}] of an output's tokens, without those that replace tokens sent
    before, with at most `top` of the likeliest. as_ids: tokens are named "token_id:N"."""
    tokens = output.meta.get("output_token_logprobs") or []
    tops = output.meta.get("output_top_logprobs") or []
    return [
        {
            **_entry(vocabulary, tokens[at], as_ids),
            "top_logprobs": [
                _entry(vocabulary, one, as_ids) for one in ((tops[at] if at < len(tops) else ()) or ())[:top]
            ],
        }
        for at in range(output.replaced, len(tokens))
    ]


def _entry(vocabulary: Vocabulary, entry: Sequence[Any], as_ids: bool) -> dict[str, Any]:
    logprob, token, text = entry
    name, raw = spelled(vocabulary, token, text)
    if as_ids:
        name = f"token_id:{token}"
    return {"token": name, "logprob": UNKNOWN if logprob is None else logprob, "bytes": list(raw)}

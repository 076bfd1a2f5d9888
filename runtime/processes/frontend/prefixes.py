"""The content of the prefix cache with texts: the scheduler knows token ids only."""

from __future__ import annotations

from typing import Any

from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.protocol.control import GetPrefixesReq

PICTURE = "▢".encode()
"""In place of a picture's ids, which are no tokens."""
SHOWN_IDS = 48
"""Tokens of each node whose text is shown."""


def question(most: int, *, texts: bool) -> GetPrefixesReq:
    return GetPrefixesReq(most=most, ids=SHOWN_IDS if texts else 0)


def with_texts(tree: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The scheduler's answer with the `text` of each node in place of its ids, if there is a tokenizer."""
    for node in tree["nodes"]:
        ids = node.pop("ids", [])
        if tokenizer is not None:
            known = range(len(tokenizer.vocabulary))
            pieces = tokenizer.text_table.bytes_of(ids, False)
            text = b"".join(piece if id in known else PICTURE for id, piece in zip(ids, pieces, strict=True))
            node["text"] = text.decode("utf-8", "replace")
            node["cut"] = node["tokens"] > len(ids)
    return tree

"""Metadata that is sent beside the KV, with a checksum."""

from __future__ import annotations

import struct
import zlib

import msgspec

from runtime.protocol.errors import TransferCorrupt

_HEAD = struct.Struct("<QI")  # bootstrap id, checksum


class Metadata(msgspec.Struct, frozen=True, array_like=True):
    """Results of the prefill side, with which the decode side continues.

    output_ids     sampled there, without KV yet: the first token
    cached_tokens  of the prompt, in the prefill side's cache
    logprobs       one per output id, if requested
    top_logprobs   per output id its best (id, logprob) pairs
    token_ids      per output id the log-probabilities of the requested ids
    """

    output_ids: tuple[int, ...]
    cached_tokens: int = 0
    logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    token_ids: tuple[tuple[float, ...], ...] = ()


_DECODER = msgspec.msgpack.Decoder(Metadata)
_ENCODER = msgspec.msgpack.Encoder()


def pack(bootstrap_id: int, metadata: Metadata) -> bytes:
    body = _ENCODER.encode(metadata)
    return _HEAD.pack(bootstrap_id, _checksum(bootstrap_id, body)) + body


def unpack(bootstrap_id: int, data: bytes) -> Metadata:
    """Raises TransferCorrupt: they are of another transfer, or damaged."""
    body, location = data[_HEAD.size :], f"room {bootstrap_id}"
    try:
        owner, checksum = _HEAD.unpack_from(data)
        if owner != bootstrap_id:
            raise TransferCorrupt(f"metadata of room {owner} came for room {bootstrap_id}", where=location)
        if _checksum(bootstrap_id, body) != checksum:
            raise TransferCorrupt("the metadata are damaged", where=location)
        return _DECODER.decode(body)
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransferCorrupt(f"not metadata: {error}", where=location) from error


def _checksum(bootstrap_id: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(bootstrap_id.to_bytes(8, "little")))

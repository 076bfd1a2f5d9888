"""What every floor says of the names of LoRA adapters."""

from __future__ import annotations

from runtime.protocol.errors import BadRequest


def no_adapters(where: str) -> BadRequest:
    """The error for whoever asks for an adapter where there are none."""
    return BadRequest(
        "the engine was started without adapters",
        where=where,
        hint="start it with --lora-paths or --enable-lora",
    )


def check_name(name: object) -> None:
    """Raise BadRequest unless it can be an adapter's name in a request."""
    if not isinstance(name, str):
        raise BadRequest(f"must be a text, got {name!r}", where="lora_path")
    if not name:
        raise BadRequest("is empty", where="lora_path")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise BadRequest("must not contain lone surrogates", where="lora_path") from None

"""ImageOptions: limits for images, as options of EngineConfig."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtime.config.options import option
from runtime.protocol.errors import BadRequest


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """For models with images; others ignore them."""

    max_images: int = option(16, "maximum number of images in one request", at_least=1)
    max_image_bytes: int = option(20 << 20, "maximum size of one encoded image", at_least=1)
    max_image_pixels: int = option(
        40_000_000,
        "maximum number of pixels of an image before scaling; checked before it is decoded",
        at_least=1,
    )
    image_cache_tokens: int = option(
        32_768, "maximum number of image tokens that the model process caches for later steps", at_least=1
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "hosts from which images may be fetched over http(s), separated by commas; * allows all hosts with "
        "a public address. By default images must be part of the request",
    )
    allowed_local_media_path: str = option(
        "", "folder whose files requests may name (file:///...). By default none"
    )
    media_timeout_s: float = option(10.0, "seconds that fetching one image may take", positive=True)

    def verify_images(self) -> None:
        """Raise BadRequest naming the option and its rule."""
        folder = self.allowed_local_media_path
        if folder and not Path(folder).expanduser().is_dir():
            raise BadRequest(f"{folder!r} is not a folder", where="allowed_local_media_path")

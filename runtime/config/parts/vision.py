"""VisionSpec: a vision tower beside a decoder, and the preprocessing of images for it: only data, read from
config.json and preprocessor_config.json. ImageOptions: limits for images, as options of EngineConfig."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from runtime.config.fields import Fields
from runtime.config.options import option
from runtime.protocol.errors import BadRequest

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
CHANNELS = 3
BICUBIC = 3
_PIXELS = (56 * 56, 28 * 28 * 1280)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """A tower over the patches of one image, in which each square of merge x merge patches becomes one token.

    hidden_size, layers, heads, ffn_size  of the tower; out_size: of a token, the decoder's hidden size
    patch             side of a patch in pixels; frames: frames per patch; an image repeats its only frame
    window            side in pixels of the squares within which patches attend to one another; 0: the whole
                      image. whole_layers: layers without windows
    norm, gated, activation  as of a decoder (Traits, ACTIVATIONS)
    min_pixels, max_pixels   of a resized image
    scale, mean, std  a channel's value x from 0 to 255 becomes (x * scale - mean) / std
    resample          Pillow's number of the resize filter
    image_id          the placeholder token of an image's tokens
    around            the tokens before and after it, if no template writes them
    """

    hidden_size: int
    layers: int
    heads: int
    ffn_size: int
    out_size: int
    patch: int = 14
    frames: int = 2
    merge: int = 2
    window: int = 0
    whole_layers: tuple[int, ...] = ()
    norm: str = "layer"
    gated: bool = False
    activation: str = "quick_gelu"
    min_pixels: int = _PIXELS[0]
    max_pixels: int = _PIXELS[1]
    scale: float = 1 / 255
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    resample: int = BICUBIC
    image_id: int = 0
    around: tuple[int, int] | None = None

    @property
    def step(self) -> int:
        """Side in pixels of the square that becomes one token."""
        return self.patch * self.merge

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the tokens of an image; height and width are multiples of `step`."""
        return height // self.step, width // self.step

    def prepared(self, directory: Path) -> VisionSpec:
        """With the values of preprocessor_config.json, or processor_config.json if that does not exist.
        Raises ModelLoadError for unsupported values."""
        one, whole = directory / "preprocessor_config.json", directory / "processor_config.json"
        if one.is_file():
            return _prepared(self, Fields.read(one))
        return _prepared(self, Fields.read(whole).child("image_processor")) if whole.is_file() else self


def _prepared(spec: VisionSpec, fields: Fields) -> VisionSpec:
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not fields.flag(name, True):
            raise fields.fail(f"{name!r} false is not supported")
    sides = {"patch_size": spec.patch, "merge_size": spec.merge, "temporal_patch_size": spec.frames}
    for name, expected in sides.items():
        if fields.integer(name, expected) != expected:
            raise fields.fail(f"{name!r} is {fields.values[name]}, in config.json it is {expected}")
    size = fields.child("size")
    least = fields.integer("min_pixels", size.integer("shortest_edge", spec.min_pixels))
    most = fields.integer("max_pixels", size.integer("longest_edge", spec.max_pixels))
    if least > most or most < spec.step**2:
        raise fields.fail(f"images cannot have between {least} and {most} pixels in squares of {spec.step}")
    mean, std = fields.numbers("image_mean") or spec.mean, fields.numbers("image_std") or spec.std
    if len(mean) != CHANNELS or len(std) != CHANNELS:
        raise fields.fail("'image_mean' and 'image_std' must have three numbers each")
    return replace(
        spec,
        min_pixels=least,
        max_pixels=most,
        scale=fields.number("rescale_factor", spec.scale),
        mean=mean,
        std=std,
        resample=fields.integer("resample", spec.resample, minimum=0),
    )


def qwen2_vision(fields: Fields) -> VisionSpec:
    """Qwen2-VL's tower (arXiv 2409.12191), from the whole configuration."""
    part = _part(fields)
    hidden = part.integer("embed_dim", 1280)
    return replace(
        _common(fields, part, hidden),
        ffn_size=int(hidden * part.number("mlp_ratio", 4)),
        out_size=part.integer("hidden_size", 3584),
        activation=part.text("hidden_act", "quick_gelu"),
    )


def qwen2_5_vision(fields: Fields) -> VisionSpec:
    """Qwen2.5-VL's (arXiv 2502.13923): windows, RMSNorm, a gated feed-forward."""
    part = _part(fields)
    hidden = part.integer("hidden_size", 3584)
    spec = replace(
        _common(fields, part, hidden),
        ffn_size=part.integer("intermediate_size", 3420),
        out_size=part.integer("out_hidden_size", 3584),
        window=part.integer("window_size", 112),
        whole_layers=part.ids("fullatt_block_indexes") or (7, 15, 23, 31),
        norm="rms",
        gated=True,
        activation=part.text("hidden_act", "silu"),
    )
    if spec.window < spec.step:
        raise part.fail(f"'window_size' {spec.window} is less than a token's {spec.step} pixels")
    return spec


def _part(fields: Fields) -> Fields:
    part = fields.child("vision_config")
    if not part.values:
        raise fields.fail("the field 'vision_config' is missing")
    return part


def _common(fields: Fields, part: Fields, hidden: int) -> VisionSpec:
    heads = part.integer("num_heads", 16)
    if hidden % heads or hidden // heads % 4:
        raise part.fail(f"{heads} heads do not share {hidden} dimensions in multiples of 4")
    # Old files have in_chans; if both fields exist, the newer one is right.
    if part.integer("in_channels", part.integer("in_chans", CHANNELS)) != CHANNELS:
        raise part.fail("'in_channels' other than 3 is not supported")
    begin, end = fields.ids("vision_start_token_id"), fields.ids("vision_end_token_id")
    return VisionSpec(
        hidden_size=hidden,
        layers=part.integer("depth", 32),
        heads=heads,
        ffn_size=1,
        out_size=1,
        patch=part.integer("patch_size", 14),
        frames=part.integer("temporal_patch_size", 2),
        merge=part.integer("spatial_merge_size", 2),
        image_id=fields.integer("image_token_id", 151655, minimum=0),
        around=(begin[0], end[0]) if len(begin) == len(end) == 1 else None,
    )


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """For models with images; others ignore them."""

    max_images: int = option(16, at_least=1)
    """maximum number of images in one request"""
    max_image_bytes: int = option(20 << 20, at_least=1)
    """maximum size of one encoded image"""
    max_image_pixels: int = option(40_000_000, at_least=1)
    """maximum number of pixels of an image before scaling; checked before it is decoded"""
    image_cache_tokens: int = option(32_768, at_least=1)
    """maximum number of image tokens that the model process caches for later steps"""
    allowed_media_domains: tuple[str, ...] = option(())
    """hosts from which images may be fetched over http(s), separated by commas; * allows all hosts with a
    public address. By default images must be part of the request"""
    allowed_local_media_path: str = option("")
    """folder whose files requests may name (file:///...). By default none"""
    media_timeout_s: float = option(10.0, positive=True)
    """seconds that fetching one image may take"""

    def verify_images(self) -> None:
        """Raise BadRequest naming the option and its rule."""
        folder = self.allowed_local_media_path
        if folder and not Path(folder).expanduser().is_dir():
            raise BadRequest(f"{folder!r} is not a folder", where="allowed_local_media_path")

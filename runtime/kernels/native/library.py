"""The compiled source's kernels for a decoder. If there is no library, or it gives wrong numbers on this
machine, callers compute with torch. Calls release the GIL."""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from runtime.kernels.native.compiled import load, paths
from runtime.kernels.native.panels import to_panels

log = logging.getLogger(__name__)

DIM_STEP, ROWS = 16, 128  # as in the source
TYPES = (torch.float32, torch.bfloat16)


class Pass(ctypes.Structure):
    """The source's struct of that name."""

    _fields_ = (
        *((name, c_int64) for name in ("tokens", "kv_heads", "group", "dim", "slots")),
        *((name, c_int64) for name in ("short_queries", "short_pool")),
        *((name, c_int64) for name in ("pieces", "tasks", "places", "merged", "part_tokens", "threads")),
        ("work_size", c_int64),
        *((name, c_void_p) for name in ("piece", "span", "run", "place", "merge", "first_part", "part")),
        *((name, c_void_p) for name in ("parts", "sums", "work", "parallel")),
        ("scale", c_float),
        ("softcap", c_float),
    )


class Matrix(ctypes.Structure):
    """The source's struct of that name."""

    _fields_ = tuple((name, c_void_p) for name in ("weight", "bias", "scale"))


class DecoderLayer(ctypes.Structure):
    """The source's struct of that name."""

    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "qk_norm", "mlp_norm")),
        *((name, Matrix) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_int64) for name in ("rope", "turned")),
    )


class DecoderShape(ctypes.Structure):
    """The source's struct Decoder."""

    _fields_ = (
        ("layer", ctypes.POINTER(DecoderLayer)),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        *((name, c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "dim", "ffn")),
        *((name, c_int64) for name in ("is_short", "short_norms", "wide", "shared")),
        ("eps", c_float),
    )


class Library:
    """attend, decode, draw, product, set_product, reads_rows, rms_norm, rotate, silu_mul: see the source.

    path: the file. lanes: floats per vector on this processor. tiles: whether it uses AMX. tuned: item sizes
    in bytes for whose products the settings are chosen (tuning.py). parallel: the address of the function
    that starts torch's own OpenMP threads (a second thread pool would compete for the cores). None if it is
    not found; then one thread computes.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError and AttributeError if it is not such a library, or has another version."""
        loaded = load(path, ctypes.CDLL)
        loaded.attend_lanes.restype, loaded.attend_lanes.argtypes = c_int, (c_int,)
        loaded.attend_work.restype, loaded.attend_work.argtypes = c_int64, (c_int64,)
        self.attend: Any = loaded.attend
        self.attend.restype = None
        self.attend.argtypes = (ctypes.POINTER(Pass), c_void_p, c_void_p, c_void_p, c_void_p)
        self.path = path
        self.product = _function(loaded.product, "pppppiiibpi")
        self.set_product = _function(loaded.set_product, "bbbbbb")
        self.tuned: set[int] = set()
        self.reads_rows = _function(loaded.reads_rows, "iib")
        self.rms_norm = _function(loaded.rms_norm, "ppppiiiiifbbbbpi")
        self.rotate = _function(loaded.rotate, "pppiiiiibpi")
        self.silu_mul = _function(loaded.silu_mul, "ppiiibpi")
        self.decode = _function(loaded.decode, "pppppppppp")
        self.draw = _function(loaded.draw, "pppfiifii")
        loaded.draw.restype = c_int64
        loaded.product.restype = loaded.reads_rows.restype = loaded.decode.restype = c_int
        loaded.decode_work.restype, loaded.decode_work.argtypes = c_int64, (ctypes.POINTER(DecoderShape),)
        self._loaded = loaded
        loaded.use_tiles.restype, loaded.use_tiles.argtypes = c_int, (c_int,)
        self.use_lanes(16)
        try:
            self.parallel = ctypes.cast(ctypes.CDLL(None).GOMP_parallel, c_void_p).value
        except (AttributeError, OSError, TypeError):
            self.parallel = None

    def use_lanes(self, most: int, tiles: bool = True) -> int:
        """From now on use vectors of at most `most` floats, and tiles if the processor has them. Returns the
        number of floats."""
        self.lanes = int(self._loaded.attend_lanes(most))
        self.tiles = bool(self._loaded.use_tiles(tiles))
        return self.lanes

    def work_size(self, dim: int) -> int:
        """Floats of working memory per thread, for heads of `dim` numbers."""
        return int(self._loaded.attend_work(dim))

    def decode_work(self, model: DecoderShape) -> int:
        """Numbers of working memory that `decode` needs per token."""
        return int(self._loaded.decode_work(ctypes.byref(model)))


_C_TYPES: dict[str, Any] = {"p": c_void_p, "i": c_int64, "b": c_int, "f": c_float}


def _function(function: Any, takes: str) -> Any:
    """Set the argument types of a C function. takes: one letter for each argument."""
    function.restype, function.argtypes = None, tuple(_C_TYPES[kind] for kind in takes)
    return function


@functools.cache
def library() -> Library | None:
    """The library of this process, or None."""
    for path in paths():
        try:
            native = Library(path)
        except (OSError, AttributeError) as error:
            log.warning("%s is not used: %s", path, error)
            continue
        if _of_use(native):
            return native
    return None


def _of_use(native: Library) -> bool:
    """Whether it is fast and right on this machine."""
    if native.lanes < 8 and platform.machine().lower() in ("x86_64", "amd64"):
        log.info("this processor has no AVX2: all is computed with torch")
        return False
    if not (_attends_right(native) and _computes_right(native)):
        log.warning("%s gives wrong numbers on this machine, torch takes its place", native.path)
        return False
    return True


def _computes_right(native: Library) -> bool:
    """Check products, norms, rotation and gates against the definitions."""
    rows, outputs, size, half = 5, 7, 96, 16
    dice = torch.Generator().manual_seed(2)
    x, weight, more = (torch.randn(count, size, generator=dice) for count in (rows, outputs, rows))
    x0, weight0, more0 = x.data_ptr(), weight.data_ptr(), more.data_ptr()
    products, normed, gated = (torch.empty(rows, width) for width in (outputs, size, size // 2))
    panels = to_panels(weight)
    native.product(
        x0, panels.data_ptr(), None, None, products.data_ptr(), rows, outputs, size, False, None, 1
    )
    native.silu_mul(x0, gated.data_ptr(), rows, size // 2, size, False, None, 1)
    turned = x.clone()  # one head a row, of which the first 2 * half numbers are turned
    cos, sin = weight[:rows, : 2 * half].contiguous(), more[:, : 2 * half].contiguous()
    native.rotate(
        turned.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, 1, size, 2 * half, size, False, None, 1
    )
    pairs = x[:, : 2 * half] * cos + x[:, : 2 * half].roll(half, -1) * sin
    added = x + more
    native.rms_norm(
        x0, weight0, more0, normed.data_ptr(), rows, 1, size, size, size, 0.5, False, False, False, False,
        None, 1,
    )  # fmt: skip
    scale = torch.rsqrt(added.square().mean(-1, keepdim=True) + 0.5)
    expected = (
        (products, x @ weight.t()),
        (gated, torch.nn.functional.silu(x[:, : size // 2]) * x[:, size // 2 :]),
        (turned, torch.cat((pairs, x[:, 2 * half :]), -1)),
        (more, added),
        (normed, added * scale * weight[0]),
    )
    right = all(torch.allclose(result, definition, atol=1e-4) for result, definition in expected)
    return right and _computes_codes_right(native)


def _computes_codes_right(native: Library) -> bool:
    """Check products in bfloat16 and with int8 weights."""
    rows, outputs, size = 17, 40, 64
    x, whole = torch.arange(rows * size).view(rows, size) % 13 - 6.0, torch.arange(outputs * size) % 11 - 5
    x[:, 0] = 127.0  # the largest of its row, so that rounding to int8 changes nothing
    short, weight = x.bfloat16(), whole.view(outputs, size).bfloat16()
    of_codes, of_short = torch.empty(rows, outputs), torch.empty(rows, outputs, dtype=torch.bfloat16)
    scale = torch.arange(1.0, 1 + outputs)
    weights = [
        one if native.reads_rows(outputs, size, one.dtype.itemsize) else to_panels(one)
        for one in (weight, weight.to(torch.int8))
    ]
    native.product(
        short.data_ptr(), weights[0].data_ptr(), None, None, of_short.data_ptr(), rows, outputs, size, True,
        None, 1,
    )  # fmt: skip
    native.product(
        x.data_ptr(), weights[1].data_ptr(), scale.data_ptr(), None, of_codes.data_ptr(), rows, outputs, size,
        False, None, 1,
    )  # fmt: skip
    product = x @ weight.float().t()
    return torch.equal(of_short, product.bfloat16()) and torch.allclose(of_codes, product * scale)


def _attends_right(native: Library) -> bool:
    """Check attention against the definition: a row of one token and one of five."""
    kv_heads, group, dim, slots, tokens = 2, 3, 32, 120, 6
    heads, width = kv_heads * group, kv_heads * group + 2 * kv_heads
    dice = torch.Generator().manual_seed(1)  # the global generator is the user's
    data = torch.randn(2 * kv_heads, slots, dim, generator=dice)
    qkv = torch.randn(tokens, width, dim, generator=dice)
    out, work = torch.empty(tokens, heads, dim), torch.empty(native.work_size(dim))
    runs = torch.tensor([[7, 35], [0, 3], [110, 1], [50, 60], [111, 5]])
    spans, places = torch.tensor([[0, 1], [1, 5]]), torch.tensor([[110, 6]])
    pieces = torch.tensor([[0, 1, 0, 3, 39, 38, 0, -1, 1, 0], [1, 1, 3, 2, 65, 60, 0, -1, 5, kv_heads]])
    arguments = Pass(
        tokens=tokens, kv_heads=kv_heads, group=group, dim=dim, slots=slots, pieces=2, tasks=2 * kv_heads,
        places=1, threads=1, work_size=work.numel(), piece=pieces.data_ptr(), span=spans.data_ptr(),
        run=runs.data_ptr(), place=places.data_ptr(), work=work.data_ptr(), scale=dim**-0.5,
    )  # fmt: skip
    native.attend(ctypes.byref(arguments), qkv.data_ptr(), data.data_ptr(), out.data_ptr(), None)
    data[:, 110:116] = qkv[:, heads:].transpose(0, 1)
    for token in range(tokens):
        seen = [*range(7, 42), 0, 1, 2, 110] if token == 0 else [*range(50, 110), *range(111, 111 + token)]
        keys, values = data[:kv_heads, seen], data[kv_heads:, seen]
        scores = qkv[token, :heads].view(kv_heads, group, dim) @ keys.transpose(1, 2) * dim**-0.5
        if not torch.allclose(out[token], (scores.softmax(-1) @ values).view(heads, dim), atol=1e-5):
            return False
    return True

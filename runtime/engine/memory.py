"""What a model gets of the machine: device, dtypes, memory, KV slots, and how its matrices are stored."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from pathlib import Path

import torch

from runtime.config.family import ARCHITECTURES
from runtime.config.model import ModelSpec
from runtime.config.parts.quantization import FROM_ANY
from runtime.config.runner import RunnerConfig
from runtime.layers.dense import Dense, can_pack
from runtime.layers.linear import LinearMethod
from runtime.layers.lora.linear import Adapted
from runtime.layers.quantised.choose import method_for
from runtime.models.decoder import Decoder
from runtime.parallel import Group
from runtime.protocol.errors import ModelLoadError, RuntimeFault

DEFAULT_SLOTS_AT_MOST = {"cpu": 65_536, "cuda": 2_000_000}
SLOTS_AT_LEAST = 64
PACK_AT_MOST = 0.25  # share of free memory for a second copy of the matrices
EXPAND_AT_MOST = 0.5  # share of free memory for the dequantised matrices of a checkpoint
SCALES = 1.07  # size with scales and offsets relative to the codes alone, for groups of about 64
_CGROUP = Path("/sys/fs/cgroup")


def pick_device(name: str, rank: int = 0, ranks: int = 1) -> torch.device:
    """`auto`: CUDA if available. With several ranks each has a GPU of its own. Raises ModelLoadError if it
    cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if ranks > 1 and name == "cuda":
        count = torch.cuda.device_count()
        if 0 < count < ranks:
            raise ModelLoadError(
                f"{ranks} ranks need a GPU each, there are {count}",
                where="tp_size",
                hint="device='cpu' computes without",
            )
        name = f"cuda:{rank}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts if it was built without the backend
        raise ModelLoadError(f"device {name!r} cannot be used: {error}", where="device") from error
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: float32 on CPUs, in which the rest of a batch changes only the last bits of a result."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def kv_dtype(name: str, computed: torch.dtype) -> torch.dtype:
    """The dtype of the KV pool for a model computed in `computed`."""
    kept = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    return kept.get(name, computed)


def available_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on `device`: the system's figure, or the container's limit if that
    is less."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit, used = _text(_CGROUP / "memory.max"), _text(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def give_back(device: torch.device) -> None:
    """Return unused memory to the system, or to other users of the device."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        # The C library keeps small pieces; it may lack this function.
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _meminfo() -> int | None:
    lines = _text(Path("/proc/meminfo")).splitlines()
    available = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(available[0]) * 1024 if available else None


def weight_bytes(spec: ModelSpec, dtype: torch.dtype, bits: int | None = None) -> int:
    """Bytes of all matrices of the model, over all ranks. bits: of one code of the layers' matrices; None:
    they are stored as `dtype`."""
    layers, embeddings = spec.matrix_sizes
    per_number = dtype.itemsize if bits is None else bits / 8 * SCALES
    return int(layers * per_number) + embeddings * dtype.itemsize


def check_weights_fit(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    path: str,
    ranks: int = 1,
    bits: int | None = None,
) -> None:
    """check_fits() for a decoder. Ranks share the machine's memory; each has its own GPU's. bits: see
    weight_bytes()."""
    needed = weight_bytes(spec, dtype, bits)
    check_fits(needed if device.type == "cpu" else needed // ranks, dtype, device, path)


def check_fits(needed: int, dtype: torch.dtype, device: torch.device, path: str) -> None:
    """Raise ModelLoadError if weights of this many bytes exceed the available memory."""
    if needed > (free := available_bytes(device)):
        raise ModelLoadError(
            f"the weights need {_gib(needed)} as {dtype}, {_gib(free)} are free on {device}",
            where=path,
            hint="use a smaller model or dtype='bfloat16'",
        )


def packs(wish: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether matrices are stored in a layout for the CPU; called before loading. `wish`: pack_weights."""
    return device.type == "cpu" and wish != "never" and can_pack(dtype)


def code_bits(spec: ModelSpec, wished: str | None, *, expand: bool) -> int | None:
    """Bits of one code if the layers' matrices are stored quantised, else None."""
    if spec.quantization is not None and wished != FROM_ANY:
        return None if expand else spec.quantization.bits
    return None if wished is None else 8


def expands(wish: str, weights: int, device: torch.device) -> bool:
    """Whether the matrices of a quantised checkpoint, with `weights` bytes when dequantised, are stored
    dequantised; called before loading. `wish`: expand_weights. "auto" is for CPUs, on which dequantising for
    each product takes longer than the product."""
    if wish != "auto":
        return wish == "always"
    return device.type == "cpu" and weights <= EXPAND_AT_MOST * available_bytes(device)


def slots_for(
    each: int, device: torch.device, requested: int | None, fraction: float, path: str, ranks: int = 1
) -> int:
    """The number of KV slots of `each` bytes: `requested`, or as many as `fraction` of the free memory holds,
    up to a cap. On the CPU each of `ranks` allocates as many. Raises ModelLoadError if they do not fit, or
    too few would."""
    free = available_bytes(device)
    if device.type == "cpu":
        each *= ranks
    if requested is not None:
        if requested * each > free:
            raise ModelLoadError(
                f"max_total_tokens={requested} needs {_gib(requested * each)}, "
                f"{_gib(free)} are free on {device}",
                where=path,
                hint=f"at most {free // each} fit",
            )
        return requested
    slots = min(DEFAULT_SLOTS_AT_MOST.get(device.type, 65_536), int(free * fraction) // each)
    if slots < SLOTS_AT_LEAST:
        raise ModelLoadError(
            f"{fraction:.0%} of the {_gib(free)} free on {device} hold {slots} KV slots of {each} bytes",
            where=path,
            hint="free memory, raise memory_fraction or set max_total_tokens",
        )
    return slots


def linear_method(
    spec: ModelSpec, config: RunnerConfig, dtype: torch.dtype, device: torch.device, path: str
) -> LinearMethod:
    """Called before loading. Raises ModelLoadError if the matrices do not fit; BadRequest if an option is not
    possible."""
    size = weight_bytes(spec, dtype)
    expand = expands(config.expand_weights, size, device)
    bits = code_bits(spec, config.quantization, expand=expand)
    check_weights_fit(spec, dtype, device, path, config.tp_size, bits)
    pack = packs(config.pack_weights, dtype, device)
    twice = config.pack_weights == "auto" and size <= PACK_AT_MOST * available_bytes(device)
    dense = Dense(pack=pack, both=twice)
    method = method_for(spec, config.quantization, dense, expand=expand)
    if config.enable_lora:
        return Adapted(method, (ARCHITECTURES.load(spec.architecture).names.head,))
    return method


def read_again(directory: Path, before: Decoder, config: RunnerConfig, group: Group) -> Decoder:
    """The same model with other weights. All ranks of the group read them; if one cannot, all fail. Raises
    ModelLoadError."""
    fault: RuntimeFault | None = None
    directory = Path(os.path.expanduser(directory))
    decoder, spec, dtype, device = before, before.spec, before.dtype, before.device
    try:
        if unlike := spec.unlike(ModelSpec.from_dir(directory)):
            raise ModelLoadError(
                f"is of another shape than the model that runs: {', '.join(unlike)} differ",
                where=str(directory),
                hint="start a server with it",
            )
        with torch.inference_mode():
            method = linear_method(spec, config, dtype, device, str(directory))
            decoder = Decoder.load(directory, spec, dtype, device, method, group)
            method.tune()
    except RuntimeFault as error:
        fault = error
    read = group.least(0 if fault else 1)
    if fault is not None:
        raise fault
    if not read:
        raise ModelLoadError("another rank could not read its part", where=str(directory))
    return decoder


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"

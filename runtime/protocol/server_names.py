"""Options of a server and an engine under the names that programs for sglang give them. What asks for what is
so anyway is taken; what there is not is refused by name. Knows no option's meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from runtime.protocol.errors import NotSupported

SAME: Final[Mapping[str, str]] = {
    "mem_fraction_static": "memory_fraction",
    "schedule_conservativeness": "conservativeness",
    "stream_output": "incremental_streaming",
    "incremental_streaming_output": "incremental_streaming",
    "random_seed": "seed",
    "enable_mixed_chunk": "mixed_prefill",
}
OPPOSITE: Final[Mapping[str, str]] = {
    "disable_radix_cache": "radix_cache",
    "disable_jump_forward": "jump_forward",
    "disable_regex_jump_forward": "jump_forward",
    "disable_overlap_schedule": "overlap",
}
# name -> the values that are so anyway. A checkpoint's own code is never run, asked for or not.
ANYWAY: Final[Mapping[str, tuple[Any, ...]]] = {
    "tp_size": (1,),
    "tp": (1,),
    "dp_size": (1,),
    "dp": (1,),
    "pp_size": (1,),
    "ep_size": (1,),
    "nnodes": (1,),
    "node_rank": (0,),
    "trust_remote_code": (True, False),
    "disable_cuda_graph": (True, False),
    "skip_server_warmup": (True, False),
    "enable_torch_compile": (False,),
    "skip_tokenizer_init": (False,),
    "tokenizer_mode": ("auto",),
    "load_format": ("auto", "safetensors"),
    "quantization": (None,),
    "kv_cache_dtype": ("auto",),
    "revision": (None,),
}
_WHY: Final[Mapping[str, str]] = {
    "tokenizer_path": "a checkpoint's tokenizer is read from its own folder: put its files there",
    "quantization": "give it a checkpoint in float32 or bfloat16",
    "enable_torch_compile": "leave it out",
    "skip_tokenizer_init": "requests may give input_ids all the same",
}
_ONE: Final = "one model on one device: leave it out"


def own_options(given: Mapping[str, Any], model: Any = None) -> dict[str, Any]:
    """`given` with the runtime's names; names that are in no table stay. `model`: the checkpoint that
    they are for, whose own tokenizer may be named. Raises NotSupported."""
    made: dict[str, Any] = {}
    for name, value in given.items():
        if name in ANYWAY or name == "tokenizer_path":
            if value not in ANYWAY.get(name, (None, model)):
                raise NotSupported(
                    f"the bundled runtime has no {name}={value!r}", where=name, hint=_WHY.get(name, _ONE)
                )
        elif name in OPPOSITE:
            made[OPPOSITE[name]] = not value
        else:
            made[SAME.get(name, name)] = value
    return made


def known(name: str) -> bool:
    """Whether a table here has something to say of the option `name`."""
    return name in SAME or name in OPPOSITE or name in ANYWAY or name == "tokenizer_path"

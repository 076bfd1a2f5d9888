"""Options of a server under the names that programs for sglang give them, as options of the bundled runtime.
What asks for what is so anyway is taken; what the runtime cannot do is refused by name. Knows no server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sglang_dsl.errors import Unsupported

_SAME: Final[Mapping[str, str]] = {
    "mem_fraction_static": "memory_fraction",
    "schedule_conservativeness": "conservativeness",
    "stream_output": "incremental_streaming",
    "incremental_streaming_output": "incremental_streaming",
}
_OPPOSITE: Final[Mapping[str, str]] = {
    "disable_radix_cache": "radix_cache",
    "disable_jump_forward": "jump_forward",
}
# name -> the values that are so anyway. A checkpoint's own code is never run, asked for or not.
_ANYWAY: Final[Mapping[str, tuple[Any, ...]]] = {
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
}


def own_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with the runtime's names; names that are in no table stay. Raises Unsupported."""
    made: dict[str, Any] = {}
    for name, value in given.items():
        if name in _ANYWAY:
            if value not in _ANYWAY[name]:
                raise Unsupported(
                    f"the bundled runtime has no {name}={value!r}: one process, one device",
                    hint=f"leave {name} out",
                )
        elif name in _OPPOSITE:
            made[_OPPOSITE[name]] = not value
        else:
            made[_SAME.get(name, name)] = value
    return made


def own_flags(words: Sequence[str]) -> list[str]:
    """The same for the words of a command line. Raises Unsupported."""
    made: list[str] = []
    at = 0
    while at < len(words):
        flag, equals, value = words[at].partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        at += 1
        if not flag.startswith("--") or not (name in _SAME or name in _OPPOSITE or name in _ANYWAY):
            made.append(words[at - 1])
            continue
        follows = not equals and at < len(words) and not words[at].startswith("--")
        if follows:
            value, at = words[at], at + 1
        told = value if equals or follows else True
        number = int(told) if isinstance(told, str) and told.isdigit() else told
        for own, own_value in own_options({name: number}).items():
            dashed = own.replace("_", "-")
            if isinstance(own_value, bool):
                made.append(f"--{dashed}" if own_value else f"--no-{dashed}")
            else:
                made += [f"--{dashed}", str(own_value)]
    return made

"""Masks by the C library (runtime/kernels/native/token_mask.h): in one call what a TokenTrie or a MergedTrie
computes with numpy if there is no library.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.grammar.automata.dfa import ByteDfa
from runtime.kernels.native.compiled import load, paths

log = logging.getLogger(__name__)


class _Struct(ctypes.Structure):
    """A struct of the source, with the arrays it points to and its address."""

    def __init__(self, arrays: dict[str, npt.NDArray[Any]], **numbers: int) -> None:
        self.arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        pointers = {name: array.ctypes.data for name, array in self.arrays.items()}
        super().__init__(**pointers, **numbers)
        self.address = ctypes.addressof(self)


class TokenTree(_Struct):
    """The source's struct of that name. `levels`: nodes below each other, at most."""

    _fields_ = (
        *((name, c_int64) for name in ("nodes", "levels", "roots", "words", "twins")),
        *((name, c_void_p) for name in ("byte", "child_start", "child_count", "token", "twin", "node_of")),
    )


class ByteTable(_Struct):
    """The source's struct of that name."""

    _fields_ = (
        *((name, c_int64) for name in ("states", "nodes", "width")),
        *((name, c_void_p) for name in ("delta", "utf8", "open", "pattern")),
    )


@functools.cache
def library() -> Any:
    """The library's token_mask(), or None. The same for the whole process."""
    for path in paths():
        try:
            # A call is shorter than a wait for the interpreter, so it keeps the lock.
            call = load(path, ctypes.PyDLL).token_mask
        except (OSError, AttributeError) as error:
            log.warning("%s is not used: %s", path, error)
            continue
        call.restype, call.argtypes = ctypes.c_int, (c_void_p, c_void_p, c_void_p, c_int64, c_void_p)
        return call
    return None


class NativeWalk:
    """Walks of one automaton. Thread-safe."""

    def __init__(self, call: Any, dfa: ByteDfa) -> None:
        """`call`: see library()."""
        self._call = call
        arrays = {
            "delta": dfa.delta.astype(np.int32, copy=False),
            "utf8": dfa.utf8.astype(np.int32, copy=False),
            "open": dfa.open_nodes,
            "pattern": dfa.pattern_of.astype(np.int64, copy=False),
        }
        self._table = ByteTable(arrays, states=len(dfa.delta), nodes=dfa.nodes, width=dfa.delta.shape[1])

    def mask(self, tree: TokenTree, chain: Sequence[int]) -> npt.NDArray[np.uint32]:
        """The ids whose bytes are allowed from chain[0], as words; a new array. `chain`: of a MergedTrie as
        its reach() takes it, of a TokenTrie one state."""
        bits = np.zeros(tree.words, dtype=np.uint32)
        states = (c_int64 * len(chain))(*chain)
        if not self._call(tree.address, self._table.address, states, len(chain), bits.ctypes.data):
            raise MemoryError(f"a walk of {tree.nodes} nodes")
        return bits

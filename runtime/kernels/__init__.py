"""Triton kernels, one a file, each beside its plain twin in torch: `plain_*` takes the same arguments and
gives the same numbers, and the tests hold one against the other.

Whoever uses a kernel asks `runtime.kernels.device.compiled` first: Triton comes with torch's CUDA builds
only, so nothing here is imported for a CPU. Without a GPU the kernels run in Triton's interpreter
(TRITON_INTERPRET=1, set before they are imported): slow, for tests.

`native` has kernels in C, for CPUs.
"""

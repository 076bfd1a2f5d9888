"""Triton kernels. Each has a reference in torch beside it: `plain_*` takes the same arguments
and returns the same numbers. The tests compare the two.

Callers check `runtime.kernels.device.compiled` first. Triton comes with torch's CUDA builds only, so nothing
here is imported on a CPU. Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1, set
before they are imported), which is slow and meant for tests.

`native` has kernels in C, for CPUs.
"""

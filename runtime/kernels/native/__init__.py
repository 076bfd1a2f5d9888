"""Kernels for CPUs, in C: the source, what compiles and loads it (library), and what calls it (layers;
attention's is runtime.attention.native_views). Where there is no compiler, torch computes."""

"""Kernels for CPUs, in C: the source, what compiles it (compiled), what loads it for the compute plane
(library), and what calls it there (products, layers; attention's is runtime.attention.native_views). Where
there is no compiler, torch computes. runtime.grammar.masks.native_walk calls the source's token_mask(),
without torch.
"""

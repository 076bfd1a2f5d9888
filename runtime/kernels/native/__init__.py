"""CPU kernels in C: the source, its compilation (compiled), loading it for the compute plane (library), and
its callers there (layers; also runtime.layers.dense and runtime.attention.native_views). Without a compiler
torch computes. runtime.grammar.masks.native_walk calls the source's token_mask(), without torch."""

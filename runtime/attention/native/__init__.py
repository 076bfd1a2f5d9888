"""Attention in C: the source, what compiles and calls it (library), and the implementation (views)."""

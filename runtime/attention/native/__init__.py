"""Attention of few queries in C: the source, what compiles and calls it (library), and the implementation
that uses it where it is faster than torch's products (views)."""

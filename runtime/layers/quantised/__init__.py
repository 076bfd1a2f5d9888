"""Matrices in codes of few bits: what they lie in (codes), what is computed with them (linear), and in which
formats checkpoints hold them (formats).

Weights alone are quantised: activations stay as they are, also where a checkpoint says how to round them. A
product is therefore that of the numbers which the codes stand for, up to the rounding of the type it is
computed in.
"""

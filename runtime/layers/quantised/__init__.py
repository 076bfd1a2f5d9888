"""Quantised matrices: their storage (codes), products with them (linear), and the formats of checkpoints
(formats).

Only weights are quantised: activations keep their dtype, even if a checkpoint says how to round them. So a
product is that of the dequantised numbers, up to the rounding of the dtype it is computed in.
"""

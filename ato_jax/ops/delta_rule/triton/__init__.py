"""The delta rule by Pallas kernels lowered to Triton: one token, in `decode`.

Whole sequences have no Triton kernels: they run by Mosaic GPU or XLA.
"""

"""Scans and reductions between a backend's large kernels: over steps, chunks and pieces.

Each is one pass over small arrays by a kernel that Pallas lowers to Triton, or by XLA where JAX
cannot lower to Triton. Hopper's Mosaic kernels read and write what these passes make and take:

    borders         the borders of causal segments, in each chunk and in each piece
    gates           prefix sums of the decays, within each chunk and over each piece
    edges           the states ahead of each piece, or behind it, from the pieces' own sums
    totals          the sum of all pieces' states
    flows           the gradient of a decay per head or per step
    channel_flows   the gradient of a decay per step and channel
    returned        what the cotangent of a returned state adds to the gradients under a decay

`returned` is a pass over k, v and their gradients, which Triton's kernels have, too.

`chunks.py` says how they cut a sequence, and `flow_places.py`, `flows_by_xla.py` and `restarts.py`
are parts of `flows`. Nothing here imports a backend.
"""

"""The kit that all kernels lowered to Triton are made of, whatever the op.

    tiles        tiles of rows and columns: their masks, loads and stores
    work         how an axis is cut into pieces, or dealt out in blocks, to programs
    arithmetic   exp2 by the bare instruction, and roundings to what tensor cores multiply
    launch       a kernel over a grid of pieces, heads and batch entries

Nothing here knows an op. A kernel takes Pallas's own part for Triton from `ato_jax.launch`.
"""

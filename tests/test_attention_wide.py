"""The kernels for wide heads: interpreted, against the reference."""

import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from tests import numerics

# Several blocks of columns of queries whatever the width, and several tiles of queries from 17 on.
SMALL_TILES = {"block_q": 16, "block_d": 64, "block_v": 128}
BACKWARD_TILES = {f"backward_{name}": size for name, size in SMALL_TILES.items()}


def draw(dtype="float32", B=1, T=16, S=16, H=1, G=1, D=320, V=320, layout="bthd", scale=1.0):
    generator = np.random.default_rng(0)

    def array(length, heads, width):
        shape = (B, length, heads, width) if layout == "bthd" else (B, heads, length, width)
        return jnp.asarray(scale * generator.normal(size=shape), dtype)

    return array(T, H, D), array(S, G, D), array(S, G, V)


def check(sizes, slices=1, **options):
    layout = {"layout": sizes["layout"]} if "layout" in sizes else {}
    wanted = numerics.oracle("attention", *draw(**sizes), **options, **layout)
    with ato_jax.interpret():
        result = numerics.run_backends(
            "triton.wide",
            "triton.wide",
            wanted,
            forward_config={**SMALL_TILES, "slices": slices},
            backward_config={**BACKWARD_TILES, "backward_slices": slices},
        )
    numerics.compare(result, wanted)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("slices", [1, 3])
def test_numerics_by_dtype(dtype, slices):
    check(dict(dtype=dtype, T=16, S=13, H=2, G=2, D=320, V=576), slices, causal=True)


@pytest.mark.parametrize(
    "sizes, options",
    [
        (dict(D=576, V=512), {}),
        (dict(D=1000, V=1536, T=5, S=9), dict(return_lse=True)),
        (dict(D=7, V=300, T=1, S=17), dict(causal=True, return_lse=True)),
        (dict(T=17, S=33, B=2), dict(causal=True, return_lse=True)),
        (dict(T=33, S=17, H=4, G=2, layout="bhtd", B=2), dict(causal=True, return_lse=True)),
        (dict(T=9, S=20, H=3), dict(window=(5, 2), softcap=1.5, return_lse=True)),
        (dict(T=20, S=40), dict(window=(9, None), causal=True, query_offset=3)),
        (dict(T=16, S=20), dict(query_offset=-9, causal=True, scale=-0.05)),
        (dict(T=16, S=16), dict(precision="tf32")),
    ],
    ids=str,
)
@pytest.mark.parametrize("slices", [1, 2])
def test_numerics_by_feature(sizes, options, slices):
    check(sizes, slices, **options)

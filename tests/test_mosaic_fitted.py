"""Calls that Mosaic GPU's kernels take with other sizes, heads or rows (`fits.py`): their steps
beside another backend, and the kernels, interpreted, beside the float64 reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax.device import describe
from ato_jax.ops.linear_attention import mosaic_gpu, xla
from ato_jax.ops.linear_attention.mosaic_gpu import narrow, support
from ato_jax.ops.linear_attention.spec import Inputs, LinearState, Outputs
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401

OP = "linear_attention"


def draw(shape: dict[str, int], layout: str = "bthd", dtype: str = "bfloat16") -> list[jax.Array]:
    """q, k and v of B, T, H, G, D, V."""
    generator = np.random.default_rng(sum(shape.values()))
    B, T, H, G, D, V = (shape[name] for name in "BTHGDV")
    found = []
    for length, heads, width in ((T, H, D), (shape.get("S", T), G, D), (shape.get("S", T), G, V)):
        x = jnp.asarray(generator.normal(size=(B, length, heads, width)), dtype)
        found.append(x if layout == "bthd" else jnp.swapaxes(x, 1, 2))
    return found


def sizes(text: str) -> dict[str, int]:
    """Of "B1 T2": {"B": 1, "T": 2}; V is D and G is H where they are left out."""
    found = {word[0]: int(word[1:]) for word in text.split()}
    return {"G": found["H"], "V": found["D"]} | found


def options_of(shape: dict[str, int], layout: str, words: str) -> dict[str, Any]:
    """Options by name: causal, head, step, channel, state, returned, lengths, a feature map."""
    generator = np.random.default_rng(7)
    B, T, G, D, V = (shape[name] for name in "BTGDV")
    found: dict[str, Any] = {"layout": layout}
    for word in words.split():
        if word == "causal":
            found["causal"] = True
        elif word == "head":
            found["decay"] = -jnp.asarray(generator.uniform(0, 0.3, G), jnp.float32)
        elif word in ("step", "channel"):
            width = (D,) if word == "channel" else ()
            decay = -jnp.asarray(generator.uniform(0, 0.3, (B, T, G, *width)), jnp.float32)
            found["decay"] = decay if layout == "bthd" else jnp.swapaxes(decay, 1, 2)
        elif word == "state":
            kv = jnp.asarray(generator.normal(size=(B, G, D, V)), jnp.float32)
            found["initial_state"] = LinearState(kv, 1 + jnp.abs(kv[..., 0]))
        elif word == "returned":
            found["return_state"] = True
        elif word == "segments":
            found["segment_ids"] = jnp.asarray(np.sort(generator.integers(0, 5, (B, T)), axis=1))
        elif word == "lengths":
            lengths = jnp.asarray(generator.integers(1, T + 1, B), jnp.int32)
            found |= {"q_lengths": lengths, "kv_lengths": lengths}
        else:
            found["feature_map"] = word
    return found


STEPS = [
    # sizes, layout, options, the steps of the backward pass
    ("B2 T70 H2 D40", "bthd", "causal", ""),
    ("B2 T70 H2 D36", "bthd", "causal", "Padded"),
    ("B2 T70 H2 D36 V20", "bhtd", "causal step state returned", "Padded"),
    ("B2 T70 H1 D40", "bthd", "causal head state", "Folded"),
    ("B3 T70 H1 D40", "bthd", "causal step state returned silu", "Folded Padded"),
    ("B3 T70 H1 D40", "bhtd", "causal", "Folded Padded"),
    ("B1 T70 H3 D64", "bthd", "causal lengths state relu", "Padded"),
    ("B1 T70 H9 G3 D64", "bthd", "causal step state returned", "Padded"),
    ("B1 T70 H12 G3 D64", "bhtd", "causal head", "Expanded"),
    ("B1 T70 H7 G1 D40", "bthd", "causal step state returned", "Expanded Padded"),
    ("B1 T70 H2 D84", "bthd", "causal exp", "Padded"),
    ("B1 T70 H2 D84 V92", "bthd", "causal lengths softplus", "Padded"),
    ("B1 T70 H2 D88 V96", "bthd", "causal lengths softplus", ""),
    ("B1 T70 H2 D68", "bthd", "causal identity", "Padded"),
    ("B1 T70 H2 D68", "bthd", "segments", "Padded"),
    ("B2 T69 H2 D160", "bthd", "causal state returned", "Padded"),
    ("B2 T72 H2 D160", "bthd", "causal lengths state returned relu2", "Counted Padded"),
    ("B2 T72 H2 D160", "bthd", "causal lengths state relu2", "Counted"),
    ("B2 T70 H2 D192", "bthd", "lengths exp", ""),
    ("B2 T70 S90 H4 G2 D156", "bhtd", "state returned", "Padded"),
    ("B2 T70 H3 D48", "bthd", "causal channel state returned", "Padded"),
    ("B2 T75 H4 D40", "bhtd", "causal channel lengths", "Counted Padded"),
    ("B2 T75 H4 D36", "bthd", "channel lengths state returned", "Counted Padded"),
    (
        "B1 T75 H4 G2 D64",
        "bhtd",
        "causal channel lengths segments returned",
        "Expanded Counted Padded",
    ),
    ("B1 T70 H2 D68", "bthd", "step", "Padded"),
    ("B2 T32 S48 H2 D128", "bthd", "", "Padded"),
    ("B1 T128 H4 G2 D160", "bthd", "causal", "Expanded"),
    ("B2 T69 H2 D160", "bhtd", "causal segments step state returned", "Padded"),
    ("B2 T75 H2 D160", "bthd", "segments lengths", "Counted"),
    ("B1 T75 H4 G2 D156", "bhtd", "segments", "Expanded Padded"),
    ("B2 T40 H2 D160", "bthd", "causal step segments", "Padded"),
]


@pytest.mark.parametrize("shape, layout, words, names", STEPS)
def test_steps(shape: str, layout: str, words: str, names: str) -> None:
    """The fitted call by XLA gives the outputs and gradients of the call as it is."""
    of = sizes(shape)
    wanted = numerics.oracle(OP, *draw(of, layout), **options_of(of, layout, words))
    spec, inputs = wanted.request.spec, wanted.request.inputs
    fit = support.fit_of(spec, "backward")
    assert names == ("" if fit is None else " ".join(type(step).__name__ for step in fit.steps))
    assert mosaic_gpu.unsupported(spec, "backward") is None
    if fit is None:
        return
    config = xla.default_config(fit.spec, describe(jax.devices()[0]))

    def run(spec: Any, *, residuals: Any, cotangents: Outputs) -> Inputs:
        assert spec == fit.spec
        # What the forward pass kept is there, its outputs too, unless a state needs more rows.
        stateful = dataclasses.replace(wanted.request.spec, return_state=True)
        same = mosaic_gpu.unsupported(stateful, "backward") is not None
        same |= fit == support.fit_of(stateful, "backward")
        assert same or "lengths" in words
        outputs = inner if same else found_inside
        both = (jax.tree.map(np.asarray, x) for x in (outputs, residuals.outputs))
        np.testing.assert_equal(*both)
        assert type(residuals.outputs) is type(outputs)
        residuals = residuals._replace(outputs=residuals.outputs.plain())
        return xla.backward(spec, config, residuals, cotangents)

    found_inside = xla.forward(fit.spec, config, fit.inputs(inputs))
    inner = narrow.Kept(*found_inside, found_inside.state)
    outputs = fit.outputs(found_inside)
    residuals = mosaic_gpu.Residuals(inputs, fit.kept(inner))
    gradients = mosaic_gpu._fitted(run, spec, residuals, wanted.outputs_cotangents)
    found = numerics.users_outputs(OP, wanted.request, outputs)
    for name, gradient in numerics.users_gradients(wanted.arrays, gradients).items():
        found[name] = gradient.astype(wanted.result_dtype(name))
    numerics.compare(found, wanted)


@pytest.mark.parametrize(
    "shape, words",
    [
        ("B2 T70 H2 D36", "causal"),  # of a map of the caller's own, what its feature is 0 of
        ("B2 T70 S60 H2 D40", "causal"),
        ("B2 T32 S48 H2 D128", "causal"),
        ("B1 T70 H2 D160", "causal head returned"),
        ("B1 T20 H2 D160", ""),
        ("B1 T70 H2 D300", ""),
        ("B1 T70 H2 D32", ""),
    ],
)
def test_calls_that_no_step_makes_fit(shape: str, words: str) -> None:
    of = sizes(shape)
    options = options_of(of, "bthd", words)
    if "D36" in shape:
        options["feature_map"] = lambda x: jnp.exp(-x)
    request, _ = numerics.prepare(OP, *draw(of), **options)
    assert support.fit_of(request.spec, "backward") is None
    assert mosaic_gpu.unsupported(request.spec, "backward") is not None


INTERPRETED = [
    ("B2 T70 H2 D36 V20", "bhtd", "causal step state returned"),
    ("B3 T70 H1 D40", "bthd", "causal head silu"),
    ("B1 T70 H9 G3 D64", "bthd", "causal"),
    ("B2 T70 H2 D88", "bthd", "causal exp lengths"),
    ("B1 T75 H2 D156", "bthd", "causal returned"),
    ("B2 T70 H2 D200", "bhtd", "lengths"),
    ("B1 T71 H3 D40", "bthd", "causal channel state returned"),
    ("B1 T70 H2 G1 D40", "bhtd", "causal channel segments"),
]


@newest
@pytest.mark.parametrize("shape, layout, words", INTERPRETED)
def test_kernels(shape: str, layout: str, words: str) -> None:
    of = sizes(shape)
    wanted = numerics.oracle(OP, *draw(of, layout), **options_of(of, layout, words))
    with ato_jax.interpret():
        found = numerics.run(
            OP,
            "mosaic_gpu",
            *(wanted.arrays[name] for name in "qkv"),
            cotangents=wanted.cotangents,
            **options_of(of, layout, words),
        )
    numerics.compare(found, wanted)

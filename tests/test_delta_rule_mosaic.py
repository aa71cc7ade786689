"""The delta rule by Mosaic GPU: interpreted beside the float64 reference, compiled for a Hopper
card without one, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import device
from ato_jax.backend import Residuals
from ato_jax.mosaic import program
from ato_jax.ops.delta_rule import mosaic_gpu
from ato_jax.ops.delta_rule.mosaic_gpu import channel, frame, gradients, solve, steps
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec, Inputs, Outputs
from tests import aot_delta_rule, numerics
from tests.aot_mosaic import Compiled, requires_plugin
from tests.interpreted import newest, no_races  # noqa: F401


@pytest.fixture(autouse=True)
def _a_clock_for_each_copy(no_races: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The search for races has five clocks for all copies of TMA, unless it is told. Two copies on
    one clock seem to be in order, and a slot that is handed on too early goes unseen."""
    if program.interpreter is not None:
        clocked = functools.partial(program.interpreter, num_tma_threads_per_device=4001)
        monkeypatch.setattr(program, "interpreter", clocked)


H200 = device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0])


def draw(
    T: int,
    D: int,
    V: int,
    H: int = 1,
    G: int = 1,
    layout: str = "bthd",
    alike: bool = False,
    others: bool = False,
    signs: bool = False,
    near: bool = False,
    channel: bool = False,
    weak: bool = False,
    strong: bool = False,
    by_turns: bool = False,
    lengths: str | None = None,
) -> tuple[list[jax.Array], dict[str, Any]]:
    """[q, k, v] with keys of length 1, beta between 0 and 2, decays from 0 down to -50 side by
    side, and an initial state. `alike`: all keys the same, whose triangle is the furthest from the
    identity. `others`: but the second key of each chunk, by 2%, so no chunk has one key. `signs`:
    each key has a random sign. `near`: keys near one another. `channel`: the decays are those of
    each channel of the key. `weak`: decays from 0 down to -0.01, and a state that is nearly 0;
    beside equal keys dq is then a small sum of large terms, and so is ddecay. `strong`: decays from
    0 down to -50, after which few steps still see each other; what a pair of others leaves in the
    decays' gradients is then beside small ones. `by_turns`: keys are the same in the chunks of an
    odd number alone. `lengths`: keys are multiplied by powers of 2, which bfloat16 does not round,
    and betas are 1 over the squares of these. "random": of 1/8 to 8. "rising": of 1 to 128 along
    each chunk."""
    generator = np.random.default_rng(0)
    q, k = generator.normal(size=(2, 1, T, G, D))
    if alike:
        second = (np.arange(T) % 64 == 1)[:, None, None]
        k = k[:, :1] + np.where(second & others, 0.02 * k, 0.0)
    k = k * generator.choice([-1, 1], size=(1, T, G, 1)) if signs else k
    k = k[:, :1] + 0.1 * k if near else k
    if by_turns:
        k = np.where((np.arange(T) // 64 % 2 == 1)[:, None, None], k[:, :1], k)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    v = generator.normal(size=(1, T, H, V))
    beta = generator.uniform(0, 2, size=(1, T, H))
    of_steps = (1, T, H, D) if channel else (1, T, H)
    if lengths is not None:
        exponents = np.random.default_rng(1).integers(-3, 4, size=(1, T, 1))
        exponents = np.arange(T)[:, None] % 64 // 8 if lengths == "rising" else exponents
        k, beta = k * np.exp2(exponents)[..., None], np.exp2(-2.0 * exponents) + 0 * beta
    decay = generator.choice([0, -1e-3, -1, -50], p=[0.5, 0.3, 0.1, 0.1], size=of_steps)
    state = generator.normal(size=(1, H, D, V))
    if weak:
        decay, state = -generator.uniform(0, 1e-2, size=of_steps), 1e-2 * state
    if strong:
        decay = -generator.uniform(0, 50, size=of_steps)
    rows = [np.swapaxes(one, 1, 2) if layout == "bhtd" else one for one in (q, k, v, beta, decay)]
    *qkv, beta, decay = rows
    numbers = {"beta": beta, "decay": decay, "initial_state": state}
    options = {name: jnp.asarray(one, jnp.float32) for name, one in numbers.items()}
    return [jnp.asarray(one, jnp.bfloat16) for one in qkv], {"layout": layout, **options}


def compare(
    arrays: list[jax.Array], config: dict[str, int], size: float | None = None, **options: Any
) -> None:
    """`size`: by how much cotangents are multiplied."""
    if size is not None:
        request, _ = numerics.prepare("gated_delta_rule", *arrays, return_state=True, **options)
        drawn = numerics.draw_cotangents("gated_delta_rule", request)
        options["cotangents"] = jax.tree.map(lambda one: one * jnp.asarray(size, one.dtype), drawn)
    wanted = numerics.oracle("gated_delta_rule", *arrays, return_state=True, **options)
    spec = wanted.request.spec
    assert mosaic_gpu.unsupported(spec, "forward") is None
    config_of = dataclasses.replace(mosaic_gpu.default_config(spec, H200), **config)

    def both(inputs: Inputs, cotangents: Outputs) -> tuple[Outputs, Inputs]:
        # Without a decay behind a forward pass that keeps nothing.
        keep: Any = mosaic_gpu.forward_for_own_backward if spec.decay else mosaic_gpu.forward
        kept = keep(spec, config_of, inputs)
        residuals: Residuals[Inputs, Any] = Residuals(inputs, kept)
        return kept.plain(), mosaic_gpu.backward(spec, config_of, residuals, cotangents)

    with ato_jax.interpret():
        outputs, gradients = jax.jit(both)(wanted.request.inputs, wanted.outputs_cotangents)
    found = numerics.users_outputs("gated_delta_rule", wanted.request, outputs)
    found |= numerics.users_gradients(wanted.arrays, gradients)
    numerics.compare(found, wanted)


def runs(T: int, *starts: int) -> np.ndarray:
    """[1, T]: segments that start at these steps; every second one has the same number."""
    return np.searchsorted(starts, np.arange(T), side="right")[None] % 2


@newest
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        # A segment of one step, one that starts with a chunk, and a chunk that sees none start.
        (dict(T=200, D=64, V=64), dict(segment_ids=runs(200, 5, 6, 64, 70))),
        (dict(T=75, D=128, V=64, H=2, layout="bhtd"), dict(segment_ids=runs(75, 30), decay=None)),
        (
            dict(T=140, D=64, V=64, alike=True),
            dict(segment_ids=runs(140, 20, 100), decay=np.full((1, 140, 1), -0.1)),
        ),
        (
            dict(T=140, D=64, V=64, H=2, channel=True, weak=True),
            dict(segment_ids=runs(140, 20, 63, 100), normalize_qk=True),
        ),
        # Whole chunks of padding, a part of one, nothing but padding.
        (dict(T=200, D=64, V=64), dict(lengths=[71])),
        (dict(T=75, D=64, V=64, channel=True, layout="bhtd"), dict(lengths=[37])),
        (dict(T=75, D=64, V=64), dict(lengths=[0], decay=None, normalize_qk=True)),
        (dict(T=140, D=64, V=64), dict(lengths=[99], segment_ids=runs(140, 70, 110))),
        # Columns that fill a block of 64 in part.
        (dict(T=75, D=48, V=40, H=2), {}),
        (dict(T=75, D=80, V=72, channel=True, layout="bhtd"), dict(normalize_qk=True)),
        (dict(T=40, D=1, V=3), dict(decay=None, initial_state=None)),
    ],
)
def test_calls_made_to_fit(sizes: Any, options: Any) -> None:
    """Segments, lengths and columns of any number. Padding holds NaN, of the cotangents, too."""
    arrays, given = draw(**sizes)
    for name in ("decay", "initial_state", "segment_ids", "lengths"):
        if options.get(name) is not None:
            options = options | {name: jnp.asarray(options[name])}
    given |= options
    if "lengths" in options:
        beyond = np.arange(sizes["T"]) >= options["lengths"][0]

        def with_nans(array: jax.Array) -> jax.Array:
            axis = given["layout"].index("t")
            rows = beyond.reshape([-1 if at == axis else 1 for at in range(array.ndim)])
            return jnp.where(rows, jnp.asarray(jnp.nan, array.dtype), array)

        arrays = [with_nans(array) for array in arrays]
        timed = [name for name in ("beta", "decay") if given[name] is not None]
        given |= {name: with_nans(given[name]) for name in timed}
    compare(arrays, {}, **given)


@newest
@pytest.mark.parametrize("channel", [False, True])
def test_calls_made_to_fit_without_promotion_of_ranks(channel: bool) -> None:
    """JAX traces the forward pass that keeps arrays for the backward one with the caller's setting,
    which forbids it."""
    (q, k, v), options = draw(T=75, D=40, V=72, H=2, channel=channel)
    options |= dict(lengths=jnp.array([37]), segment_ids=jnp.asarray(runs(75, 30)))

    def call(v: jax.Array) -> jax.Array:
        return ato_jax.gated_delta_rule(q, k, v, implementation="mosaic_gpu", **options)

    def both(v: jax.Array) -> Any:
        out, pull = jax.vjp(call, v)
        return pull(out)

    with ato_jax.interpret(), jax.numpy_rank_promotion("raise"):
        jax.eval_shape(both, v)


BETAS = np.arange(9).reshape(1, 9, 1) % 3
SMALL = -np.random.default_rng(1).uniform(0, 0.1, (1, 128, 4))
# The decay of which 32 steps lose as much as one level of pairs may have.
LIMIT = -channel.MOST_LOST / 32 / frame.LOG2_E


@newest
@pytest.mark.parametrize(
    "sizes, config, options",
    [
        # Rows that are no multiple of 8, two blocks of keys' columns, heads that share keys.
        (dict(T=75, D=128, V=64, H=2), {}, dict(normalize_qk=True)),
        # Two warpgroups with a part of v each; a block solves several chunks.
        (dict(T=200, D=64, V=128, layout="bhtd"), dict(slices=2, solve_blocks=1), {}),
        # dq is a small sum of large terms, for which u and F are in two parts.
        (dict(T=75, D=64, V=64, alike=True), {}, dict(decay=None, scale=0.3, initial_state=None)),
        # ddecay is a small sum of large terms, for which u is in two parts beside dS', too.
        (dict(T=128, D=64, V=64, near=True, weak=True), {}, {}),
        # So is it beside small decays where nearly all keys are the same, for which dr is in two
        # parts; by two warpgroups, which store its second part over what they have read.
        (
            dict(T=128, D=64, V=64, H=4, alike=True, others=True),
            {},
            dict(decay=SMALL, initial_state=None),
        ),
        (
            dict(T=128, D=64, V=128, alike=True, others=True),
            dict(slices=2),
            dict(decay=SMALL[..., :1], initial_state=None),
        ),
        # What rounding takes from states is far more than ddecay where no step decays.
        (
            dict(T=200, D=64, V=64, alike=True, others=True),
            {},
            dict(decay=np.zeros((1, 200, 1)), initial_state=None),
        ),
        (dict(T=256, D=64, V=128, alike=True, weak=True), dict(slices=2), {}),
        # The corrections of every block of v's columns are added.
        (
            dict(T=200, D=64, V=128, alike=True, others=True),
            {},
            dict(decay=np.zeros((1, 200, 1)), initial_state=None),
        ),
        # One key and betas of 1, of which ddecay is a thousandth of the terms of its sums: of one
        # chunk, no state enters; with a last chunk of which a part is behind the last step; behind
        # decays, with a last chunk of one step; with two blocks of the key's and of v's columns,
        # and states.
        (
            dict(T=64, D=64, V=64, alike=True),
            {},
            dict(beta=np.ones((1, 64, 1)), decay=np.zeros((1, 64, 1)), initial_state=None),
        ),
        (
            dict(T=150, D=64, V=64, alike=True),
            {},
            dict(beta=np.ones((1, 150, 1)), decay=np.zeros((1, 150, 1)), initial_state=None),
        ),
        (
            dict(T=193, D=64, V=64, alike=True),
            {},
            dict(beta=np.ones((1, 193, 1)), decay=np.full((1, 193, 1), -0.4), initial_state=None),
        ),
        (
            dict(T=150, D=128, V=128, alike=True, layout="bhtd"),
            dict(solve_blocks=1),
            dict(beta=np.full((1, 1, 150), 0.999), normalize_qk=True),
        ),
        # Likewise of one key but for its signs.
        (
            dict(T=64, D=64, V=64, alike=True, signs=True),
            {},
            dict(beta=np.ones((1, 64, 1)), decay=np.zeros((1, 64, 1)), initial_state=None),
        ),
        (
            dict(T=150, D=128, V=128, alike=True, signs=True, layout="bhtd"),
            dict(solve_blocks=1),
            dict(beta=np.ones((1, 1, 150)), decay=np.zeros((1, 1, 150)), initial_state=None),
        ),
        # Likewise of keys that have one direction and different lengths: with two blocks of their
        # columns; divided by their lengths; with lengths that rise along a chunk, behind decays.
        (
            dict(T=64, D=64, V=64, alike=True, signs=True, lengths="random"),
            {},
            dict(decay=np.zeros((1, 64, 1)), initial_state=None),
        ),
        (
            dict(T=150, D=128, V=128, alike=True, layout="bhtd", lengths="random"),
            dict(solve_blocks=1),
            dict(decay=np.full((1, 1, 150), -0.1), initial_state=None),
        ),
        (
            dict(T=75, D=64, V=64, alike=True, signs=True, lengths="random"),
            {},
            dict(
                beta=np.full((1, 75, 1), 0.999),
                decay=np.full((1, 75, 1), -0.1),
                initial_state=None,
                normalize_qk=True,
            ),
        ),
        (
            dict(T=130, D=64, V=64, alike=True, lengths="rising"),
            {},
            dict(decay=np.full((1, 130, 1), -4.0), initial_state=None),
        ),
        # Whole chunks, whose numbers are read and stored in place, of a number of heads that TMA
        # would not take.
        (dict(T=128, D=64, V=64, H=3), {}, {}),
        # Three pieces side by side, the last of them shorter, whose states a small decay leaves.
        (dict(T=300, D=64, V=64), dict(pieces=3), dict(decay=np.full((1, 300, 1), -0.01))),
        # A decay per channel: heads that share keys; two blocks of v's columns, and sums of terms
        # that cancel, for which u is in two parts.
        (dict(T=75, D=128, V=64, H=2, channel=True), {}, dict(normalize_qk=True)),
        (dict(T=75, D=64, V=128, layout="bhtd", alike=True, channel=True, weak=True), {}, {}),
        (dict(T=64, D=128, V=64, channel=True, strong=True), {}, {}),
        # Decays of which one level has all pairs; those that lose nearly as much as it may have,
        # and a chunk of which one channel loses a bit more.
        (
            dict(T=75, D=128, V=64, H=2, layout="bhtd", alike=True, channel=True),
            {},
            dict(decay=-np.random.default_rng(1).uniform(0, 1, (1, 2, 75, 128))),
        ),
        (
            dict(T=100, D=64, V=64, channel=True),
            {},
            dict(
                decay=LIMIT
                * np.where((np.arange(100)[:, None] > 63) & (np.arange(64) == 5), 1.01, 0.99)[
                    None, :, None
                ]
            ),
        ),
        # Shorter than a chunk, whose rows would lie beyond the array; a beta of 0 has a gradient.
        (dict(T=9, D=64, V=64, channel=True), {}, dict(beta=BETAS)),
        (dict(T=9, D=64, V=64), {}, dict(beta=BETAS)),
    ],
)
def test_numbers(sizes: Any, config: Any, options: Any) -> None:
    arrays, more = draw(**sizes)
    for name in ("beta", "decay"):
        if options.get(name) is not None:
            options = options | {name: jnp.asarray(options[name], jnp.float32)}
    compare(arrays, config, **more | options)


@newest
@pytest.mark.parametrize("size", [1e-14, 1e14])
def test_cotangents_of_any_size(size: float) -> None:
    """Beside factors as large and as small as one level may have."""
    arrays, options = draw(T=64, D=64, V=64, channel=True)
    options["decay"] = jnp.full(options["decay"].shape, 0.99 * LIMIT)
    compare(arrays, {}, size, **options)


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_where_one_level_has_all_pairs(layout: str) -> None:
    """A chunk takes one level if neither of its halves loses more than the limit in any channel."""
    arrays, options = draw(T=264, D=64, V=64, H=2, layout=layout, channel=True)
    decay = np.zeros((1, 264, 2, 64))
    decay[:, :128, 0] = LIMIT
    decay[:, 127, 0, 63] = 1.02 * LIMIT
    decay[:, 128, 0, 0] = decay[:, 191, 0, 0] = 32 * LIMIT
    decay[:, 192:194, 1, 5] = 20 * LIMIT
    decay[:, 263, 0, 1] = -1e3
    decay = decay if layout == "bthd" else np.swapaxes(decay, 1, 2)
    options["decay"] = jnp.asarray(decay, jnp.float32)
    request, _ = numerics.prepare("gated_delta_rule", *arrays, **options)
    found = channel.decays_of(request.spec, request.inputs).one_level
    assert np.array_equal(found, [[[1, 0, 1, 1, 0], [1, 1, 1, 0, 1]]])


@newest
@pytest.mark.parametrize(
    "change",
    [
        # The next number of bfloat16: the smallest change that there is.
        lambda k: k.at[0, ::2, 0, 0].multiply(1 + 2**-7),
        # A key of 0, by whose length nothing may be divided.
        lambda k: k.at[0, 5].set(0),
    ],
)
def test_a_chunk_that_is_not_one_key(change: Callable[[jax.Array], jax.Array]) -> None:
    """Some of its keys have another direction, or none."""
    (q, k, v), options = draw(T=64, D=64, V=64, alike=True, lengths="random")
    options |= dict(decay=jnp.full((1, 64, 1), -0.4), initial_state=None)
    compare([q, change(k), v], {}, **options)


@newest
@pytest.mark.parametrize(("T", "states"), [(200, False), (130, True)])
def test_keys_may_change_their_signs(T: int, states: bool) -> None:
    """And their lengths. A step with key c k, value c v and beta / c^2 is the step with k, v and
    beta: bit for bit where all keys have one direction and c is a power of 2 or minus that, since
    no rounding knows c."""
    (q, k, v), options = draw(T=T, D=64, V=64, alike=True)
    options |= dict(decay=jnp.full((1, T, 1), -0.02))
    if not states:
        del options["initial_state"]
    beta = jnp.ones((1, T, 1))
    generator = np.random.default_rng(1)
    c = generator.choice([-1, 1], (1, T, 1, 1)) * np.exp2(generator.integers(-3, 4, (1, T, 1, 1)))
    scaled = k * c.astype(k.dtype), v * c.astype(v.dtype), beta / jnp.square(c)[..., 0]
    of_call = dict(return_state=states)
    wanted = numerics.oracle("gated_delta_rule", q, k, v, **of_call, **options | dict(beta=beta))
    options |= dict(cotangents=wanted.cotangents, return_state=states)

    @jax.jit
    def run(k: jax.Array, v: jax.Array, beta: jax.Array) -> dict[str, Any]:
        return numerics.run("gated_delta_rule", "mosaic_gpu", q, k, v, **options | dict(beta=beta))

    with ato_jax.interpret():
        of_equal, of_scaled = run(k, v, beta), run(*scaled)
    of_scaled |= {name: c * of_scaled[name] for name in ("dk", "dv")}
    of_scaled["dbeta"] = of_scaled["dbeta"] / np.square(c)[..., 0]
    assert of_scaled.keys() == of_equal.keys()
    for name, found in of_scaled.items():
        assert np.array_equal(found, of_equal[name]), name


@newest
@pytest.mark.parametrize(
    "sizes, config, options, chunks, share",
    [
        # All chunks are alike; two blocks of the keys' columns.
        (dict(T=175, D=128, V=64, near=True, weak=True), {}, {}, [(0, 1, 2), (0, 1, 2)], 1 / 32),
        # And of one key but for its signs.
        (
            dict(T=175, D=128, V=64, alike=True, signs=True, weak=True),
            {},
            {},
            [(0, 1, 2), (0, 1, 2)],
            1 / 32,
        ),
        # Every second one; one block has all heads, of two slices of v each.
        (
            dict(T=300, D=64, V=128, H=2, layout="bhtd", by_turns=True, weak=True),
            dict(solve_blocks=1),
            dict(normalize_qk=True),
            [(1, 3), (1, 3)],
            1 / 32,
        ),
        # None, but the first has the caller's state, and the last the caller's cotangent.
        (dict(T=200, D=64, V=64), {}, {}, [(0,), (3,)], 1 / 2),
    ],
)
def test_what_rounding_takes_from_states_is_added(
    sizes: Any,
    config: Any,
    options: Any,
    chunks: Any,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where it is many times as much: a share of S, and of dS', in these chunks."""
    arrays, more = draw(**sizes)
    wanted = numerics.oracle("gated_delta_rule", *arrays, return_state=True, **more | options)
    spec, inputs = wanted.request.spec, wanted.request.inputs
    config_of = dataclasses.replace(mosaic_gpu.default_config(spec, H200), **config)
    walk_backward, corrections = gradients.walk_backward, gradients.corrections

    def off(states: jax.Array, chunks: tuple[int, ...]) -> jax.Array:
        return states.at[:, :, jnp.array(chunks)].multiply(1 + share)

    def walk_with_roundings(*arguments: Any) -> Any:
        found = walk_backward(*arguments)
        return found._replace(dstates=off(found.dstates, chunks[1]))

    def ddecay() -> jax.Array:
        kept = gradients.keep(spec, config_of, inputs)
        residuals: Any = Residuals(inputs, kept._replace(states=off(kept.states, chunks[0])))
        found = mosaic_gpu.backward(spec, config_of, residuals, wanted.outputs_cotangents)
        assert found.decay is not None
        return found.decay

    def error() -> float:
        with ato_jax.interpret():
            # A new function each time: JAX would find the program of an earlier one.
            decay = jax.jit(lambda: ddecay())()
        found = numerics.users_gradients(wanted.arrays, inputs._replace(decay=decay))["ddecay"]
        exact = wanted.exact["ddecay"]
        return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))

    monkeypatch.setattr(gradients, "walk_backward", walk_with_roundings)
    assert error() < 1e-2
    nothing = lambda *given: jnp.zeros_like(corrections(*given))  # noqa: E731
    monkeypatch.setattr(gradients, "corrections", nothing)
    assert error() > 2e-2


@newest
@pytest.mark.parametrize(
    ("sizes", "decay", "wanted"),
    [
        # A last chunk of one step takes it of the one before.
        (dict(T=193, D=64, V=64, alike=True), -16.0, [1, 1, 1, 1]),
        (dict(T=144, D=64, V=64, alike=True), -0.4, [1, 1, 1]),
        (dict(T=144, D=64, V=64, alike=True, lengths="rising"), -4.0, [1, 1, 1]),
        (dict(T=17, D=64, V=64, near=True), -16.0, [1]),
        (dict(T=129, D=64, V=64, by_turns=True), 0.0, [0, 1, 1]),
        (dict(T=200, D=64, V=64, by_turns=True), 0.0, [0, 1, 0, 0]),
        (dict(T=193, D=64, V=64), 0.0, [0, 0, 0, 0]),
        (dict(T=144, D=64, V=64), -0.4, [0, 0, 0]),
    ],
)
def test_like_keys_are_found(sizes: Any, decay: float, wanted: list[int]) -> None:
    """Behind decays of any strength, and in a last chunk that has few pairs."""
    (q, k, v), options = draw(**sizes)
    spec = dataclasses.replace(SPEC, B=1, T=sizes["T"], H=1, D=64, V=64)
    inputs = Inputs(q, k, v, options["beta"], jnp.full_like(options["decay"], decay))
    config, given = mosaic_gpu.default_config(spec, H200), steps.given_of(spec, inputs)
    with ato_jax.interpret():
        solved = jax.jit(lambda: solve.solve_chunks(spec, config, k, given, leaves_alike=True))()
    assert solved.numbers[0, 0, : len(wanted), frame.ALIKE, 0].tolist() == wanted


SPEC = DeltaRuleSpec(B=2, T=300, G=1, H=4, D=128, V=128, dtype="bfloat16", scale=1.0, decay="step")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "takes bfloat16 alone, got float32"),
        ({"dtype": "float16"}, "takes bfloat16 alone, got float16"),
        ({"D": 129}, "needs D to be at most 128, got 129"),
    ],
)
def test_refusals(changes: dict[str, Any], reason: str) -> None:
    for phase in ("forward", "backward"):
        assert mosaic_gpu.unsupported(SPEC, phase) is None
        assert reason in str(mosaic_gpu.unsupported(dataclasses.replace(SPEC, **changes), phase))


def test_slices_fill_the_card() -> None:
    """One slice of v's columns a block, until blocks would have to wait."""
    assert mosaic_gpu.default_config(SPEC, H200).slices == 1
    many = dataclasses.replace(SPEC, H=64)
    assert mosaic_gpu.default_config(many, H200).slices == 2
    assert mosaic_gpu.default_config(dataclasses.replace(many, V=192), H200).slices == 1


def test_pieces_fill_the_card() -> None:
    """As many as run at once; not two, nor short ones."""

    def pieces(**sizes: int) -> int:
        return mosaic_gpu.default_config(dataclasses.replace(SPEC, **sizes), H200).pieces

    long = dict(B=1, T=65536)
    assert [pieces(**long, H=H) for H in (1, 8, 16, 32, 64)] == [16, 8, 4, 1, 1]
    assert pieces(B=1, T=4096, H=1) == 4 and pieces(B=1, T=2048, H=1) == 1


def test_it_is_chosen_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "of_call", lambda _: H200)
    for D, wanted in ((64, "mosaic_gpu"), (96, "mosaic_gpu"), (160, "xla")):
        arrays, options = draw(T=64, D=D, V=64)
        found = ato_jax.explain("gated_delta_rule", *arrays, **options)
        for choice in (found.forward, found.backward):
            assert choice is not None and choice.backend == wanted


# Two warpgroups of the walks, tails that are copied untiled.
COMPILED = aot_delta_rule.Call(T=4091, D=128, H=32, decay=True, states=True, gradients=True)


@requires_plugin
def test_compiled_for_a_card() -> None:
    kernels = aot_delta_rule.compile_call(COMPILED, machine_code=True)
    most = {"solve": 64, "walk": 128, "walk_backward": 64, "corrections": 64, "gradients": 64}
    check_kernels(kernels, most)


@requires_plugin
@pytest.mark.parametrize("gradients", [False, True])
def test_nothing_is_launched_beside_the_kernels(gradients: bool) -> None:
    """beta and decays are read, and their gradients stored, where the caller has them."""
    call = aot_delta_rule.Call(T=4096, D=128, decay=True, gradients=gradients)
    # XLA finds how far `corrections.py` has to walk.
    wanted = {"custom-call": 5, "fusion": 1} if gradients else {"custom-call": 2}
    assert aot_delta_rule.launches_of(call) == wanted


def check_kernels(kernels: list[Compiled], most: dict[str, int]) -> None:
    """`most`: the bytes that each kernel may spill."""
    assert {one.name for one in kernels} == {f"gated_delta_rule_{name}" for name in most}
    assert not any(one.serialized or one.hazards for one in kernels), [*map(str, kernels)]
    for one in kernels:
        assert one.spill_stores <= most[one.name.removeprefix("gated_delta_rule_")], str(one)


@requires_plugin
def test_compiled_for_a_card_with_a_decay_per_channel() -> None:
    call = aot_delta_rule.Call(T=4091, D=128, channel=True, states=True, gradients=True)
    most = {"solve": 660, "walk": 84, "walk_backward": 192, "gradients": 2250}
    most = {f"channel_{name}": spilled for name, spilled in most.items()}
    check_kernels(aot_delta_rule.compile_call(call), most)

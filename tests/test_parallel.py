"""Context parallelism: every result and gradient is that of the whole sequence on one device.

They need several devices, and so a process of their own, in which this file is the program. What
devices exchange is read from the text of the compiled programs.

    ATO_ALL_ROWS=1 python -m pytest tests/test_parallel.py     every gate, layout and layer
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ato_jax
import ato_jax.nn
from ato_jax import dispatch
from ato_jax.parallel import walk
from ato_jax.parallel.devices import MOST_UNROLLED, Devices
from benchmarks import collectives as programs
from benchmarks import scaling
from tests import numerics, simulated

DEVICES = 8
ALL_ROWS = os.environ.get("ATO_ALL_ROWS") == "1"
B, T, H, G, D, V = 2, 32, 4, 2, 8, 6
# Cut like q; all other arrays are the same on every device.
CUT = ("segment_ids", "q_segment_ids", "kv_segment_ids")


def in_a_process(check: str) -> None:
    """Runs one check of this file in a process that has as many devices as the checks need."""
    assert simulated.last_line("tests.test_parallel", check, devices=DEVICES) == f"{check} done"


def mesh_of(**axes: int) -> Any:
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def draw(shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def qkv(layout: str = "bthd", dtype: Any = np.float32, **sizes: int) -> list[Any]:
    known = {"B": B, "T": T, "S": T, "H": H, "G": G, "D": D, "V": V} | sizes
    letters = ("BTHD", "BSGD", "BSGV") if layout == "bthd" else ("BHTD", "BGSD", "BGSV")
    return [
        draw(tuple(known[letter] for letter in axes), seed, dtype)
        for seed, axes in enumerate(letters)
    ]


def runs(*lengths: int) -> Any:
    """Ids of runs of these lengths, of which every third has the first id again."""
    return np.repeat(np.arange(len(lengths)) % 3, lengths)


def check_case(name: str, op: str, arrays: list[Any], **given: Any) -> None:
    """One call on all devices, with its gradients, against the float64 reference.

    `own` in `given` are options of the function of `ato_jax.parallel` alone; "batch" in it cuts the
    batch, too, and "interpret" interprets kernels, on two devices. A zigzag order is applied to
    what is cut, and undone in what comes back.
    """
    own = dict(given.pop("own", {}))
    layout = given.get("layout", "bthd")
    batched = arrays[0].ndim == 4
    axis = layout.index("t") - (not batched)
    interpret = own.pop("interpret", False)
    mesh = mesh_of(time=2 if interpret else DEVICES)
    if own.pop("batch", False):
        mesh = mesh_of(data=2, time=4)
    batch = "data" if "data" in mesh.axis_names else None
    rows = P(*([batch] if batched else []), *([None] * (layout == "bhtd")), "time")
    zigzag = own.get("order") == "zigzag"
    devices = mesh.shape["time"]

    def reordered(array: Any, axis: int, back: bool = False) -> Any:
        if not zigzag:
            return array
        change = ato_jax.parallel.unzigzag if back else ato_jax.parallel.zigzag
        return change(array, devices, axis=axis)

    wanted = numerics.oracle(op, *arrays, **given)
    learned = {part: given.pop(part) for part in numerics.DIFFERENTIABLE if part in given}
    static = {part: value for part, value in given.items() if not isinstance(value, np.ndarray)}
    beside = {part: value for part, value in given.items() if part not in static}

    def spec_of(part: str, value: Any) -> Any:
        if part in CUT:
            return P(*([batch] if batched else []), "time")
        if part == "beta" or part == "decay" and value.ndim > 1:
            return rows
        if part in ("bias", "mask"):
            return P(None, None, "time" if value.shape[2] > 1 else None)
        return P(batch) if part.endswith("lengths") or part == "initial_state" else P()

    function = getattr(ato_jax.parallel, op)
    mine = dict(zip("qkv", arrays, strict=True)) | learned

    def call(mine: Any, beside: Any) -> Any:
        specs = {part: rows if part in "qkv" else spec_of(part, mine[part]) for part in mine}
        beside_specs = {part: spec_of(part, value) for part, value in beside.items()}
        returned: Any = rows
        if static.get("return_lse"):
            returned = (rows, rows)
        if static.get("return_state"):
            returned = (rows, P(batch))
        cut = {
            part: reordered(array, axis) if part in "qkv" else array
            for part, array in mine.items()
        }
        cut_beside = {
            part: reordered(array, int(batched)) if part in CUT else array
            for part, array in beside.items()
        }
        found = jax.shard_map(
            lambda mine, beside: function(
                **mine, **beside, **static, axis_name="time", **own
            ),
            mesh=mesh,
            in_specs=(specs, beside_specs),
            out_specs=returned,
            check_vma=not interpret,  # JAX's interpreter lacks these types
        )(cut, cut_beside)
        if not isinstance(found, tuple):
            return reordered(found, axis, back=True)
        out, other = found
        other = reordered(other, axis, back=True) if static.get("return_lse") else other
        return reordered(out, axis, back=True), other

    @jax.jit
    def both(mine: Any, beside: Any, cotangents: Any) -> Any:
        found, pull = jax.vjp(lambda mine: call(mine, beside), mine)
        return found, pull(cotangents)[0]

    with ato_jax.interpret() if interpret else contextlib.nullcontext():
        result, gradients = both(
            jax.tree.map(jnp.asarray, mine),
            beside,
            jax.tree.map(lambda array: jnp.asarray(np.asarray(array)), wanted.cotangents),
        )
    found = numerics.named_outputs(op, result)
    for part, gradient in gradients.items():
        if part == "initial_state" and op == "gated_delta_rule":
            found["dstate"] = gradient
        elif part == "initial_state":
            found |= {"dstate_kv": gradient[0], "dstate_k_sum": gradient[1]}
        else:
            found[f"d{part}"] = gradient
    print(name, flush=True)
    for measure in numerics.compare(found, wanted).values():
        print("   ", measure, flush=True)


def state(seed: int = 9, **sizes: int) -> ato_jax.LinearState:
    known = {"B": B, "G": G, "F": D, "V": V} | sizes
    kv = draw(tuple(known[letter] for letter in "BGFV"), seed)
    return ato_jax.LinearState(kv, 1 + np.abs(draw(kv.shape[:-1], seed + 1)))


def log_decay(*shape: int) -> Any:
    return -0.3 * np.abs(draw(shape, 7))


# Segments that end within a device's rows and at an edge, that go on over several devices, and ids
# that return: at once on the other side of an edge, and later.
IDS = np.stack([runs(3, 5, 12, 2, 2, 8), runs(4, 4, 1, 1, 1, 21)])


def check_linear() -> None:
    op = "linear_attention"
    padded = qkv()
    for array in padded:
        array[0, 19:] = np.nan
    check_case("both ways, with a state", op, qkv(), initial_state=state(), return_state=True)
    check_case(
        "both ways, segments, lengths, NaN in padding", op, padded, segment_ids=IDS,
        kv_lengths=np.array([19, 32]), initial_state=state(), return_state=True,
    )  # fmt: skip
    check_case(
        "both ways, lengths of their own, T != S", op, qkv(S=48), normalize=False,
        q_lengths=np.array([19, 32]), kv_lengths=np.array([0, 41]), scale=0.7,
    )  # fmt: skip
    check_case("causal, bfloat16", op, qkv(dtype=jnp.bfloat16, D=16, V=16), causal=True)
    phi = ato_jax.favor(jax.random.key(1), 12, D)
    check_case(
        "causal, favor, the batch cut, too", op, qkv(), causal=True, feature_map=phi,
        initial_state=state(F=12), return_state=True, own={"batch": True},
    )  # fmt: skip
    check_case(
        "causal, a decay per head, no batch axis", op, [array[0] for array in qkv()], causal=True,
        decay=-np.array([0.02, 0.4], np.float32), q_lengths=np.array([27]),
        initial_state=ato_jax.LinearState(*(array[0] for array in state())), return_state=True,
    )  # fmt: skip
    check_case(
        "causal, a decay per step, segments, lengths", op, padded, causal=True, segment_ids=IDS,
        decay=log_decay(B, T, G), q_lengths=np.array([19, 32]), initial_state=state(),
        return_state=True,
    )  # fmt: skip
    check_case(
        "causal, a decay per channel, bhtd", op, qkv("bhtd"), causal=True, layout="bhtd",
        decay=log_decay(B, G, T, D), feature_map=jnp.tanh, initial_state=state(),
    )  # fmt: skip
    check_case(
        "a decay per step both ways, segments, lengths", op, padded, segment_ids=IDS,
        decay=log_decay(B, T, G), q_lengths=np.array([19, 32]), initial_state=state(),
        return_state=True,
    )  # fmt: skip
    if ALL_ROWS:
        check_case(
            "a decay per channel both ways, bhtd", op, qkv("bhtd"), layout="bhtd",
            decay=log_decay(B, G, T, D), feature_map="identity", initial_state=state(),
        )  # fmt: skip
        check_case(
            "a decay per head both ways, bfloat16, the batch cut, too", op,
            qkv(dtype=jnp.bfloat16, D=16, V=16), decay=-np.array([0.02, 0.4], np.float32),
            own={"batch": True},
        )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        # As where a backend has no cotangent of a state.
        patch.setattr(walk, "_other", lambda one, other: True)
        check_case(
            "causal, sums by XLA, a decay per step, segments, lengths", op, padded, causal=True,
            segment_ids=IDS, decay=log_decay(B, T, G), q_lengths=np.array([19, 32]),
            initial_state=state(), return_state=True,
        )  # fmt: skip
    check_case("causal, segments", op, qkv(), causal=True, segment_ids=IDS, return_state=True)


def delta(layout: str = "bthd", dtype: Any = np.float32, **sizes: int) -> tuple[list[Any], Any]:
    """q, k, v and beta."""
    known = {"B": B, "T": T, "H": H, "G": G, "D": D, "V": V} | sizes
    letters = ("BTGD", "BTGD", "BTHV", "BTH") if layout == "bthd" else (
        "BGTD", "BGTD", "BHTV", "BHT"
    )  # fmt: skip
    q, k, v, beta = (
        draw(tuple(known[letter] for letter in axes), seed) for seed, axes in enumerate(letters)
    )
    return [array.astype(dtype) for array in (q, k, v)], 1 / (1 + np.exp(beta))


def check_delta_rule() -> None:
    op = "gated_delta_rule"
    arrays, beta = delta()
    for array in arrays:
        array[0, 19:] = np.nan
    started = draw((B, H, D, V), 9)
    check_case(
        "delta, a decay per step, segments, lengths, NaN in padding", op, arrays, beta=beta,
        decay=log_decay(B, T, H), segment_ids=IDS, lengths=np.array([19, 32]),
        initial_state=started, return_state=True, normalize_qk=True,
    )  # fmt: skip
    if ALL_ROWS:
        arrays, beta = delta("bhtd")
        check_case(
            "delta, a decay per channel, bhtd", op, arrays, beta=beta, layout="bhtd", scale=0.7,
            decay=log_decay(B, H, T, D), initial_state=started, normalize_qk=True,
        )  # fmt: skip
        arrays, beta = delta(dtype=jnp.bfloat16, D=16, V=16)
        check_case(
            "delta, bfloat16, no batch axis", op, [array[0] for array in arrays], beta=beta[0],
            normalize_qk=True, lengths=np.array([27]), return_state=True,
        )  # fmt: skip
    function = on_devices(ato_jax.parallel.gated_delta_rule)
    arrays, beta = delta()
    sizes = DEVICES, B, H, D, V
    model = scaling.delta_rule_bytes(*sizes)
    found = collectives(function, *arrays, beta, model=model)
    assert found == {"all-gather": [DEVICES * 4 * B * H * D * (V + D)]}, found
    model = scaling.delta_rule_bytes(*sizes, both=True)
    for size in (T, 4 * T):
        arrays, beta = delta(T=size)
        found = collectives(gradients(function), *arrays, beta, model=model)
        # The states' effects, and the cotangents of the states.
        wanted = [DEVICES * 4 * B * H * D * columns for columns in (V, V + D)]
        assert {kind: sorted(one) for kind, one in found.items()} == {"all-gather": wanted}, found
    arrays, beta = delta()
    lengths = {"lengths": np.array([33, 1])}
    function = ato_jax.parallel.gated_delta_rule
    refused(ValueError, "between 0 and T=32", function, *arrays, beta, **lengths)


def check_attention(schedule: str) -> None:
    """Both orders of a schedule, and every option in one of them."""
    op = "attention"

    def check(name: str, arrays: list[Any], order: str = "contiguous", **given: Any) -> None:
        own = {"schedule": schedule, "order": order, "batch": given.pop("batch", False)}
        check_case(f"{schedule}, {order}: {name}", op, arrays, own=own, **given)

    padded = qkv()
    for array in padded:
        array[0, 19:] = np.nan
    sinks = draw((H,), 5)
    check("both ways", qkv(), return_lse=True)
    if ALL_ROWS:
        check("causal", qkv(), "zigzag", causal=True, return_lse=True)
    check(
        "causal, lengths, sinks, NaN in padding", padded, "zigzag", causal=True,
        q_lengths=np.array([19, 32]), sinks=sinks, return_lse=True,
    )  # fmt: skip
    check(
        "window, softcap, segments, bhtd", qkv("bhtd"), window=(9, 2), softcap=2.0,
        segment_ids=IDS, layout="bhtd", sinks=sinks,
    )  # fmt: skip
    check(
        "lengths and ids of their own, T != S", qkv(S=48), "zigzag", causal=True, scale=0.5,
        q_segment_ids=IDS, kv_segment_ids=np.concatenate([IDS[:, :16], IDS], axis=1),
        q_lengths=np.array([19, 32]), kv_lengths=np.array([30, 41]), batch=True,
    )  # fmt: skip
    check(
        "causal, an offset, bfloat16, no batch axis",
        [array[0] for array in qkv(dtype=jnp.bfloat16, S=48, D=16, V=16)], causal=True,
        query_offset=11,
    )  # fmt: skip
    check(
        "causal, dropout, groups", qkv(), "zigzag", causal=True, dropout_rate=0.3,
        dropout_key=jax.random.key(4), return_lse=True,
    )  # fmt: skip
    if schedule == "all_gather":
        bias, mask = draw((B, 1, T, T), 6), draw((1, H, T, T), 8) > -1
        check("a bias and a mask", qkv(), bias=bias, mask=mask)


def check_all_gather() -> None:
    check_attention("all_gather")


def check_ring() -> None:
    check_attention("ring")
    # Below float32 the backward kernels take lse of all pieces.
    padded = qkv(dtype=jnp.bfloat16, T=64, S=64, D=16, V=16)
    for array in padded:
        array[0, 43:] = np.nan
    own = {"schedule": "ring", "implementation": "triton", "interpret": True}
    with recorded_backward_passes() as told:
        check_case(
            "ring by kernels: causal, lengths, sinks, NaN in padding", "attention", padded, own=own,
            causal=True, q_lengths=np.array([43, 64]), sinks=draw((H,), 5), return_lse=True,
        )  # fmt: skip
    assert told == {True}, told
    with recorded_backward_passes() as told:
        narrow = qkv(dtype=jnp.bfloat16, D=16, V=16)
        check_case("ring by kernels, without lse", "attention", narrow, own=own, causal=True)
    assert told == {False}, told


@contextlib.contextmanager
def recorded_backward_passes() -> Iterator[set[bool]]:
    """Whether each backward pass that is traced takes a cotangent of lse."""
    told: set[bool] = set()
    backward_by = dispatch.backward_by

    def recorded(op: Any, choice: Any, spec: Any, *arrays: Any) -> Any:
        told.add(spec.return_lse)
        return backward_by(op, choice, spec, *arrays)

    with mock.patch.object(dispatch, "backward_by", recorded):
        yield told


def check_zigzag() -> None:
    x = draw((3, 32, 2), 0)
    for axis, devices in ((1, 8), (-2, 4), (1, 1)):
        found = ato_jax.parallel.zigzag(x, devices, axis=axis)
        parts = np.split(np.asarray(found), devices, axis=1)
        chunks = np.split(x, 2 * devices, axis=1)
        for number, part in enumerate(parts):
            wanted = [chunks[number], chunks[2 * devices - 1 - number]]
            np.testing.assert_array_equal(part, np.concatenate(wanted, axis=1))
        back = ato_jax.parallel.unzigzag(found, devices, axis=axis)
        np.testing.assert_array_equal(back, x)
    with pytest.raises(ValueError, match="multiple of 2 . devices rows, 10, along axis 1"):
        ato_jax.parallel.zigzag(x, 5)
    with pytest.raises(ValueError, match="axis must be an axis of x.*got 3"):
        ato_jax.parallel.zigzag(x, 2, axis=3)


def check_zigzag_of_parts() -> None:
    """An array that is cut by time stays so, is gathered nowhere, and may be so explicitly."""
    x = draw((1, 4 * DEVICES, 2), 0)
    for change in (ato_jax.parallel.zigzag, ato_jax.parallel.unzigzag):
        call = functools.partial(change, devices=DEVICES)
        mesh = jax.make_mesh((DEVICES,), ("time",), axis_types=(AxisType.Explicit,))
        placed = jax.device_put(x, NamedSharding(mesh, P(None, "time")))
        compiled = jax.jit(call).lower(placed).compile()
        np.testing.assert_array_equal(compiled(placed), call(x))
        sent = programs.collectives(compiled.as_text())
        assert all(one.result < x.nbytes // 2 for one in sent), sent


def check_layer(make: Any, ids: Any = None, own: Any = None, **options: Any) -> None:
    """A layer whose tokens are cut: its result, and the gradients of parameters and inputs."""
    own = own or {}
    x, options = draw((B, T, 16), 0), {"num_kv_heads": 2, **options}
    zigzag, drops = own.get("context_order") == "zigzag", "dropout_rate" in options
    # Dropout counts batch entries from the first of each device.
    rows = P(None if drops else "data", "time")
    layers = [make(H, 16, rngs=nnx.Rngs(0), **options, **given) for given in (
        {}, {"context_axis": "time", **own}
    )]  # fmt: skip
    parameters = nnx.state(layers[0], nnx.Param)

    def call(layer: Any, parameters: Any, x: Any, ids: Any) -> Any:
        graph, _, others = nnx.split(layer, nnx.Param, ...)
        given = {"rngs": nnx.Rngs(dropout=1)} if drops else {}
        return nnx.merge(graph, parameters, others)(x, segment_ids=ids, **given)

    def on_mesh(layer: Any, parameters: Any, x: Any, ids: Any) -> Any:
        if zigzag:
            x, ids = (ato_jax.parallel.zigzag(array, 4) for array in (x, ids))
        out = jax.shard_map(
            functools.partial(call, layer), mesh=mesh_of(data=2, time=4),
            in_specs=(P(), rows, rows), out_specs=rows,
        )(parameters, x, ids)  # fmt: skip
        return ato_jax.parallel.unzigzag(out, 4) if zigzag else out

    def both(function: Any, layer: Any) -> Any:
        def loss(parameters: Any, x: Any) -> Any:
            out = function(layer, parameters, x, ids)
            return jnp.sum(out**2), out

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(parameters, x)

    print(make.__name__, options, own, flush=True)
    found = map(jax.tree.leaves, map(both, (call, on_mesh), layers))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def gated_delta_net(*sizes: int, num_kv_heads: int, **options: Any) -> ato_jax.nn.GatedDeltaNet:
    return ato_jax.nn.GatedDeltaNet(*sizes, num_key_heads=num_kv_heads, **options)


def check_layers() -> None:
    sizes = (3, 7, 12, 10), (1, 1, 9, 21)
    documents = np.stack([np.repeat(np.arange(4), lengths) for lengths in sizes])
    attention, linear = ato_jax.nn.Attention, ato_jax.nn.LinearAttention
    ring = {"context_schedule": "ring", "context_order": "zigzag"}
    check_layer(attention, documents, ring, causal=True, rope_theta=10.0)
    check_layer(linear, documents, causal=True, rope_theta=10.0)
    check_layer(gated_delta_net, documents)
    if ALL_ROWS:
        check_layer(attention, window=(9, 3), sinks=True, dropout_rate=0.3, deterministic=False)
        check_layer(ato_jax.nn.GatedLinearAttention, causal=False)

    layer, x = attention(H, 16, context_axis="time", rngs=nnx.Rngs(0)), draw((B, T, 16), 0)
    with pytest.raises(ValueError, match=r"context_axis must be an axis of the jax.shard_map"):
        layer(x)
    mask = {"mask": np.ones((T, T), bool)}
    for given, match in ((mask, "mask"), ({"decode": True}, "decode")):
        call = functools.partial(layer, **given)
        cut = P(None, "time")
        with pytest.raises(ValueError, match=f"{match} cannot be given with context_axis"):
            jax.shard_map(call, mesh=mesh_of(time=DEVICES), in_specs=cut, out_specs=cut)(x)
    with pytest.raises(ValueError, match=r"context_axis must be the name of a mesh axis.*\(\)"):
        attention(H, 16, context_axis=(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="context_schedule must be one of 'all_gather'"):
        attention(H, 16, context_schedule="star", rngs=nnx.Rngs(0))


def collectives(
    function: Any, *arguments: Any, model: dict[str, int] | None = None
) -> dict[str, list[int]]:
    """The collectives of the compiled program: for each kind, the bytes of each result.

    `model` is what `benchmarks.scaling` says that a device receives, by kind.
    """
    text = jax.jit(function).lower(*arguments).compile().as_text()
    found: dict[str, list[int]] = {}
    received: dict[str, int] = {}
    for one in programs.collectives(text):
        found.setdefault(one.kind, []).append(one.result)
        received[one.kind] = received.get(one.kind, 0) + one.received * one.times
    assert model is None or received == model, (received, model)
    return found


def on_devices(function: Any, **options: Any) -> Any:
    cut = P(None, "time")
    return jax.shard_map(
        lambda *arrays: function(*arrays, axis_name="time", **options),
        mesh=mesh_of(time=DEVICES),
        in_specs=cut,
        out_specs=cut,
    )


def gradients(function: Any) -> Any:
    return jax.grad(lambda *arrays: jnp.sum(function(*arrays) ** 2), (0, 1, 2))


def check_bytes() -> None:
    """What devices send in linear attention is one state each, whatever T is."""
    numbers = B * G * D * (V + 1)
    for options, more in (
        ({}, 0),
        ({"causal": True}, 0),
        ({"causal": True, "decay": -np.ones(G, np.float32)}, B * G),
    ):
        function = on_devices(ato_jax.parallel.linear_attention, **options)
        for size in (T, 4 * T):
            arrays = qkv(T=size, S=size)
            gathered = DEVICES * 4 * (numbers + more)
            of_states = functools.partial(
                scaling.linear_bytes, DEVICES, B, G, D, V, more // (B * G)
            )
            found = collectives(function, *arrays, model=of_states())
            assert found == {"all-gather": [gathered]}
            # The gradient gathers the states' cotangents.
            found = collectives(gradients(function), *arrays, model=of_states(both=True))
            print(options, size, found, flush=True)
            back = DEVICES * 4 * numbers
            assert {kind: sorted(sizes) for kind, sizes in found.items()} == {
                "all-gather": sorted([gathered, back])
            }


def check_ring_program() -> None:
    """Keys and values travel from device to device, and nobody gathers them."""
    attention = ato_jax.parallel.attention
    for order, change in (("contiguous", lambda function: function), ("zigzag", gradients)):
        function = on_devices(attention, schedule="ring", order=order, causal=True)
        model = scaling.ring_bytes(DEVICES, B, T, G, D, V, 4, change is gradients)
        found = collectives(change(function), *qkv(), model=model)
        print(order, found, flush=True)
        assert set(found) == {"collective-permute"}
    # Of k and of v, the rows of all devices.
    sizes = DEVICES, B, T, G, D, V, 4
    function = on_devices(attention, causal=True)
    gathered = collectives(function, *qkv(), model=scaling.gathered_bytes(*sizes))
    assert sorted(gathered.pop("all-gather")) == [4 * B * T * G * V, 4 * B * T * G * D]
    assert not gathered
    model = scaling.gathered_bytes(*sizes, both=True)
    found = collectives(gradients(function), *qkv(), model=model)
    # The gradients of both, summed: what stays is a device's own rows.
    assert sorted(found["reduce-scatter"]) == [
        4 * B * T // DEVICES * G * V, 4 * B * T // DEVICES * G * D
    ]  # fmt: skip


def refused(error: Any, match: str, function: Any, *arrays: Any, **options: Any) -> None:
    with pytest.raises(error, match=match):
        on_devices(function, **options)(*arrays)


def check_refusals() -> None:
    linear = ato_jax.parallel.linear_attention
    decay = -np.ones(G, np.float32)
    lengths = {"q_lengths": np.array([3, 4]), "kv_lengths": np.array([3, 5])}
    refused(
        ato_jax.UnsupportedError, "a decay needs the same lengths", linear, *qkv(), decay=decay,
        **lengths,
    )  # fmt: skip
    refused(ato_jax.UnsupportedError, "needs T = S, got T=4, S=6", linear, *qkv(S=48), causal=True)
    refused(ato_jax.UnsupportedError, "same lengths", linear, *qkv(), causal=True, **lengths)
    refused(ValueError, "between 0 and T=32", linear, *qkv(), q_lengths=np.array([33, 1]))
    refused(ValueError, r"k must be \[B, S, G, D\]", linear, *qkv()[:1], *qkv(D=7)[1:])
    ids = {"q_segment_ids": IDS[:, :4], "kv_segment_ids": IDS[:, 4:8]}
    refused(ato_jax.UnsupportedError, "give segment_ids", linear, *qkv(), **ids)
    softmax = ato_jax.parallel.attention
    bias = {"bias": draw((T // DEVICES, T), 0), "schedule": "ring"}
    refused(ato_jax.UnsupportedError, "bias needs schedule='all_gather'", softmax, *qkv(), **bias)
    refused(ValueError, "schedule must be one of 'all_gather'", softmax, *qkv(), schedule="star")
    refused(ValueError, "order must be one of 'contiguous'", softmax, *qkv(), order="mixed")
    refused(ValueError, "even T.*got T=3", softmax, *qkv(T=24, S=24), order="zigzag")
    refused(ValueError, "between 0 and S=32", softmax, *qkv(), kv_lengths=np.array([33, 1]))


def check_programs() -> None:
    """In one process, since it takes as long to start as each of these."""
    check_bytes()
    check_ring_program()
    check_zigzag_of_parts()
    check_refusals()


def check_delta_rule_and_layers() -> None:
    check_delta_rule()
    check_layers()


CHECKS = {
    "linear": check_linear,
    "all_gather": check_all_gather,
    "ring": check_ring,
    "delta_rule_and_layers": check_delta_rule_and_layers,
    "programs": check_programs,
}


@pytest.mark.parametrize("check", CHECKS)
def test_in_a_process_with_eight_devices(check: str) -> None:
    in_a_process(check)


@pytest.mark.parametrize("count", [3, MOST_UNROLLED + 1])
def test_the_steps_of_a_few_devices_are_no_loop(count: int) -> None:
    def after_all(states: jax.Array) -> Any:
        devices = Devices("time", count, jnp.int32(0))
        return devices.in_turn(lambda state, own: (2 * state + own, None), states[0], states)

    states = jnp.arange(4.0 * count).reshape(count, 4)
    text = jax.jit(after_all).lower(states).compile().as_text()
    assert (" while(" in text) == (count > MOST_UNROLLED)
    expected = states[0] * 2**count + sum(2 ** (count - 1 - i) * states[i] for i in range(count))
    assert jnp.array_equal(jax.jit(after_all)(states), expected)


def test_zigzag() -> None:
    check_zigzag()


def test_an_axis_that_nothing_binds() -> None:
    with pytest.raises(ValueError, match="axis_name must be an axis of the jax.shard_map.*'time'"):
        ato_jax.parallel.linear_attention(*qkv(), axis_name="time")
    with pytest.raises(ValueError, match="axis_name must be the name of a mesh axis.*None"):
        ato_jax.parallel.linear_attention(*qkv(), axis_name=None)  # type: ignore[arg-type]


if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
    print(f"{sys.argv[1]} done")

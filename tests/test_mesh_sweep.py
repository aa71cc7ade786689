"""Rows of the covering arrays on eight devices: divided by batch and heads, and cut by time.

Every result and gradient is the float64 reference's, to the budgets of `numerics`. They need
several devices, and so a process of their own, in which this file is the program.

    ATO_ALL_ROWS=1 python -m pytest tests/test_mesh_sweep.py     every row that a mode admits
    python -m tests.test_mesh_sweep timed attention 3 40         every 40th row from the third on
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ato_jax
import ato_jax.parallel
from benchmarks.collectives import collectives
from tests import covering, numerics, simulated
from tests.calls import Call

DEVICES = 8
ALL_ROWS = os.environ.get("ATO_ALL_ROWS") == "1"
SPACES = {"attention": covering.ATTENTION, "linear_attention": covering.LINEAR_ATTENTION}

# -- the arrays of a call, and where they lie ----------------------------------------------------

TIMED = {"q": "BTHD", "k": "BSGD", "v": "BSGV", "beta": "BTH", "out": "BTHV", "lse": "BTH"}
LETTERS = {
    **{"sinks": "H", "q_lengths": "B", "kv_lengths": "B", "lengths": "B", "query_offset": "B"},
    **{"segment_ids": "BT", "q_segment_ids": "BT", "kv_segment_ids": "BS"},
}


def letters_of(call: Call, name: str, array: Any) -> str:
    """A letter for each axis of an array as the caller gives it; "." for an axis of size 1."""
    if name == "decay" and array.ndim == 1:
        return "G"
    heads = "H" if call.op == "gated_delta_rule" else "G"
    if name in ("bias", "mask"):
        found = "BHTS"[4 - array.ndim :]
        return "".join(
            letter if size > 1 else "." for letter, size in zip(found, array.shape, strict=True)
        )
    if name == "decay":
        found = {"G": "BSG", "H": "BTH"}[heads] + "D" * (array.ndim + (not call.batched) - 3)
    elif name in TIMED:
        found = TIMED[name]
        if call.op == "gated_delta_rule" and name in "qk":
            found = "BTGD"
        if call.op == "gated_delta_rule" and name == "v":
            found = "BTHV"
    elif name in ("initial_state", "state"):
        # kv [B, G, D, V] and k_sum [B, G, D]
        found = f"B{heads}DV"
    else:
        return LETTERS[name] if call.batched or "lengths" in name else LETTERS[name].lstrip("B")
    if call.layout == "bhtd" and found[1] in "TS":
        found = found[0] + found[2] + found[1] + found[3:]
    return found if call.batched else found[1:]


def mesh_of(sizes: dict[str, int], kind: AxisType) -> Any:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def spec_of(letters: str, axes: dict[str, Any]) -> P:
    return P(*(axes.get(letter) for letter in letters))


def specs_of(call: Call, name: str, tree: Any, axes: dict[str, Any]) -> Any:
    letters = letters_of(call, name, jax.tree.leaves(tree)[0])
    return jax.tree.map(lambda leaf: spec_of(letters[: leaf.ndim], axes), tree)


@dataclasses.dataclass
class Arrays:
    """A call's arrays by name: those with a gradient, the others, and what is no array."""

    learned: dict[str, Any]
    beside: dict[str, Any]
    static: dict[str, Any]
    wanted: numerics.Oracle


def arrays_of(call: Call) -> Arrays:
    arguments, options = call.arguments()
    wanted = numerics.oracle(call.op, *arguments, **options)
    learned = dict(zip("qkv", arguments, strict=True))
    learned |= {name: options.pop(name) for name in numerics.DIFFERENTIABLE if name in options}
    beside = {
        name: options.pop(name)
        for name in list(options)
        if isinstance(options[name], np.ndarray | jax.Array)
    }
    return Arrays(learned, beside, options, wanted)


# -- divided by batch and heads ------------------------------------------------------------------

MESHES = {
    "2 x 4": {"data": 2, "model": 4},
    "4 x 2": {"data": 4, "model": 2},
    "2 x 2, and one axis unused": {"data": 2, "model": 2, "other": 2},
}


@dataclasses.dataclass
class Division:
    """How a row is divided: the mesh, what cuts each letter, and which other arrays are cut."""

    mesh: str
    kind: AxisType
    axes: dict[str, Any]
    placed: bool
    kernels: bool


def divided_call(space: covering.Space, row: covering.Row, draw: random.Random) -> Any:
    """The row's call with sizes that a mesh divides, and the division."""
    call = covering.call_of(space, row, small=True)
    name = draw.choice(list(MESHES))
    mesh = MESHES[name]
    both = draw.random() < 0.15
    axes: dict[str, Any] = {}
    batch, T, S, H, G, D, V = call.sizes
    if call.batched:
        cut = ("data", "model") if both else "data"
        batch = mesh["data"] * (mesh["model"] if both else 1)
        axes["B"] = cut
    if not (call.batched and both) and H > 1:
        model = mesh["model"]
        H = max(4, H) if H > 1 else 1
        G = {4: draw.choice((4, 8)), 2: draw.choice((2, 4)), 1: 1}[G]
        H = max(H, G) if G != 1 else 4
        H = H if draw.random() < 0.7 else 2 * max(H, G)
        axes["H"] = "model"
        axes["G"] = "model" if G % model == 0 else None
    call = dataclasses.replace(call, sizes=(batch, T, S, H, G, D, V))
    kind = draw.choice((AxisType.Auto, AxisType.Explicit))
    # Kernels of several tiles a row are not interpreted: they take long.
    kernels = draw.random() < 0.3 and max(row["widths"]) <= covering.WIDEST_WHOLE_ROW
    return call, Division(name, kind, axes, draw.random() < 0.6, kernels)


def check_divided(space: covering.Space, row: covering.Row, draw: random.Random) -> str:
    """The row's call under `jax.jit`, divided as its arrays lie, and what devices send."""
    call, how = divided_call(space, row, draw)
    arrays = arrays_of(call)
    sizes = MESHES[how.mesh]
    mesh = mesh_of(sizes, how.kind)
    implementation = "triton" if how.kernels else "xla"
    function = functools.partial(
        getattr(ato_jax, call.op), **arrays.static, implementation=implementation
    )

    def place(name: str, tree: Any) -> Any:
        cut = how.axes if how.placed or name in "qkv" else {}
        specs = specs_of(call, name, tree, cut)
        if jnp.issubdtype(jax.tree.leaves(tree)[0].dtype, jax.dtypes.prng_key):
            return tree
        return jax.tree.map(
            lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), tree, specs
        )

    def both(learned: Any, beside: Any, cotangents: Any) -> Any:
        found, pull = jax.vjp(lambda learned: function(**learned, **beside), learned)
        if how.kind == AxisType.Explicit:
            cotangents = jax.tree.map(
                lambda one, like: jax.sharding.reshard(one, jax.typeof(like).sharding),
                cotangents, found,
            )  # fmt: skip
        return found, pull(cotangents)[0]

    x64 = jax.enable_x64(row["x64"] and not how.kernels)
    with ato_jax.interpret() if how.kernels else contextlib.nullcontext(), x64:
        with jax.set_mesh(mesh):
            beside = dict(arrays.beside)
            key = beside.pop("dropout_key", None)
            if key is not None:
                function = functools.partial(function, dropout_key=key)
            placed = [
                {name: place(name, tree) for name, tree in group.items()}
                for group in (arrays.learned, beside)
            ]
            if how.kind == AxisType.Explicit:
                cotangents = jax.tree.map(
                    lambda one: jax.device_put(one, NamedSharding(mesh, P())),
                    arrays.wanted.cotangents,
                )
            else:
                out, *rest = jax.tree.leaves(arrays.wanted.cotangents)
                spec = spec_of(letters_of(call, "out", out), how.axes)
                leaves = [jax.device_put(out, NamedSharding(mesh, spec))]
                for one in rest:
                    name = "lse" if call.op == "attention" else "state"
                    spec = spec_of(letters_of(call, name, one)[: one.ndim], how.axes)
                    leaves.append(jax.device_put(one, NamedSharding(mesh, spec)))
                cotangents = jax.tree.unflatten(
                    jax.tree.structure(arrays.wanted.cotangents), leaves
                )
            compiled = jax.jit(both).lower(*placed, cotangents).compile()
            result, gradients = compiled(*placed, cotangents)
            if how.kind == AxisType.Explicit and not how.placed:
                # The gradient of an array that every device has whole is gathered: its type says
                # so. Nothing else may be.
                learned, others = placed
                others |= {name: learned.pop(name) for name in [*learned] if name not in "qkv"}
                compiled = jax.jit(both).lower(learned, others, cotangents).compile()
    numerics.compare(numerics.named_results(call.op, result, gradients), arrays.wanted)
    sent = collectives(compiled.as_text())
    least = min(arrays.learned[name].nbytes for name in "qkv") // DEVICES
    kinds = {"all-gather", "all-to-all", "collective-permute"}
    large = [(one.kind, one.result) for one in sent if one.kind in kinds and one.result >= least]
    # XLA sums the gradients of keys that several devices share by parts, which it gathers.
    shared = how.axes.get("H") and not how.axes["G"] and not how.kernels
    assert shared or not large, (large, how)
    return f"{how} {call.sizes}"


# -- cut by time ---------------------------------------------------------------------------------

def timed_call(op: str, row: covering.Row, draw: random.Random) -> Call:
    """The row's call with T and S that eight devices divide."""
    call = covering.call_of(SPACES[op], row, small=True)
    batch, T, S, H, G, D, V = call.sizes
    own = draw.choice((2, 4, 6)) if row["lengths"] != "long" else 8
    T, S = {
        "T < S": (own, own + 2), "T > S": (own + 4, own), "T = 1": (2, own), "S = 1": (own, 2)
    }.get(row["lengths"], (own, own))  # fmt: skip
    batch = 2 if call.batched else 1
    return dataclasses.replace(call, sizes=(batch, DEVICES * T, DEVICES * S, H, G, D, V))


def check_timed(call: Call, own: dict[str, Any], batch: bool, x64: bool) -> str:
    """The call with T and S cut by `ato_jax.parallel`, and the batch, too, where asked for."""
    arrays = arrays_of(call)
    sizes = {"data": 2, "time": 4} if batch else {"time": DEVICES}
    mesh = mesh_of(sizes, AxisType.Auto)
    axes = {"T": "time", "S": "time", "B": "data" if batch else None}
    function = getattr(ato_jax.parallel, call.op)
    zigzag = own.get("order") == "zigzag"

    def reorder(name: str, array: Any, back: bool = False) -> Any:
        if not zigzag or array is None:
            return array
        change = ato_jax.parallel.unzigzag if back else ato_jax.parallel.zigzag
        letters = letters_of(call, name, array)
        if name in ("bias", "mask"):
            letters = letters.replace("S", ".")
        for letter in "TS":
            if letter in letters:
                array = change(array, sizes["time"], axis=letters.index(letter))
        return array

    def spec(name: str, tree: Any) -> Any:
        cut = axes | {"S": None} if name in ("bias", "mask") else axes
        return specs_of(call, name, tree, cut)

    def run(learned: Any, beside: Any) -> Any:
        given = learned, beside
        outputs = spec_of(letters_of(call, "out", learned["q"]), axes)
        if arrays.static.get("return_lse"):
            outputs = outputs, spec_of(letters_of(call, "lse", None), axes)
        if arrays.static.get("return_state"):
            state = spec_of("B" if call.batched else "", axes)
            outputs = outputs, state
        found = jax.shard_map(
            lambda learned, beside: function(
                **learned, **beside, **arrays.static, axis_name="time", **own
            ),
            mesh=mesh,
            in_specs=tuple(
                {name: spec(name, tree) if name != "dropout_key" else P()
                 for name, tree in group.items()} for group in given
            ),
            out_specs=outputs,
        )(*(
            {name: reorder(name, tree) if name not in ("initial_state", "dropout_key") else tree
             for name, tree in group.items()} for group in given
        ))  # fmt: skip
        if not zigzag:
            return found
        if arrays.static.get("return_lse"):
            return reorder("out", found[0], True), reorder("lse", found[1], True)
        return reorder("out", found, True)

    def both(learned: Any, beside: Any, cotangents: Any) -> Any:
        found, pull = jax.vjp(lambda learned: run(learned, beside), learned)
        return found, pull(cotangents)[0]

    with jax.enable_x64(x64):
        as_arrays = functools.partial(jax.tree.map, jnp.asarray)
        learned = as_arrays(arrays.learned)
        cotangents = as_arrays(arrays.wanted.cotangents)
        beside = {
            name: array.astype(np.int32) if "segment" in name else array
            for name, array in arrays.beside.items()
        }
        result, gradients = jax.jit(both)(learned, beside, cotangents)
    numerics.compare(numerics.named_results(call.op, result, gradients), arrays.wanted)
    return f"{call.sizes} {own} batch={batch}"


def check_row_timed(space: covering.Space, row: covering.Row, draw: random.Random) -> str:
    call = timed_call(space.op, row, draw)
    own: dict[str, Any] = {}
    if space.op == "attention":
        own = {
            "schedule": draw.choice(("all_gather", "ring")),
            "order": draw.choice(("contiguous", "zigzag")),
        }
        if "bias" in call.arrays or "mask" in call.arrays:
            own["schedule"] = "all_gather"
    batch = call.batched and "dropout_key" not in call.arrays and draw.random() < 0.4
    return check_timed(call, own, batch, row["x64"])


def admits(op: str, row: covering.Row) -> bool:
    """Whether `ato_jax.parallel` has the row. tests/test_parallel.py has what it refuses."""
    if op == "attention":
        return True
    square = row["lengths"] in covering.SQUARE
    return not (
        row["segments"] == "cross"
        or row["causal"] and not square
        or (row["causal"] or row["decay"] != "none" or row["segments"] != "none")
        and row["padding"] == "both"
    )  # fmt: skip


def sweep(mode: str, op: str, first: int, step: int) -> None:
    """Every `step`-th row from the first on, each divided by what its number draws."""
    space, failed = SPACES[op], []
    for number, row in list(enumerate(covering.rows(space)))[first::step]:
        if mode == "timed" and not admits(op, row):
            continue
        draw = random.Random(f"{SEED} {number}")
        try:
            print(number, MODES[mode](space, row, draw), flush=True)
        except Exception as error:  # all that fail are told
            failed.append(f"{number}, {covering.label(row)}: {str(error)[:1000]}")
    assert not failed, "\n".join(failed)


# -- axes beside those that cut ------------------------------------------------------------------


def check_explicit() -> None:
    """Explicit axes beside the one that cuts the sequence; and ids that int32 does not hold."""
    mesh = mesh_of({"data": 2, "time": 2, "model": 2}, AxisType.Explicit)
    draw = np.random.default_rng(0)
    sizes = {"B": 2, "T": 16, "H": 4, "G": 2, "D": 8}
    q, k, v = (
        draw.normal(size=[sizes[letter] for letter in letters]).astype(np.float32)
        for letters in ("BTHD", "BTGD", "BTGD")
    )
    beta = np.full(q.shape[:3], 0.5, np.float32)
    linear, softmax, delta = (
        {"causal": True, "return_state": True}, {"causal": True, "return_lse": True}, {}
    )  # fmt: skip
    for op, arrays, options, own in (
        ("linear_attention", (q, k, v), linear, {}),
        ("attention", (q, k, v), softmax, {"schedule": "ring", "order": "zigzag"}),
        ("attention", (q, k, v), softmax, {}),
        ("gated_delta_rule", (k, k / 3, q, beta), delta, {}),
    ):
        wanted = jax.tree.leaves(getattr(ato_jax, op)(*arrays, **options))
        part = functools.partial(
            getattr(ato_jax.parallel, op), axis_name="time", **options, **own
        )
        cut = P(None, "time")
        outputs = (cut, P()) if options is linear else cut
        zigzag = "order" in own
        given = [ato_jax.parallel.zigzag(array, 2) if zigzag else array for array in arrays]
        with jax.set_mesh(mesh):
            spec = P("data", "time", "model")
            given = [jax.device_put(array, NamedSharding(mesh, spec)) for array in given]
            found = jax.jit(
                jax.shard_map(
                    part, mesh=mesh, in_specs=cut, out_specs=outputs, axis_names={"time"}
                )
            )(*given)
            assert jax.typeof(jax.tree.leaves(found)[0]).sharding.spec == P(*spec, None)
        for one, other in zip(jax.tree.leaves(found), wanted, strict=True):
            one = np.asarray(one)
            one = ato_jax.parallel.unzigzag(one, 2) if zigzag else one
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=op)
    # The states around a device are those of its keys, and its queries may have other segments.
    lengths = {"q_lengths": np.array([16, 9]), "kv_lengths": np.array([3, 16])}
    ids = np.zeros((2, 16), np.int32)
    part = functools.partial(ato_jax.parallel.linear_attention, axis_name="time", **lengths)
    with pytest.raises(ato_jax.UnsupportedError, match="segment_ids needs the same lengths"):
        jax.shard_map(
            lambda q, k, v, ids: part(q, k, v, segment_ids=ids),
            mesh=mesh_of({"time": 2}, AxisType.Auto), in_specs=P(None, "time"),
            out_specs=P(None, "time"),
        )(q, k, v, ids)  # fmt: skip
    ids = jnp.repeat(jnp.array([[7, 2**32 - 1], [0, 5]], jnp.uint32), 8, axis=1)
    wanted = ato_jax.attention(q, k, v, segment_ids=ids)
    own_ids = {"q_segment_ids": np.asarray(ids) % 3, "kv_segment_ids": np.asarray(ids) % 2}
    twice = jax.tree.map(lambda array: np.concatenate([array, array]), (q, k, v, own_ids))
    wanted_of_own = ato_jax.linear_attention(*twice[:3], **twice[3])
    with jax.set_mesh(mesh):
        q, k, v, ids = (
            jax.device_put(array, NamedSharding(mesh, P("data"))) for array in (q, k, v, ids)
        )
        found = jax.jit(ato_jax.attention)(q, k, v, segment_ids=ids)
        # JAX 0.10 fails to search arrays that two explicit axes cut.
        spec = NamedSharding(mesh, P(("data", "model")))
        *qkv, own_ids = jax.tree.map(lambda array: jax.device_put(array, spec), twice)
        found_of_own = jax.jit(ato_jax.linear_attention)(*qkv, **own_ids)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found_of_own, wanted_of_own, rtol=1e-4, atol=1e-5)


SEED = 1
MODES = {"divided": check_divided, "timed": check_row_timed}
# Every how manieth row the long test takes at a time, and the rows of the short one.
STEP = 10
FEW = (
    ("divided", "attention", 105), ("timed", "attention", 101), ("timed", "linear_attention", 115)
)  # fmt: skip
EVERY = [(mode, op, first) for mode in MODES for op in SPACES for first in range(STEP)]


def in_a_process(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
    # Programs that run once are compiled fast.
    fast = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {fast}")
    found = simulated.last_line("tests.test_mesh_sweep", *map(str, arguments), devices=DEVICES)
    assert found == "done"


def test_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_process(monkeypatch)


@pytest.mark.skipif(not ALL_ROWS, reason="takes long; ATO_ALL_ROWS=1 runs it")
@pytest.mark.parametrize(("mode", "op", "first"), EVERY)
def test_every_row(mode: str, op: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_process(monkeypatch, mode, op, first, STEP)


if __name__ == "__main__":
    if sys.argv[1:]:
        sweep(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5]))
    else:
        check_explicit()
        for mode, op, number in FEW:
            sweep(mode, op, number, 1000)
    print("done")

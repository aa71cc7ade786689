"""What each backend supports, as a table made from the backends' own `unsupported`.

    python -m tests.support        writes tests/support.txt and the table in docs/support.md

A change of support is a change of tests/support.txt, which a test compares with the backends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ato_jax
from ato_jax import choosing, slower
from ato_jax.ops.attention import api as attention_api
from ato_jax.ops.attention import reading as attention_reading
from ato_jax.ops.delta_rule import api as delta_rule_api
from ato_jax.ops.linear_attention import api as linear_attention_api
from ato_jax.ops.linear_attention import reading

HERE = Path(__file__).parent
GOLDEN = HERE / "support.txt"
TABLE = HERE.parent / "docs" / "support.md"
MARKERS = re.compile(r"(<!-- support -->\n).*?(<!-- /support -->)", re.DOTALL)

APIS = {
    "attention": attention_api,
    "linear_attention": linear_attention_api,
    "gated_delta_rule": delta_rule_api,
}
PHASES = ("forward", "backward")
WIDTHS = (1, 16, 64, 80, 96, 128, 192, 256, 512, 1024, 2048, 8192)


class Row(NamedTuple):
    """One feature: the sizes that it needs, the options, made from these, and axes of q, k, v."""

    feature: str
    sizes: dict[str, int] = {}
    options: Any = lambda sizes: {}
    dtype: str = "bfloat16"
    axes: tuple[str, ...] = ("BTHD", "BSGD", "BSGV")


SIZES = {"B": 2, "T": 32, "S": 32, "H": 2, "G": 2, "D": 16, "V": 16}


def _always(**options: Any) -> Any:
    return lambda sizes: options


def _with_decay(axes: str, **options: Any) -> Any:
    return lambda sizes: {"decay": jnp.full([sizes[axis] for axis in axes], -0.1), **options}


def ids(sizes: dict[str, int], length: str) -> np.ndarray:
    """Segment ids for that axis, 10 tokens a segment."""
    return np.arange(sizes[length])[None].repeat(sizes["B"], 0) // 10


def _shared() -> Iterator[Row]:
    for dtype in ("bfloat16", "float16", "float32"):
        yield Row(dtype, dtype=dtype)
    yield Row("float32, TF32", {}, _always(precision="tf32"), "float32")
    for width in WIDTHS:
        yield Row(f"D = V = {width}", {"D": width, "V": width})
    yield Row("D != V", {"V": 24})
    yield Row("H = 4 G", {"H": 8})
    yield Row("T != S", {"S": 48})
    yield Row("T = 1", {"T": 1})
    yield Row('layout="bhtd"', {}, _always(layout="bhtd"))
    yield Row("causal", {}, _always(causal=True))
    yield Row("causal, T != S", {"S": 48}, _always(causal=True))

    yield Row("segment_ids", {}, lambda sizes: {"segment_ids": ids(sizes, "T")})
    yield Row(
        "q_segment_ids, kv_segment_ids",
        {"S": 48},
        lambda sizes: {"q_segment_ids": ids(sizes, "T"), "kv_segment_ids": ids(sizes, "S")},
    )
    yield Row("lengths", {}, _always(kv_lengths=np.array([20, 32])))
    yield Row(
        "q_lengths and kv_lengths",
        {},
        _always(q_lengths=np.array([9, 32]), kv_lengths=np.array([20, 32])),
    )


def _attention() -> Iterator[Row]:
    yield Row("window", {}, _always(window=(8, 2)))
    yield Row("causal window", {}, _always(window=(8, None), causal=True))
    yield Row("query_offset", {}, _always(query_offset=3, causal=True))
    yield Row("query_offset [B]", {}, _always(query_offset=np.array([0, 3]), causal=True))
    for shape in ("BHTS", "TS", "BS", "H"):
        for name, dtype in (("bias", "bfloat16"), ("mask", "bool")):
            yield Row(
                f"{name} [{', '.join(axis if axis in shape else '1' for axis in 'BHTS')}]",
                {},
                lambda sizes, name=name, shape=shape, dtype=dtype: {
                    name: jnp.ones([sizes[x] if x in shape else 1 for x in "BHTS"], dtype)
                },
            )
    yield Row("softcap", {}, _always(softcap=5.0))
    yield Row("sinks", {}, lambda sizes: {"sinks": jnp.zeros(sizes["H"])})
    yield Row("scale", {}, _always(scale=0.1))
    yield Row("dropout", {}, _always(dropout_rate=0.1, dropout_key=jax.random.key(0)))
    yield Row("return_lse", {}, _always(return_lse=True))
    wide = {"D": 1024, "V": 1024}
    yield Row("wide heads, H = 4 G", wide | {"H": 8})
    yield Row("wide heads, S = 300", wide | {"S": 300})
    yield Row(
        "wide heads, bias [1, 1, T, S]",
        wide,
        lambda sizes: {"bias": jnp.ones((1, 1, sizes["T"], sizes["S"]))},
    )


def _linear_attention() -> Iterator[Row]:
    for name in ("relu", "exp", "softplus", "identity", "silu", "relu2"):
        yield Row(f'feature_map="{name}"', {}, _always(feature_map=name))
    yield Row("feature_map=a function", {}, _always(feature_map=lambda x: jnp.tanh(x) + 1))
    yield Row(
        "feature_map=favor(...)",
        {},
        lambda sizes: {"feature_map": ato_jax.favor(jax.random.key(0), 24, sizes["D"])},
    )
    yield Row("normalize=False", {}, _always(normalize=False))
    yield Row("normalize=False, causal", {}, _always(normalize=False, causal=True))
    kinds = {"[G]": "G", "[B, S, G]": "BSG", "[B, S, G, D]": "BSGD"}
    for causal in (False, True):
        for kind, axes in kinds.items():
            yield Row(
                f"decay {kind}{', causal' * causal}",
                {},
                _with_decay(axes, causal=causal),
            )

    def state(sizes: dict[str, int]) -> ato_jax.LinearState:
        B, G, D, V = (sizes[axis] for axis in "BGDV")
        return ato_jax.LinearState(jnp.ones((B, G, D, V)), jnp.ones((B, G, D)))

    for causal in (False, True):
        yield Row(
            f"initial_state{', causal' * causal}",
            {},
            lambda sizes, causal=causal: {"initial_state": state(sizes), "causal": causal},
        )
        yield Row(
            f"return_state{', causal' * causal}", {}, _always(return_state=True, causal=causal)
        )
    # What Hopper's own kernels are for.
    wide = {"D": 128, "V": 128, "T": 64}
    yield Row("T = 64, S = 72, D = V = 128", wide | {"S": 72})
    for causal, name in ((False, "T = S = 64, D = V = 128"), (True, "causal, D = V = 128")):
        yield Row(name, wide, _always(causal=causal))
        yield Row(f"{name}, H = 4 G", wide | {"H": 8}, _always(causal=causal))
        yield Row(
            f"{name}, states",
            wide,
            lambda sizes, causal=causal: {
                "causal": causal,
                "initial_state": state(sizes),
                "return_state": True,
            },
        )
    for D in (80, 96, 112, 160, 192, 240, 256):
        sizes = wide | {"D": D, "V": D}
        yield Row(f"T = S = 64, D = V = {D}", sizes)
        yield Row(f"causal, D = V = {D}", sizes, _always(causal=True))
    for name, phi in (('"silu"', "silu"), ("a function", lambda x: jnp.tanh(x) + 1)):
        for causal, told in ((False, "T = S = 64"), (True, "causal")):
            options = {"causal": causal, "feature_map": phi}
            yield Row(f"{told}, D = V = 128, feature_map={name}", wide, _always(**options))
    for D in (64, 128):
        for precision, told in ((None, "float32"), ("tf32", "float32, TF32")):
            options = _always(causal=True, precision=precision)
            yield Row(f"causal, D = V = {D}, {told}", wide | {"D": D, "V": D}, options, "float32")
    for D, V in ((128, 64), (64, 128), (192, 128), (128, 256)):
        yield Row(f"causal, D = {D}, V = {V}", wide | {"D": D, "V": V}, _always(causal=True))
    wider = wide | {"D": 256, "V": 256}
    yield Row(
        "causal, D = V = 256, segment_ids",
        wider,
        lambda sizes: {"causal": True, "segment_ids": ids(sizes, "T")},
    )
    two_heads = {"D": 64, "V": 64, "T": 128}
    yield Row("causal, D = V = 64", two_heads, _always(causal=True))
    yield Row("causal, D = V = 40", two_heads | {"D": 40, "V": 40}, _always(causal=True))
    # Of more than a chunk, as gradients with gates of channels need it.
    longer = wide | {"T": 128}
    three = wide, two_heads, longer | {"D": 96, "V": 96}
    of_some = [(axes, sizes) for axes in ("BSG", "BSGD") for sizes in three]
    of_some += [("BSGD", longer | {"D": 256, "V": 256}), ("BSG", wider), ("G", wider)]
    for axes, sizes in (("G", wide), *of_some):
        yield Row(
            f"causal, D = V = {sizes['D']}, decay [{', '.join(axes)}]",
            sizes,
            _with_decay(axes, causal=True),
        )
    yield Row(
        "causal, D = 128, V = 256, decay [B, S, G]",
        wide | {"V": 256},
        _with_decay("BSG", causal=True),
    )
    for D in (128, 64):
        sizes = wide | {"D": D, "V": D}
        yield Row(f"T = S = 64, D = V = {D}, decay [B, S, G]", sizes, _with_decay("BSG"))
    for causal, told in ((False, "T = S = 64"), (True, "causal")):
        options = {"causal": causal, "kv_lengths": np.array([20, 32])}
        yield Row(f"{told}, D = V = 128, lengths", wide, _always(**options))
    for causal, told in ((False, "T = S = 64"), (True, "causal")):
        yield Row(
            f"{told}, D = V = 128, segment_ids",
            wide,
            lambda sizes, causal=causal: {"causal": causal, "segment_ids": ids(sizes, "T")},
        )
    yield Row("T = S = 101, causal, D = V = 64", two_heads | {"T": 101}, _always(causal=True))
    for axes in ("BSG", "BSGD"):
        yield Row(
            f'causal, D = V = 128, decay [{", ".join(axes)}], feature_map="silu"',
            wide,
            _with_decay(axes, causal=True, feature_map="silu"),
        )
    # Options that are slow together, though each alone is not.
    lengths = {"kv_lengths": np.array([20, 32])}
    for axes in ("BSG", "BSGD"):
        kind = f"decay [{', '.join(axes)}], causal"
        yield Row(
            f"{kind}, segment_ids",
            {},
            lambda sizes, axes=axes: {
                "segment_ids": ids(sizes, "T"),
                **_with_decay(axes, causal=True)(sizes),
            },
        )
        yield Row(f"{kind}, lengths", {}, _with_decay(axes, causal=True, **lengths))
    # What takes long, in the sizes in which it was measured.
    for causal, told in ((False, "T = S = 64"), (True, "causal")):
        yield Row(
            f"{told}, D = V = 128, feature_map=favor(...)",
            wide,
            lambda sizes, causal=causal: {
                "feature_map": ato_jax.favor(jax.random.key(0), 128, sizes["D"]),
                "causal": causal,
            },
        )
    yield Row("causal, D = V = 512", {"D": 512, "V": 512}, _always(causal=True))


def _gated_delta_rule() -> Iterator[Row]:
    def row(
        feature: str,
        sizes: dict[str, int] | None = None,
        dtype: str = "bfloat16",
        decay: str = "",
        **options: Any,
    ) -> Row:
        def with_beta(sizes: dict[str, int]) -> dict[str, Any]:
            def full(axes: str, value: float) -> jax.Array:
                array = jnp.full([sizes[axis] for axis in axes], value)
                return jnp.swapaxes(array, 1, 2) if options.get("layout") == "bhtd" else array

            gates = {"decay": full(decay, -0.1)} if decay else {}
            made = {name: one(sizes) if callable(one) else one for name, one in options.items()}
            return {"beta": full("BTH", 0.5)} | gates | made

        return Row(feature, sizes or {}, with_beta, dtype, ("BTGD", "BTGD", "BTHV"))

    for dtype in ("bfloat16", "float16", "float32"):
        yield row(dtype, dtype=dtype)
    yield row("float32, TF32", dtype="float32", precision="tf32")
    for width in WIDTHS:
        yield row(f"D = V = {width}", {"D": width, "V": width})
    yield row("D != V", {"V": 24})
    yield row("H = 4 G", {"H": 8})
    yield row("T = 1", {"T": 1})
    for layout in ("bthd", "bhtd"):
        told = f', layout="{layout}"' if layout == "bhtd" else ""
        for decay in ("BTH", "BTHD"):
            yield row(f"decay [{', '.join(decay)}]{told}", decay=decay, layout=layout)
    yield row("normalize_qk", normalize_qk=True)
    yield row("scale", scale=0.1)
    yield row(
        "segment_ids",
        segment_ids=lambda sizes: np.arange(sizes["T"])[None].repeat(sizes["B"], 0) // 10,
    )
    yield row("lengths", lengths=np.array([20, 32]))
    yield row(
        "initial_state",
        initial_state=lambda sizes: jnp.ones([sizes[axis] for axis in "BHDV"]),
    )
    yield row("return_state", return_state=True)
    yield row("H = 4 G, D = 128, V = 64", {"D": 128, "V": 64, "H": 8})
    yield row("decay [B, T, H], D = 64, V = 192", {"D": 64, "V": 192}, decay="BTH")
    yield row("decay [B, T, H, D], D = V = 64", {"D": 64, "V": 64}, decay="BTHD")
    yield row(
        "decay [B, T, H], D = V = 128, normalize_qk, return_state",
        {"D": 128, "V": 128},
        decay="BTH",
        normalize_qk=True,
        return_state=True,
    )
    # What runs by XLA for want of kernels, and not for its sizes.
    yield row(
        "segment_ids, D = V = 128",
        {"D": 128, "V": 128},
        segment_ids=lambda sizes: np.arange(sizes["T"])[None].repeat(sizes["B"], 0) // 10,
    )
    yield row("lengths, D = V = 128", {"D": 128, "V": 128}, lengths=np.array([20, 32]))


def _attention_of_float8() -> Iterator[Row]:
    """Calls of softmax attention on float8 arrays, by their calls on bfloat16 arrays."""
    for D in (32, 48, 64, 80, 96, 128, 192, 256, 272):
        yield Row(f"D = V = {D}", {"D": D, "V": D, "T": 64})
    wide = {"D": 128, "V": 128, "T": 64}
    yield Row("D = 128, V = 80", wide | {"V": 80})
    yield Row("D = V = 128, H = 4 G, T = 64, S = 72", wide | {"H": 8, "S": 72})
    yield Row("D = V = 128, T = 101", wide | {"T": 101})
    yield Row("D = V = 96, T = 101", wide | {"D": 96, "V": 96, "T": 101})
    kinds: dict[str, Any] = {
        "causal, window": _always(causal=True, window=(9, None)),
        "lengths": _always(q_lengths=np.array([20, 32]), kv_lengths=np.array([20, 32])),
        "segment_ids": lambda sizes: {"segment_ids": ids(sizes, "T")},
        "bias, mask [1, H, T, S]": lambda sizes: {
            "bias": jnp.ones((1, sizes["H"], sizes["T"], sizes["S"])),
            "mask": jnp.ones((1, sizes["H"], sizes["T"], sizes["S"]), bool),
        },
        "softcap, sinks": lambda sizes: {"softcap": 3.0, "sinks": jnp.zeros(sizes["H"])},
    }
    for feature, options in kinds.items():
        yield Row(f"D = V = 128, {feature}", wide, options)


def _linear_attention_of_float8() -> Iterator[Row]:
    """Calls of linear attention on float8 arrays, by their calls on bfloat16 arrays."""
    for D in (64, 80, 96, 112, 128, 192):
        yield Row(f"D = V = {D}", {"D": D, "V": D, "T": 64})
    wide = {"D": 128, "V": 128, "T": 64}
    yield Row("D = 128, V = 80", wide | {"V": 80})
    yield Row("D = V = 128, H = 4 G, T = 64, S = 72", wide | {"H": 8, "S": 72})
    yield Row("D = V = 128, T = 101", wide | {"T": 101})
    lengths = {"kv_lengths": np.array([20, 32])}
    kinds: dict[str, Any] = {
        'feature_map="exp"': _always(feature_map="exp"),
        'feature_map="silu"': _always(feature_map="silu"),
        "lengths": _always(**lengths),
        "return_state": _always(return_state=True),
        "segment_ids": lambda sizes: {"segment_ids": ids(sizes, "T")},
        "decay [B, S, G]": _with_decay("BSG"),
        "causal": _always(causal=True),
        "causal, decay [B, S, G]": _with_decay("BSG", causal=True),
    }
    for feature, options in kinds.items():
        yield Row(f"D = V = 128, {feature}", wide, options)
    yield Row("D = V = 64, causal", wide | {"D": 64, "V": 64}, _always(causal=True))


FLOAT8 = {
    "attention": (attention_reading, [*_attention_of_float8()]),
    "linear_attention": (reading, [*_linear_attention_of_float8()]),
}
ROWS = {
    "attention": [*_shared(), *_attention()],
    "linear_attention": [*_shared(), *_linear_attention()],
    "gated_delta_rule": [*_gated_delta_rule()],
}


def arguments(row: Row, seed: int = 0) -> tuple[list[jax.Array], dict[str, Any]]:
    """Random q, k, v and the options of a row."""
    sizes = SIZES | row.sizes
    if "T" in row.sizes and "S" not in row.sizes:
        sizes["S"] = sizes["T"]
    options = row.options(sizes)
    draw = np.random.default_rng(seed)
    arrays = []
    for axes in row.axes:
        shape = [sizes[axis] for axis in axes]
        if options.get("layout") == "bhtd":
            shape[1], shape[2] = shape[2], shape[1]
        arrays.append(jnp.asarray(draw.normal(size=shape), row.dtype))
    return arrays, options


def families(op: choosing.Op) -> list[str]:
    return list(dict.fromkeys(map(choosing.family, op.backends)))


def _reason(op: choosing.Op, spec: Any, family: str, phase: str) -> str | None:
    """None where one of the family supports it, else the reasons of all."""
    names = [name for name in op.backends if choosing.family(name) == family]
    found = [op.backend(name).unsupported(spec, phase) for name in names]
    if None in found:
        return None
    first, *others = zip(names, found, strict=True)
    return "; ".join([str(first[1]), *(f"{name}: {reason}" for name, reason in others)])


def reasons(op: str, row: Row) -> dict[str, dict[str, str | None]]:
    """For each backend that users know and phase, why not; None where it is supported."""
    api = APIS[op]
    arrays, options = arguments(row)
    spec = api.prepare(*arrays, **options).spec
    found: dict[str, dict[str, str | None]] = {
        name: {phase: _reason(api.OP, spec, name, phase) for phase in PHASES}
        for name in families(api.OP)
    }
    for name in api.OP.planned:
        found[name] = dict.fromkeys(PHASES, "has no kernels for this op")
    return found


def reasons_against_eight_bits(op: str) -> dict[str, str | None]:
    """By feature, why a call on float8 arrays is widened; None where kernels read 8 bits."""
    reads, rows = FLOAT8[op]
    found = {}
    for row in rows:
        arrays, options = arguments(row)
        spec = APIS[op].prepare(*arrays, **options).spec
        found[row.feature] = reads.OP.backend(reads.BACKEND).unsupported(spec, "forward")
    return found


def cell(of_phase: dict[str, str | None]) -> str:
    supported = [phase for phase in PHASES if of_phase[phase] is None]
    return "yes" if len(supported) == 2 else " ".join(supported) or "-"


def golden() -> str:
    """The whole table, and below it each backend's reasons."""
    lines = ["What each backend supports, from its `unsupported`; made by python -m tests.support."]
    lines.append("triton's kernels compile for AMD's gfx90a and gfx942, and never ran there.")
    for op, rows in ROWS.items():
        names = [*families(APIS[op].OP), *APIS[op].OP.planned]
        table = {row.feature: reasons(op, row) for row in rows}
        wide = max(map(len, table))
        lines += ["", f"{op:<{wide}}" + "".join(f"  {name:<10}" for name in names)]
        for feature, found in table.items():
            cells = "".join(f"  {cell(found[name]):<10}" for name in names)
            lines.append(f"{feature:<{wide}}{cells}".rstrip())
        lines.append("")
        for name in families(APIS[op].OP):
            for feature, found in table.items():
                for reason in dict.fromkeys(filter(None, found[name].values())):
                    lines.append(f"{op}, {name}, {feature}: {reason}")
    for op in FLOAT8:
        lines += ["", f"{op} of float8_e4m3fn"]
        for feature, reason in reasons_against_eight_bits(op).items():
            lines.append(f"{feature}: {'8 bits' if reason is None else f'widened: {reason}'}")
    return "\n".join(lines) + "\n"


MARKS = {"yes": "yes", "-": "-", "forward": "forward only", "backward": "backward only"}


def table() -> str:
    """The compact table: a row a feature, those together that all backends answer alike."""
    sizes = ", ".join(f"{axis} = {size}" for axis, size in SIZES.items())
    parts = [
        f"A plain call has bfloat16 arrays with {sizes}, is bidirectional, and in linear attention "
        "has the feature map elu + 1; in the delta rule, q and k have G heads and v has H; the "
        'entry "bfloat16" is this small call itself. A row has these sizes except for those that '
        "it names, or that the feature needs. Behind some features two numbers stand in brackets: "
        "how many times as long a large call with such an option takes for each byte, forward and "
        f"with gradients, as its base case, measured on one {slower.table()['card']}; the largest "
        "of the sizes that were measured.",
        "",
    ]
    for op, rows in ROWS.items():
        names = [name for name in families(APIS[op].OP) if name != "reference"]
        parts += [f"| `{op}` | " + " | ".join(f"`{name}`" for name in names) + " |"]
        parts += ["|---|" + "---|" * len(names)]
        together: dict[tuple[str, ...], list[str]] = {}
        factors = {}
        for row in rows:
            found = reasons(op, row)
            cells = tuple(MARKS[cell(found[name])] for name in names)
            together.setdefault(cells, []).append(row.feature)
            factors[row.feature] = factor(op, row, found)
        for cells, features in together.items():
            told = [name + factors.get(name, "") for name in _widths(features, factors)]
            parts.append(f"| {'; '.join(told)} | " + " | ".join(cells) + " |")
        parts.append("")
    for op in FLOAT8:
        against = reasons_against_eight_bits(op)
        parts += [f"| `{op}` of float8_e4m3fn, forward | `mosaic_gpu` |", "|---|---|"]
        for told, is_read in (("reads 8 bits", True), ("widened first", False)):
            features = [name for name, reason in against.items() if (reason is None) == is_read]
            parts.append(f"| {'; '.join(features)} | {told} |")
        parts.append("")
    return "\n".join(parts)


def factor(op: str, row: Row, found: dict[str, dict[str, str | None]]) -> str:
    """How much longer the row's option takes, by a backend that takes the row; "" if it is not
    among those of `slower.toml`."""
    if op != "linear_attention":
        return ""
    arrays, options = arguments(row)
    known = slower.measured(APIS[op].prepare(*arrays, **options).spec)
    if known is None:
        return ""
    _, entry = known
    told = [entry.get(phase, {}) for phase in (slower.FORWARD, slower.TRAINING)]
    runs = [
        found.get(name, {}).get(phase, "no backend") is None
        for one, phase in zip(told, PHASES, strict=True)
        for name in one.get("backend", "none").split(slower.BOTH)
    ]
    return f" ({', '.join(str(one['most']) for one in told)})" if all(runs) else ""


def _widths(features: list[str], factors: dict[str, str]) -> list[str]:
    """Neighbouring widths as one entry, which has their factor if all have the same."""
    merged = [name for name in features if name.startswith("D = V = ")]
    if not merged:
        return features
    widths = [name.split()[-1] for name in merged]
    span = f"{widths[0]} to {widths[-1]}" if len(widths) > 1 else widths[0]
    told = factors[merged[0]]
    same = all(factors[name] == told for name in merged)
    return [f"D = V = {span}{told * same}", *(name for name in features if name not in merged)]


def with_table(text: str) -> str:
    return MARKERS.sub(lambda found: found[1] + "\n" + table() + "\n" + found[2], text)


if __name__ == "__main__":
    GOLDEN.write_text(golden())
    TABLE.write_text(with_table(TABLE.read_text()))

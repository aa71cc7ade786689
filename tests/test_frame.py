"""The frame between the public functions and the backends: choice, tuning, residuals."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import device, dispatch, tuning
from tests import numerics

H200 = device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0])


def arrays(op: str, dtype: str = "float32") -> list[jax.Array]:
    draw = np.random.default_rng(0)
    shapes = ((2, 19, 4, 4), (2, 19, 2, 4), (2, 19, 2, 3))
    return [jnp.asarray(draw.normal(size=shape), dtype) for shape in shapes]


OPTIONS: dict[str, dict[str, Any]] = {
    "attention": {"causal": True, "return_lse": True},
    "linear_attention": {"causal": True, "return_state": True},
}
each_op = pytest.mark.parametrize("op", OPTIONS)


@each_op
@pytest.mark.parametrize(
    ("forward", "backward"),
    [("reference", "xla"), ("xla", "reference"), ("triton", "xla"), ("xla", "triton")],
)
def test_any_forward_with_any_backward(op: str, forward: str, backward: str) -> None:
    """Residuals belong to the op, so that a backend may bring one phase alone."""
    wanted = numerics.oracle(op, *arrays(op), **OPTIONS[op])
    with ato_jax.interpret():
        numerics.compare(numerics.run_backends(forward, backward, wanted), wanted)


@each_op
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_bit_identical(op: str, implementation: str) -> None:
    # Not causal: linear attention's kernels are then a quarter to compile.
    options = OPTIONS[op] | {"causal": False}
    wanted = numerics.oracle(op, *arrays(op), **options)

    def once() -> dict[str, Any]:
        return numerics.run(
            op, implementation, *arrays(op), cotangents=wanted.cotangents, **options
        )

    with ato_jax.interpret():
        first, second = once(), once()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@each_op
def test_explain(op: str) -> None:
    function = getattr(ato_jax, op)
    explained = ato_jax.explain(function, *arrays(op))
    assert str(explained) == str(ato_jax.explain(op, *arrays(op)))
    assert explained.op == op
    if jax.default_backend() != "gpu":
        assert explained.implementation == "xla"
        assert explained.backward is not None and explained.backward.backend == "xla"
        assert "needs a GPU" in str(explained.reasons["triton"]["forward"])
    for name in ("triton", "xla", "reference", "mosaic_gpu"):
        assert name in str(explained)
    shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in arrays(op)]
    assert ato_jax.explain(op, *shapes).spec == explained.spec
    named = ato_jax.explain(op, *arrays(op), implementation="reference")
    assert named.implementation == "reference"
    if jax.default_backend() != "gpu":
        refused = ato_jax.explain(op, *arrays(op), implementation="triton")
        assert refused.forward is None and refused.implementation is None
    with ato_jax.interpret():
        assert ato_jax.explain(op, *arrays(op), implementation="triton").implementation == "triton"


@each_op
def test_explain_refuses_what_the_call_refuses(op: str) -> None:
    q, k, v = arrays(op)
    with pytest.raises(ValueError, match="k must be"):
        ato_jax.explain(op, q, k[..., :1], v)
    with pytest.raises(ValueError, match="op must be one of"):
        ato_jax.explain("softmax", q, k, v)


@each_op
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_explain_does_not_narrow(op: str, name: str) -> None:
    shapes = {
        letter: jax.ShapeDtypeStruct(one.shape, np.float64 if letter == name else one.dtype)
        for letter, one in zip("qkv", arrays(op), strict=True)
    }
    with pytest.raises(ValueError, match=f"{name} must be float16, .*, got float64"):
        ato_jax.explain(op, **shapes)
    integers = jax.ShapeDtypeStruct((2, 19), np.int64)
    assert ato_jax.explain(op, *arrays(op), segment_ids=integers).implementation


def test_explain_does_not_narrow_what_is_inside() -> None:
    state = ato_jax.LinearState(
        jax.ShapeDtypeStruct((2, 2, 4, 3), np.float32), jax.ShapeDtypeStruct((2, 2, 4), np.float64)
    )
    with pytest.raises(ValueError, match=r"initial_state.k_sum must be .*, got float64"):
        ato_jax.explain("linear_attention", *arrays("linear_attention"), initial_state=state)


@each_op
def test_explain_knows_its_functions_from_their_namesakes(op: str) -> None:
    function = getattr(ato_jax, op)
    assert ato_jax.explain(jax.jit(function), *arrays(op)).op == op

    def namesake() -> None:
        pass

    namesake.__name__ = op
    with pytest.raises(ValueError, match="op must be one of"):
        ato_jax.explain(namesake, *arrays(op))


def test_unsupported_lists_every_backend() -> None:
    """With implementation=None the error tells each backend's reason."""

    def backend(reason: str) -> Any:
        return types.SimpleNamespace(unsupported=lambda spec, phase: reason)

    class Op(dispatch.Op):
        def backend(self, name: str) -> Any:
            return backend(f"not {name}")

    op = Op("toy", ("xla", "reference"), "toy")
    call = dispatch._Call(op, Spec(64), None, device.Device("cpu"), False)
    with pytest.raises(ato_jax.UnsupportedError, match="xla: not xla; reference: not reference"):
        dispatch.choose(call, "forward")


# -- tuning --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    block: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class Spec:
    D: int
    dtype: str = "bfloat16"
    T: int = 1024
    S: int = 1024

    def traits(self) -> dict[str, Any]:
        return {"D": self.D, "dtype": self.dtype}


class Backend:
    @staticmethod
    def default_config(spec: Spec, device: device.Device) -> Config:
        return Config(32, 4)


TABLE = """
[[attention.triton]]
when = {D = 64, dtype = "bfloat16"}
config = {block = 128}

[[attention.triton]]
when = {D = 64}
config = {block = 64, num_warps = 8}

[[attention.first]]
when = {dtype = "bfloat16"}
shortest = 1024
backend = "cudnn"
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "nvidia_h200.toml").write_text(TABLE)
    monkeypatch.setattr(tuning.resources, "files", lambda package: tmp_path)
    tuning.table.cache_clear()
    tuning.config.cache_clear()
    yield
    tuning.table.cache_clear()
    tuning.config.cache_clear()


@pytest.mark.parametrize(
    ("name", "spec", "wanted"),
    [
        ("triton", Spec(64), Config(128, 4)),
        ("triton", Spec(64, "float32"), Config(64, 8)),
        ("triton", Spec(128), Config(32, 4)),
        ("mosaic_gpu", Spec(64), Config(32, 4)),
    ],
)
def test_tuning(table: None, name: str, spec: Spec, wanted: Config) -> None:
    """The first entry that agrees overrides the fields that it names."""
    assert tuning.config("attention", name, Backend, spec, H200) == wanted


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        (Spec(64), ("cudnn", "triton", "xla")),
        (Spec(64, "float32"), ("triton", "cudnn", "xla")),
        (Spec(64, T=1023), ("triton", "cudnn", "xla")),
    ],
)
def test_order_of_backends(table: None, spec: Spec, wanted: tuple[str, ...]) -> None:
    backends = ("triton", "cudnn", "xla")
    assert tuning.order("attention", backends, spec, H200) == wanted


def test_a_device_without_a_table(table: None) -> None:
    other = dataclasses.replace(H200, name="NVIDIA A100-SXM4-80GB")
    assert tuning.config("attention", "triton", Backend, Spec(64), other) == Config(32, 4)
    assert tuning.table_name(other.name) == "nvidia_a100_sxm4_80gb"


@each_op
def test_tables_name_real_traits_and_fields(op: str) -> None:
    """Every entry of every table that is shipped: its traits are the spec's, its config builds."""
    api = numerics.APIS[op]
    spec = api.prepare(*arrays(op)).spec
    for path in (Path(tuning.__file__).parent / "tuned").glob("*.toml"):
        for name, entries in tuning.table(path.stem).get(op, {}).items():
            for entry in entries:
                assert set(entry["when"]) <= set(spec.traits()), (path, entry)
                if name == "first":
                    assert entry["backend"] in api.OP.backends
                    continue
                config = api.OP.backend(name).default_config(spec, H200)
                dataclasses.replace(config, **entry["config"])


@each_op
def test_traits_leave_sequence_lengths_out(op: str) -> None:
    assert not {"T", "S", "B"} & set(numerics.APIS[op].prepare(*arrays(op)).spec.traits())


# -- devices -------------------------------------------------------------------------------------


def test_describe() -> None:
    gpu = types.SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0", core_count=132
    )
    assert device.describe(gpu) == H200
    old = types.SimpleNamespace(platform="gpu", device_kind="Some GPU", compute_capability="7.5")
    assert device.describe(old).shared_memory == device.SMALLEST_SHARED_MEMORY
    amd = types.SimpleNamespace(platform="rocm", device_kind="MI300X", compute_capability="gfx942")
    assert device.describe(amd).platform == "gpu" and device.describe(amd).capability is None
    cpu = types.SimpleNamespace(platform="cpu", device_kind="cpu")
    assert device.describe(cpu) == device.Device("cpu", "cpu")


def test_the_device_is_that_of_the_arrays() -> None:
    cpu = jax.local_devices(backend="cpu")[0]
    array = jax.device_put(jnp.ones(1), cpu)
    assert device.of_call((None, array)).platform == "cpu"
    with jax.default_device(cpu):
        assert device.of_call(np.ones(1)).platform == "cpu"


def test_interpret_ends_with_its_context() -> None:
    assert not device.interpreting()
    with ato_jax.interpret():
        assert device.interpreting()
        with ato_jax.interpret(False):
            assert not device.interpreting()
    assert not device.interpreting()


@each_op
def test_one_program_for_one_spec(op: str) -> None:
    """Calls that differ in values alone compile once."""
    function = getattr(ato_jax, op)
    q, k, v = arrays(op)
    before = dispatch._run._cache_size()
    function(q, k, v, scale=None)
    after_first = dispatch._run._cache_size()
    function(q + 1, k, v)
    assert dispatch._run._cache_size() == after_first >= before

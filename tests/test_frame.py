"""The frame between the public functions and the backends: choice, tuning, residuals."""

from __future__ import annotations

import dataclasses
import inspect
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
import ato_jax.nn
import ato_jax.parallel
from ato_jax import choosing, device, dispatch, launch, programs, tuning
from ato_jax.backend import Backend, SpecialForward
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


def test_a_refused_pass_is_not_run() -> None:
    """Its numbers would be of a call that no user's call becomes."""
    wanted = numerics.oracle("attention", *arrays("attention"), **OPTIONS["attention"])
    for names, phase in ((("mosaic_gpu", "xla"), "forward"), (("xla", "mosaic_gpu"), "backward")):
        with pytest.raises(AssertionError, match=f"mosaic_gpu refuses the {phase} pass .* float32"):
            numerics.run_backends(*names, wanted)


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


@pytest.mark.lowering
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
    with pytest.raises(ValueError, match="op must be one of") as refused:
        ato_jax.explain(namesake, *arrays(op))
    assert "ato_torch" not in str(refused.value)
    namesake.__module__ = "ato_torch.functional"
    with pytest.raises(ValueError, match="of PyTorch's tensors ato_torch.explain tells"):
        ato_jax.explain(namesake, *arrays(op))


@pytest.mark.parametrize(
    "op, says",
    [
        (ato_jax.parallel.attention, r"explain ato_jax\.attention with the arrays of one device"),
        (ato_jax.nn.GatedDeltaNet, r"ato_jax\.nn\.GatedDeltaNet: explain the function that"),
        (np.zeros((2, 3)), r"an array of shape \(2, 3\): the function comes first"),
    ],
    ids=["parallel", "layer", "array"],
)
def test_explain_says_what_to_explain_instead(op: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"op must be one of .*{says}"):
        ato_jax.explain(op)


def decoding(op: str, dtype: str = "float32") -> tuple[Any, ...]:
    """Arguments of a call of `decode_attention` or of a step."""
    if op == "decode_attention":
        pages = jnp.ones((6, 16, 2, 8), dtype)  # [P, page, G, D]
        return jnp.ones((2, 1, 4, 8), dtype), pages, pages, [[3, 0], [5, -1]], [20, 7]
    q, kv = jnp.ones((2, 4, 8), dtype), jnp.ones((2, 2, 8), dtype)
    if op == "gated_delta_rule_step":
        return kv, kv, q, jnp.ones((2, 4)), jnp.zeros((2, 4, 8, 8))
    return q, kv, kv, ato_jax.LinearState(jnp.zeros((2, 2, 8, 8)), jnp.zeros((2, 2, 8)))


def chosen(explained: dispatch.Explanation) -> tuple[str | None, ...]:
    """The backends of the forward pass, of a recorded one and of the backward pass."""
    choices = (explained.forward, explained.recorded, explained.backward)
    return tuple(None if choice is None else choice.backend for choice in choices)


each_decoding = pytest.mark.parametrize(
    "op", ["decode_attention", "linear_attention_step", "gated_delta_rule_step"]
)


@pytest.mark.lowering
@each_decoding
def test_explain_decoding(op: str) -> None:
    arguments = decoding(op)
    explained = ato_jax.explain(getattr(ato_jax, op), *arguments)
    assert str(explained) == str(ato_jax.explain(op, *arguments))
    if jax.default_backend() != "gpu":
        assert chosen(explained) == ("xla", "xla", "xla")
        assert "needs an NVIDIA GPU" in str(explained.reasons["triton"]["forward"])
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), arguments[:3]
    )
    assert ato_jax.explain(op, *shapes, *arguments[3:]).spec == explained.spec
    with pytest.raises(ValueError, match="q must be"):
        ato_jax.explain(op, arguments[0][0, 0, 0], *arguments[1:])
    with pytest.raises(TypeError, match=f"{op}: got an unexpected keyword argument 'casual'"):
        ato_jax.explain(op, *arguments, casual=True)


@pytest.mark.lowering
@each_decoding
@pytest.mark.parametrize("hidden", [False, True])
def test_explain_decoding_on_a_card(
    op: str, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel in bfloat16, without a warning where JAX cannot lower it."""
    monkeypatch.setattr(device, "of_call", lambda _: H200)
    monkeypatch.setattr(launch, "no_triton", "has none" if hidden else None)
    explained = ato_jax.explain(op, *decoding(op, "bfloat16"))
    kernel = "xla" if hidden else "triton"
    assert chosen(explained) == (kernel, kernel, "xla")
    assert explained.reasons["triton"]["forward"] == ("has none" if hidden else None)


@pytest.mark.lowering
def test_explain_decoding_by_name_and_by_table(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = decoding("decode_attention")
    monkeypatch.setattr(launch, "no_triton", None)
    if jax.default_backend() != "gpu":
        refused = ato_jax.explain("decode_attention", *arguments, implementation="triton")
        assert chosen(refused) == (None, None, None)
    with ato_jax.interpret():
        named = ato_jax.explain("decode_attention", *arguments, implementation="triton")
    assert chosen(named) == ("triton", "triton", "xla")
    named = ato_jax.explain("decode_attention", *arguments, implementation="reference")
    assert chosen(named) == ("reference", "reference", "reference")
    monkeypatch.setattr(device, "of_call", lambda _: H200)
    explained = ato_jax.explain("decode_attention", *arguments)  # float32
    assert chosen(explained) == ("xla", "xla", "xla")
    assert "(triton last by tuned/sm_90.toml)" in str(explained)


def test_unsupported_lists_every_backend() -> None:
    """With implementation=None the error tells each backend's reason."""

    class Op(choosing.Op):
        def backend(self, name: str) -> Any:
            return types.SimpleNamespace(
                unsupported_device=lambda device, interpreted: None,
                unsupported=lambda spec, phase: f"not {name}",
            )

    op = Op("toy", ("xla", "reference"), "toy")
    call = choosing.Call(op, Spec(64), None, device.Device("cpu"), False)
    with pytest.raises(ato_jax.UnsupportedError, match="xla: not xla; reference: not reference"):
        choosing.choose(call, "forward")


# -- the protocol --------------------------------------------------------------------------------


OPS = {op: api.OP for op, api in numerics.APIS.items()}


def methods_of(protocol: type) -> list[str]:
    named = vars(protocol).items()
    return [name for name, found in named if inspect.isfunction(found) and name[0] != "_"]


def takes_what_is_passed(protocol: type, method: str, found: Any) -> bool:
    """Whether it can be called with the positional arguments that the protocol lists."""
    passed = list(inspect.signature(getattr(protocol, method)).parameters)[1:]  # without self
    try:
        inspect.signature(found).bind(*passed)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op in OPS for name in OPS[op].backends], ids=str
)
def test_every_backend_declares_itself(op: str, name: str) -> None:
    """Its object implements the protocol, by the functions of its module and by no others."""
    backend, module = OPS[op].backend(name), OPS[op].module(name)
    assert Backend in type(backend).__mro__
    declared = set(vars(type(backend))) & set(methods_of(Backend))
    assert declared >= Backend.__abstractmethods__
    for method in methods_of(Backend):
        found = getattr(backend, method)
        assert takes_what_is_passed(Backend, method, found), method
        in_module = getattr(module, method, None)
        assert (found is in_module) == (method in declared), method
        assert (in_module is not None) == (method in declared), f"{method} is not declared"
    assert dataclasses.is_dataclass(module.Config)
    assert ("needs_fallback" in declared) == ("backward_with_fallback" in declared)


@pytest.mark.parametrize(
    ("op", "owner", "name"), [(op, *pair) for op in OPS for pair in OPS[op].special], ids=str
)
def test_every_special_forward_declares_itself(op: str, owner: str, name: str) -> None:
    assert owner in OPS[op].backends
    special, module = OPS[op].special_forward(name), OPS[op].module(name)
    assert isinstance(special, SpecialForward)
    for method in methods_of(SpecialForward):
        found = getattr(special, method)
        assert found is getattr(module, method)
        assert takes_what_is_passed(SpecialForward, method, found), method


def test_defaults_of_a_backend() -> None:
    """What is not declared: no device refused, no arrays kept, no fallback."""
    backend = OPS["attention"].backend("reference")
    spec: Any = Spec(64)
    assert backend.unsupported_device(H200, False) is None
    assert backend.beats_later_backends(spec, H200, True) and not backend.needs_fallback(spec)
    q, k, v = arrays("attention")
    request = numerics.APIS["attention"].prepare(q, k, v)
    config = backend.default_config(request.spec, H200)
    kept = backend.forward_for_own_backward(request.spec, config, request.inputs)
    outputs = backend.forward(request.spec, config, request.inputs)
    assert jax.tree.all(jax.tree.map(lambda one, other: (one == other).all(), kept, outputs))


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
    B: int = 2
    H: int = 4

    def traits(self) -> dict[str, Any]:
        return {"D": self.D, "dtype": self.dtype}


class ByRule:
    @staticmethod
    def default_config(spec: Spec, device: device.Device) -> Config:
        return Config(32, 4)


# By architecture, and where a card differs from it.
TABLES = {
    "sm_90": """
[[attention.triton]]
when = {D = 64, dtype = "bfloat16"}
config = {block = 128}

[[attention.triton]]
when = {D = {least = 64, most = 96}}
config = {block = 64, num_warps = 8}

[[attention.first]]
when = {dtype = ["bfloat16", "float16"]}
sizes = {shortest = {least = 1024}}
backend = "cudnn"

[[attention.last]]
when = {D = {least = 192}}
sizes = {rows = {most = 8192}}
phase = "training"
backend = "triton"
""",
    "nvidia_h200": """
[[attention.triton]]
when = {D = 64, dtype = "float16"}
config = {block = 256}

[[attention.first]]
when = {dtype = "bfloat16", D = 256}
backend = "xla"
""",
    "amd": """
[[attention.last]]
when = {}
backend = "triton"
""",
}
H100 = dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3")
A100 = device.Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0), 108, device.SHARED_MEMORY[8, 0])
MI300 = device.Device("gpu", "AMD Instinct MI300X", None, 304, gfx="gfx942")
NOBODY = device.Device("gpu", "Some GPU")


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "tuned").mkdir()
    for name, text in TABLES.items():
        (tmp_path / "tuned" / f"{name}.toml").write_text(text)
    monkeypatch.setattr(tuning.resources, "files", lambda package: tmp_path)
    cached = (tuning.table, tuning.measured_architectures, tuning.order, tuning._config)
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


@pytest.mark.parametrize(
    ("card", "name", "spec", "wanted"),
    [
        (H100, "triton", Spec(64), Config(128, 4)),
        (H100, "triton", Spec(64, "float32"), Config(64, 8)),
        (H100, "triton", Spec(96), Config(64, 8)),
        (H100, "triton", Spec(97), Config(32, 4)),
        (H100, "mosaic_gpu", Spec(64), Config(32, 4)),
        (H100, "triton", Spec(64, "float16"), Config(64, 8)),
        (H200, "triton", Spec(64, "float16"), Config(256, 4)),
        (H200, "triton", Spec(64), Config(128, 4)),
        # The rule, where nothing was measured: as many threads in waves of 64.
        (A100, "triton", Spec(64), Config(32, 4)),
        (MI300, "triton", Spec(64), Config(32, 2)),
        (NOBODY, "triton", Spec(64), Config(32, 4)),
    ],
)
def test_block_sizes(
    tables: None, card: device.Device, name: str, spec: Spec, wanted: Config
) -> None:
    """The first entry that agrees, of the card and then of its architecture, overrides the fields
    that it names.
    """
    assert tuning.config("attention", name, ByRule, spec, card) == wanted


IN_ORDER = ["triton", "cudnn", "xla"]
CUDNN_FIRST = ["cudnn", "triton", "xla"]


@pytest.mark.parametrize(
    ("card", "spec", "phase", "wanted"),
    [
        (H100, Spec(64), "forward", CUDNN_FIRST),
        (H200, Spec(64), "training", CUDNN_FIRST),
        (H100, Spec(64, "float32"), "forward", IN_ORDER),
        (H100, Spec(64, T=1023), "forward", IN_ORDER),
        (H100, Spec(64, S=1023), "forward", IN_ORDER),
        (H100, Spec(256, "float32"), "training", ["cudnn", "xla", "triton"]),
        (H100, Spec(256, "float32"), "forward", IN_ORDER),
        (H100, Spec(256, "float32", H=5), "training", IN_ORDER),
        (H100, Spec(256), "training", ["cudnn", "xla", "triton"]),
        (H200, Spec(256), "training", ["xla", "cudnn", "triton"]),
        # Without a table: nothing is put first, and `last` is the nearest architecture's.
        (A100, Spec(64), "forward", IN_ORDER),
        (A100, Spec(256), "training", ["cudnn", "xla", "triton"]),
        (MI300, Spec(64), "forward", ["cudnn", "xla", "triton"]),
        (NOBODY, Spec(256), "training", IN_ORDER),
    ],
)
def test_order_of_backends(
    tables: None, card: device.Device, spec: Spec, phase: str, wanted: list[str]
) -> None:
    order = tuning.order("attention", spec, card, phase)
    assert sorted(IN_ORDER, key=lambda name: order.rank(name, name)) == wanted


def test_last_means_all_of_a_family(tables: None) -> None:
    order = tuning.order("attention", Spec(256), A100, "training")
    assert [order.rank(f"triton{kind}", "triton") for kind in ("", ".wide")] == [2, 2]


def test_names_of_tables(tables: None) -> None:
    assert tuning.table_name(A100.name) == "nvidia_a100_sxm4_80gb"
    assert tuning.tables_of(H200, "first") == ["nvidia_h200", "sm_90"]
    assert tuning.tables_of(H100, "last") == ["sm_90"]
    assert tuning.tables_of(A100, "triton") == tuning.tables_of(A100, "first") == []
    assert tuning.tables_of(A100, "last") == ["sm_90"]
    assert tuning.tables_of(MI300, "last") == ["amd"]
    assert tuning.tables_of(NOBODY, "last") == []


@each_op
def test_tables_name_real_traits_and_fields(op: str) -> None:
    """Every entry of every table that is shipped: its traits are the spec's, its config builds."""
    api = numerics.APIS[op]
    spec = api.prepare(*arrays(op)).spec
    for path in (Path(tuning.__file__).parent / "tuned").glob("*.toml"):
        for name, entries in tuning.table(path.stem).get(op, {}).items():
            for entry in entries:
                assert set(entry["when"]) <= set(spec.traits()), (path, entry)
                if name in ("first", "last"):
                    known = {"when", "sizes", "phase", "without", "backend"}
                    assert entry.keys() <= known, (path, entry)
                    assert entry["backend"] in api.OP.backends
                    assert entry.get("without", entry["backend"]) in api.OP.backends
                    assert set(entry.get("sizes", {})) <= set(tuning.sizes_of(spec))
                    assert entry.get("phase", "forward") in ("forward", "training")
                    for bounds in (*entry["when"].values(), *entry.get("sizes", {}).values()):
                        assert not isinstance(bounds, dict) or set(bounds) <= {"least", "most"}
                    continue
                assert entry.keys() <= {"when", "config", "measured"}, (path, entry)
                config = api.OP.backend(name).default_config(spec, H200)
                dataclasses.replace(config, **entry["config"])


@each_op
def test_traits_leave_sequence_lengths_out(op: str) -> None:
    assert not {"T", "S", "B"} & set(numerics.APIS[op].prepare(*arrays(op)).spec.traits())


# -- devices -------------------------------------------------------------------------------------


def gpu(name: Any, capability: Any = None, **more: Any) -> device.Device:
    facts = {"platform": "gpu", "device_kind": name} | more
    if capability is not None:
        facts["compute_capability"] = capability
    return device.describe(types.SimpleNamespace(**facts))


def test_describe() -> None:
    assert gpu("NVIDIA H200", "9.0", core_count=132) == H200
    assert H200.architecture == "sm_90" and H200.warp_size == 32 and not H200.is_amd
    old = gpu("Tesla T4", "7.5")
    assert old.shared_memory == device.SMALLEST_SHARED_MEMORY and old.architecture == "sm_75"
    cpu = types.SimpleNamespace(platform="cpu", device_kind="cpu")
    assert device.describe(cpu) == device.Device("cpu", "cpu")


@pytest.mark.parametrize(
    ("platform", "told", "architecture", "warp"),
    [
        ("rocm", "gfx942", "gfx942", 64),
        ("gpu", "gfx90a:sramecc+:xnack-", "gfx90a", 64),
        ("gpu", "gfx1100", "gfx1100", 32),
    ],
)
def test_describe_amd(platform: str, told: str, architecture: str, warp: int) -> None:
    amd = gpu("AMD Instinct", told, platform=platform, core_count=304)
    assert (amd.platform, amd.capability, amd.is_amd) == ("gpu", None, True)
    assert (amd.architecture, amd.warp_size) == (architecture, warp)
    assert amd.shared_memory == 64 * 1024 and amd.lacks_triton() is None
    assert [amd.waves(warps) for warps in (1, 4, 8)] == [max(1, n * 32 // warp) for n in (1, 4, 8)]


@pytest.mark.parametrize("told", [None, "", "9", "90", "sm_90", "9.x", "9.0.1"])
def test_describe_what_jax_tells_nothing_of(told: str | None) -> None:
    unknown = gpu("Some GPU", told, core_count=None)
    assert unknown == device.Device("gpu", "Some GPU")
    assert unknown.architecture == "" and "no architecture" in str(unknown.lacks_triton())


def test_shared_memory_of_newer_cards_is_the_least_of_their_generation() -> None:
    assert device.shared_memory_of((8, 8)) == device.shared_memory_of((12, 3)) == 101_376
    assert device.shared_memory_of((9, 9)) == device.shared_memory_of((10, 1)) == 232_448
    assert device.shared_memory_of((15, 0)) == 101_376


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
    programs.clear()
    function(q, k, v, scale=None)
    assert len(programs._jitted) == 1
    function(q + 1, k, v)
    assert len(programs._jitted) == 1


def test_lengths_that_are_given_twice() -> None:
    """Kernels of causal calls need to know that those of queries and of keys are the same."""
    q, lengths = jnp.ones((2, 8, 1, 4)), jnp.array([3, 8])
    for of_queries, of_keys, are_known_equal in (
        ([3, 8], np.array([3, 8]), True),
        (lengths, lengths, True),
        ([3, 8], [3, 7], False),
        (np.array([3, 8]), np.array([3, 8], np.int32), True),
        (lengths, jnp.array([3, 8]), False),  # Reading them would wait for the device.
    ):
        given = {"q_lengths": of_queries, "kv_lengths": of_keys, "causal": True}
        spec = numerics.APIS["linear_attention"].prepare(q, q, q, **given).spec
        assert (spec.offset == 0) == are_known_equal

"""Imports go one way, and `import ato_jax` brings JAX and nothing else of weight.

    ato_torch, nn -> ops/*/api -> spec, dispatch -> choosing -> tuning -> backend -> device
    a backend -> scans, spec, backend, device, Pallas; never another backend
    scans -> spec, decay, launch; never a backend
    triton, the kit of the Triton kernels -> launch, device; never an op
    mosaic_gpu -> mosaic, the kit of Hopper kernels -> device, meshes; never an op

Read from the sources: what a module imports, also inside functions and for types alone.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPS = ("attention", "linear_attention", "delta_rule")
BACKENDS = ("triton", "mosaic_gpu", "xla", "cudnn", "reference")


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Every module of both packages by name; a folder is its __init__."""
    found = {}
    for package in ("ato_jax", "ato_torch"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text())
    return found


@functools.cache
def imports(name: str) -> frozenset[str]:
    """What a module imports: the project's modules by full name, others as written."""
    found = set()
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports relatively"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules() else str(node.module))
    return frozenset(found)


def reached(name: str) -> set[str]:
    """The project's modules that a module imports, and what these import."""
    found: set[str] = set()
    ahead = [name]
    while ahead:
        for imported in imports(ahead.pop()) & set(modules()):
            if imported not in found:
                found.add(imported)
                ahead.append(imported)
    return found - {name}


def within(name: str, folder: str) -> bool:
    return name == folder or name.startswith(f"{folder}.")


def backends() -> list[str]:
    """The backends' own modules, the parts of those that are folders included."""
    folders = [f"ato_jax.ops.{op}.{backend}" for op in OPS for backend in BACKENDS]
    return [name for name in modules() for folder in folders if within(name, folder)]


KIT = "ato_jax.triton"
SHARED = (
    *(
        f"ato_jax.{name}"
        for name in (
            "autodiff", "backend", "device", "launch", "meshes", "partitioning", "programs",
            "shapes",
        )
    ),
    *(name for name in modules() if within(name, KIT)),
)
HOPPER_KIT = "ato_jax.mosaic"


def test_backends_are_found() -> None:
    assert {"ato_jax.ops.attention.triton", "ato_jax.ops.linear_attention.xla"} <= set(backends())


@pytest.mark.parametrize("name", backends())
def test_backends(name: str) -> None:
    """A backend reaches its op's rules and the device, no other backend and nothing above."""
    op, own = name.split(".")[2:4]
    home = f"ato_jax.ops.{op}"
    for imported in reached(name):
        if own == "mosaic_gpu" and within(imported, HOPPER_KIT):
            continue
        assert imported in SHARED or within(imported, home), f"{name} reaches {imported}"
        assert imported not in (home, f"{home}.api"), f"{name} reaches {imported}"
        part = imported.removeprefix(f"{home}.").split(".")[0]
        assert part == own or part not in BACKENDS, f"{name} reaches another backend, {imported}"


@pytest.mark.parametrize("name", [name for name in modules() if within(name, KIT)])
def test_the_kit_for_triton(name: str) -> None:
    """It knows no op."""
    below = {f"ato_jax.{part}" for part in ("device", "launch", "meshes")}
    for imported in reached(name):
        assert imported in below or within(imported, KIT), f"{name} reaches {imported}"


SCANS = "ato_jax.ops.linear_attention.scans"


@pytest.mark.parametrize("name", [name for name in modules() if within(name, SCANS)])
def test_scans(name: str) -> None:
    """What runs between a backend's kernels reaches the op's rules, and no backend."""
    home = "ato_jax.ops.linear_attention"
    rules = {f"{home}.{part}" for part in ("spec", "features", "decay")}
    for imported in reached(name):
        assert imported in SHARED or imported in rules or within(imported, SCANS), imported


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("ato_jax.device", ()),
        ("ato_jax.autodiff", ()),
        ("ato_jax.meshes", ()),
        ("ato_jax.shapes", ()),
        ("ato_jax.partitioning", ("ato_jax.meshes",)),
        ("ato_jax.programs", ("ato_jax.device",)),
        ("ato_jax.launch", ("ato_jax.device", "ato_jax.meshes")),
        ("ato_jax.backend", ("ato_jax.device",)),
        ("ato_jax.tuning", ("ato_jax.backend", "ato_jax.device")),
        (
            "ato_jax.division",
            ("ato_jax.backend", "ato_jax.device", "ato_jax.meshes", "ato_jax.partitioning"),
        ),
        (
            "ato_jax.choosing",
            (
                "ato_jax.backend",
                "ato_jax.device",
                "ato_jax.launch",
                "ato_jax.meshes",
                "ato_jax.partitioning",
                "ato_jax.tuning",
            ),
        ),
        (
            "ato_jax.dispatch",
            (
                "ato_jax.choosing",
                "ato_jax.division",
                "ato_jax.backend",
                "ato_jax.tuning",
                "ato_jax.device",
                "ato_jax.autodiff",
                "ato_jax.meshes",
                "ato_jax.partitioning",
                "ato_jax.launch",
                "ato_jax.programs",
            ),
        ),
        ("ato_jax.ops.common", ("ato_jax.checking", "ato_jax.meshes", "ato_jax.shapes")),
        ("ato_jax.ops.attention.spec", ("ato_jax.backend", "ato_jax.device", "ato_jax.meshes")),
        ("ato_jax.ops.delta_rule.spec", ("ato_jax.backend", "ato_jax.device", "ato_jax.meshes")),
        (
            "ato_jax.ops.linear_attention.spec",
            (
                "ato_jax.backend",
                "ato_jax.device",
                "ato_jax.ops.linear_attention.features",
                "ato_jax.meshes",
                "ato_jax.shapes",
            ),
        ),
    ],
)
def test_layers(name: str, allowed: tuple[str, ...]) -> None:
    assert reached(name) <= set(allowed)


def test_the_map_of_the_package_is_whole() -> None:
    """docs/architecture.md names the modules and folders of ato_jax and of each op."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "ato_jax"
    for folder in (package, *(package / "ops" / op for op in OPS)):
        for path in folder.iterdir():
            name = f"{path.name}/" if path.is_dir() else path.name
            if name not in ("ops/", "__pycache__/", "__init__.py", "py.typed"):
                assert re.search(rf"\b{re.escape(name)}", page), f"{path} is not on the map"


def test_the_kit_of_hopper_kernels_knows_no_op() -> None:
    """Nor do others than backends of Mosaic GPU know the kit."""
    kit = [name for name in modules() if within(name, HOPPER_KIT)]
    assert len(kit) > 5
    for name in kit:
        outside = {imported for imported in reached(name) if not within(imported, HOPPER_KIT)}
        assert outside <= {"ato_jax.device", "ato_jax.meshes"}, f"{name} reaches {outside}"
    for name in modules():
        if not within(name, HOPPER_KIT) and ".mosaic_gpu" not in name:
            assert not any(within(imported, HOPPER_KIT) for imported in imports(name)), name


@pytest.mark.parametrize("op", OPS)
def test_apis(op: str) -> None:
    """An api names its backends by strings: it imports none of them, nor another op."""
    for imported in reached(f"ato_jax.ops.{op}.api"):
        assert imported not in backends()
        assert not any(within(imported, f"ato_jax.ops.{other}") for other in OPS if other != op)
        assert imported not in ("ato_jax", "ato_jax.explain")
        assert not within(imported, "ato_jax.nn")


@pytest.mark.parametrize("name", [name for name in modules() if within(name, "ato_jax.nn")])
def test_flax_layers(name: str) -> None:
    """The Flax layers call the ops and name no backend; nothing else of ato_jax knows of them."""
    assert not imports(name) & set(backends())
    for other in modules():
        assert within(other, "ato_jax.nn") or name not in imports(other)


def test_flax_layers_come_alone() -> None:
    """`from ato_jax import nn`, where nothing else was imported."""
    program = "from ato_jax import nn; print(*nn.__all__)"
    names = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    assert "LinearAttention" in names.split()


def test_no_circles() -> None:
    for name in modules():
        for imported in imports(name) & set(modules()):
            assert name not in reached(imported), f"{name} and {imported} import each other"


@pytest.mark.parametrize(
    ("package", "alone"),
    [("flax", "ato_jax.nn"), ("torch", "ato_torch"), ("ato_torch", "ato_torch")],
)
def test_who_imports(package: str, alone: str) -> None:
    for name in modules():
        if not within(name, alone):
            assert not any(within(imported, package) for imported in imports(name)), name


def test_pallas_for_triton_is_imported_in_one_place() -> None:
    """A later JAX may lack it, and `launch` knows what then."""
    for name, module in modules().items():
        for imported in ast.walk(module):
            if isinstance(imported, ast.Import | ast.ImportFrom) and name != "ato_jax.launch":
                text = ast.unparse(imported)
                assert "jax" not in text or not re.search(r"pallas(\.| import )triton", text), name


def test_transformers_is_imported_by_those_who_ask_for_it() -> None:
    """Inside of functions, in the one module about it."""
    for name, module in modules().items():
        nodes = module.body if name == "ato_torch.hugging_face" else ast.walk(module)
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "transformers" not in ast.unparse(node), name


def test_nobody_imports_matplotlib() -> None:
    for name in modules():
        assert not any(within(imported, "matplotlib") for imported in imports(name)), name


def test_import_is_light() -> None:
    """Neither flax, torch nor matplotlib, and under a second more than `import jax`."""
    program = """
import sys, time
import jax
import jax.numpy
before = time.process_time()
import ato_jax
took = time.process_time() - before
heavy = [name for name in ("flax", "torch", "matplotlib") if name in sys.modules]
assert not heavy, heavy
print(took)
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert float(finished.stdout) < 1.0


def test_an_older_jax_is_refused_by_name() -> None:
    for version in ((0, 10, 1), (0, 9, 2), (0, 10, 2), (1, 0)):
        found = ".".join(map(str, version))
        program = f"import jax; jax.__version_info__ = {version}; jax.__version__ = {found!r}"
        finished = subprocess.run(
            [sys.executable, "-c", f"{program}\nimport ato_jax"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        told = f"ImportError: ato_jax needs JAX 0.10.2 or newer, found {found}\n"
        assert finished.stderr.endswith(told) == (version < (0, 10, 2)), finished.stderr
        assert finished.returncode == (version < (0, 10, 2))

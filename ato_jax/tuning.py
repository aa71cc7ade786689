"""Tables of what was measured on a card: the order of the backends, and block sizes.

The tables are in `tuned/`. The one named after the card (`nvidia_h200.toml`) is read first, then
the one named after its architecture (`sm_90.toml`). A card needs a table of its own only where it
differs from its architecture. In each table the first entry that agrees with a call counts.

    [[attention.first]]                     backends to try before the others
    when = {dtype = "bfloat16", D = {least = 65, most = 128}, causal = true}
    sizes = {shortest = {least = 1024}}
    phase = "training"
    backend = "cudnn"

    [[linear_attention.last]]               backends to try after all others
    when = {dtype = "float32", causal = false}
    backend = "triton"

    [[linear_attention.triton]]             fields of that backend's config
    when = {dtype = "bfloat16", D = 64, causal = false}
    config = {block_t = 128, num_warps = 4}

`when` names traits of the spec (`spec.traits()`) and `sizes` its lengths (`sizes_of`). A condition
is one value, a list of allowed values, or inclusive bounds. `phase` is "forward", for a call whose
derivative is not taken, or "training", for both passes of a call whose derivative is taken; an
entry without it counts for both. `without` names a backend: the entry counts only for callers that
do not have it, as PyTorch does not have `mosaic_gpu`. Block sizes never depend on lengths, so their
entries have no `sizes`, and nothing is tuned at call time. "triton" in `last` means all kernels of
that family.

Cards and architectures without a table follow a rule:

- Block sizes follow the backend's own rule (`default_config`), by the shared memory of a block and
  the number of multiprocessors. Cards with 227 KiB (sm_90, sm_100, sm_103) get the sizes measured
  on Hopper, those with 99 KiB (sm_86, sm_89, sm_120) and 163 KiB (sm_80) smaller ones.
- `first` entries count only for the architecture that they were measured on. So on sm_80, sm_86,
  sm_89, sm_100 and sm_120 softmax attention runs this library's Triton kernels, which take every
  option and give the same bits each time; cuDNN runs there where a call names it.
- `last` entries count for every NVIDIA architecture without a table, by the nearest architecture
  with one: a kernel whose factors or accumulators do not fit the registers is slow on all of them.
- AMD GPUs have `amd.toml`. The Triton kernels compile for gfx90a and gfx942, but were never run on
  such a card, so XLA comes first there. A gfx9 wave has 64 threads where NVIDIA's warp has 32, so
  kernels get half as many warps: a tile then has the number of threads that it was made for.
- Below sm_80 Triton does not compile, and XLA runs everything.

`python -m benchmarks run --suite=choices` measures a card and prints the entries that it lacks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from typing import Any, Protocol

from ato_jax.backend import ConfigT, Spec
from ato_jax.device import Device

FORWARD, TRAINING = "forward", "training"
# Ranks of backends: those of the lowest rank are tried first.
FIRST, IN_ORDER, LAST = 0, 1, 2


def table_name(device_name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_")


@functools.cache
def table(name: str) -> dict[str, Any]:
    """The table of that name; an empty one where there is none."""
    path = resources.files("ato_jax") / "tuned" / f"{table_name(name)}.toml"
    return tomllib.loads(path.read_text()) if table_name(name) and path.is_file() else {}


@functools.cache
def measured_architectures() -> tuple[tuple[int, int], ...]:
    """The compute capabilities that have a table, in ascending order."""
    files = (path.name for path in (resources.files("ato_jax") / "tuned").iterdir())
    found = (re.fullmatch(r"sm_(\d+)(\d)\.toml", name) for name in files)
    return tuple(sorted((int(name[1]), int(name[2])) for name in found if name))


def _nearest(device: Device) -> str:
    """The measured architecture whose `last` entries a card without a table follows."""
    measured = measured_architectures()
    if device.capability is None or not measured:
        return ""
    here = _number(device.capability)
    # The older of two that are equally near.
    major, minor = min(measured, key=lambda one: (abs(_number(one) - here), one))
    return f"sm_{major}{minor}"


def _number(capability: tuple[int, int]) -> int:
    return 10 * capability[0] + capability[1]


def tables_of(device: Device, kind: str) -> list[str]:
    """The names of the tables with entries of this kind for the device, in the order of reading."""
    names = [table_name(device.name), device.architecture]
    if device.is_amd:
        names.append("amd")
    elif kind == "last" and not table(device.architecture):
        names.append(_nearest(device))
    return [name for name in dict.fromkeys(names) if table(name)]


def sizes_of(spec: Spec) -> dict[str, int]:
    """The lengths that an entry's `sizes` may name; `rows` counts the queries of all heads."""
    return {
        "T": spec.T,
        "S": spec.S,
        "shortest": min(spec.T, spec.S),
        "rows": spec.B * spec.H * spec.T,
    }


def _agree(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    return all(_agrees(value, found.get(name)) for name, value in wanted.items())


def _agrees(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, dict):
        return wanted.get("least", found) <= found <= wanted.get("most", found)
    return found in wanted if isinstance(wanted, list) else found == wanted


def _entries(op: str, kind: str, device: Device) -> Iterator[tuple[dict[str, Any], str]]:
    """The entries of a kind, each with its table's name, in the order of reading."""
    for name in tables_of(device, kind):
        for entry in table(name).get(op, {}).get(kind, []):
            yield entry, name


@dataclasses.dataclass(frozen=True)
class Order:
    """The backends to try first and last, each with the name of the table that says so."""

    first: Mapping[str, str]
    last: Mapping[str, str]

    def rank(self, name: str, family: str) -> int:
        """`FIRST`, `IN_ORDER` or `LAST`; `family` is what users call the backend."""
        if name in self.first:
            return FIRST
        return LAST if family in self.last else IN_ORDER


@functools.lru_cache(maxsize=4096)
def order(
    op: str, spec: Spec, device: Device, phase: str, backends: tuple[str, ...] = ()
) -> Order:
    """The backends that the tables put first or last for this spec, where these are to choose
    from."""
    traits, sizes = spec.traits(), sizes_of(spec)

    def agreeing(kind: str) -> Iterator[tuple[str, str]]:
        for entry, name in _entries(op, kind, device):
            if (
                entry.get("phase", phase) == phase
                and entry.get("without") not in backends
                and _agree(entry["when"], traits)
                and _agree(entry.get("sizes", {}), sizes)
            ):
                yield entry["backend"], name

    return Order(dict(itertools.islice(agreeing("first"), 1)), dict(agreeing("last")))


def overrides(
    op: str, backend: str, traits: Mapping[str, Any], device: Device
) -> tuple[dict[str, Any], str]:
    """The config's fields that a table sets, and the table's name; both empty where none does."""
    for entry, name in _entries(op, backend, device):
        if _agree(entry["when"], traits):
            return entry["config"], name
    return {}, ""


class HasConfig(Protocol):
    """A backend, or a special forward pass of one."""

    def default_config(self, spec: Any, device: Device, /) -> Any: ...


def config(op: str, name: str, backend: HasConfig, spec: Spec, device: Device) -> Any:
    """The backend's config for this spec on this device."""
    return _config(op, name, backend.default_config, spec, device)


@functools.lru_cache(maxsize=4096)
def _config(
    op: str, name: str, default_config: Callable[[Any, Device], Any], spec: Any, device: Device
) -> Any:
    rule = in_waves(default_config(spec, device), device)
    found, _ = overrides(op, name, spec.traits(), device)
    return dataclasses.replace(rule, **found) if found else rule


def in_waves(config: ConfigT, device: Device) -> ConfigT:
    """The config, made for warps of 32 threads, with as many threads in the device's warps."""
    if device.warp_size == 32:
        return config
    fields: Any = config  # a frozen dataclass, as all configs are
    names = [field.name for field in dataclasses.fields(fields) if field.name.endswith("warps")]
    waves = {name: device.waves(getattr(config, name)) for name in names}
    return dataclasses.replace(fields, **waves)

"""Block sizes: a table per device where one was measured, else the backend's own rule.

A table lies in `tuned/<device name>.toml`, one list of entries per op and backend:

    [[linear_attention.triton]]
    when = {dtype = "bfloat16", D = 64, causal = false}
    config = {block_t = 128, num_warps = 4}

The first entry whose `when` agrees with the spec's traits overrides the fields that its `config`
names. Where another backend than the op's first was measured to be the fastest,

    [[attention.first]]
    when = {dtype = "bfloat16", D = 64}
    shortest = 1024
    backend = "cudnn"

has it tried before the others where the caller names none, from T = S = `shortest` on. Traits never
include T or S: no block size follows the sequence's length, and nothing is tuned at call time.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from importlib import resources
from typing import Any

from ato_jax.device import Device


def table_name(device_name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_")


@functools.cache
def table(device_name: str) -> dict[str, Any]:
    """What was measured on the device of that name; empty where nothing was."""
    path = resources.files("ato_jax") / "tuned" / f"{table_name(device_name)}.toml"
    return tomllib.loads(path.read_text()) if path.is_file() else {}


def _entry(op: str, kind: str, traits: dict[str, Any], device: Device) -> dict[str, Any]:
    """The first entry that agrees with the traits; empty where none does."""
    for entry in table(device.name).get(op, {}).get(kind, []):
        if all(traits.get(key) == value for key, value in entry["when"].items()):
            return entry
    return {}


def overrides(op: str, backend: str, traits: dict[str, Any], device: Device) -> dict[str, Any]:
    return _entry(op, backend, traits, device).get("config", {})


def order(op: str, backends: tuple[str, ...], spec: Any, device: Device) -> tuple[str, ...]:
    """The op's backends in the order in which they are tried."""
    entry = _entry(op, "first", spec.traits(), device)
    if not entry or min(spec.T, spec.S) < entry["shortest"]:
        return backends
    first = entry["backend"]
    return (first, *(name for name in backends if name != first))


@functools.lru_cache(maxsize=4096)
def config(op: str, name: str, backend: Any, spec: Any, device: Device) -> Any:
    """The backend's config for this spec on this device."""
    rule = backend.default_config(spec, device)
    found = overrides(op, name, spec.traits(), device)
    return dataclasses.replace(rule, **found) if found else rule

"""The character language model trained on a mesh learns as on one device.

It needs several devices, and so a process of its own, in which this file is the program.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from examples import char_lm, sharding
from tests import simulated


def test_in_a_process_with_simulated_devices() -> None:
    assert simulated.last_line("tests.test_examples_mesh") == "all alike"


@pytest.mark.parametrize("text", ["data", "data=2,data=2", "rows=2", "data=0", "model=2,context=2"])
def test_a_mesh_that_makes_no_sense(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        sharding.sizes_of(text)


def test_a_mesh_of_more_devices_than_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    jax.devices()  # so that no more are simulated
    with pytest.raises(SystemExit):
        char_lm.main(["--small", "--mesh", "data=1000"])
    assert "the mesh needs 1000 devices, JAX finds" in capsys.readouterr().err


def main() -> None:
    setting = dataclasses.replace(
        char_lm.SMALL, layers=1, features=16, batch_size=4, tokens=32, steps=3,
        evaluation_batches=1,
    )  # fmt: skip
    char_lm.KINDS = ("gated",)
    mesh = sharding.mesh_of({"data": 2, "model": 2})  # before JAX finds its one device
    characters, _ = char_lm.standard_library(setting.characters)
    batch = next(char_lm.text_batches(characters, setting.batch_size, setting.tokens, 0))
    model = char_lm.LanguageModel("gated", setting, nnx.Rngs(0))
    wanted, _ = char_lm.measure(model, batch)

    # XLA divides heads and the MLP.
    sharding.place(model, mesh)
    kernels = model.blocks[0].attention.query.kernel, model.blocks[0].attention.out.kernel
    assert [kernel[...].sharding.spec for kernel in kernels] == [P(None, "model"), P("model")]
    [placed] = sharding.batches_on(mesh, [batch])
    found, _ = nnx.jit(sharding.loss_on(mesh, char_lm.sums, char_lm.means))(model, placed)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)

    # The command's way: trained on a mesh, loaded and evaluated on one device.
    sizes = sharding.sizes_of("data=2,context=2")
    with tempfile.TemporaryDirectory() as folder:
        figures = char_lm.train_on_mesh(setting, sizes, Path(folder), seed=0)["gated"]
    print(figures, flush=True)
    np.testing.assert_allclose(figures["first_loss"], wanted, rtol=1e-5)
    assert figures["last_loss"] < wanted - 0.1  # after two steps
    assert abs(figures["validation_loss"] - figures["last_loss"]) < 1
    print("all alike")


if __name__ == "__main__":
    main()

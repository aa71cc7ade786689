"""The examples with an encoder, small or smaller: they learn, write, reload and share."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import ato_jax.nn
from examples import encoder, swap_attention

SMALLER = dataclasses.replace(encoder.SMALL, batch_size=16, heads=2, evaluations=2)
PNG = b"\x89PNG\r\n"


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(PNG)


def test_marked() -> None:
    """A mark in each half, one symbol everywhere, and the sum of the marked ones as the class."""
    B, T = 50, 7
    inputs, labels = encoder.draw_marked(np.random.default_rng(0), B, T)
    symbols, marks = inputs[..., :-1], inputs[..., -1]
    assert inputs.shape == (B, T, encoder.SYMBOLS + 1)
    np.testing.assert_array_equal(symbols.sum(-1), 1)
    np.testing.assert_array_equal(marks[:, : T // 2].sum(1), 1)
    np.testing.assert_array_equal(marks[:, T // 2 :].sum(1), 1)
    np.testing.assert_array_equal((symbols.argmax(-1) * marks).sum(1), labels)
    assert (marks.sum(0) > 0).all()


def test_digits_are_held_out() -> None:
    task = encoder.digits(encoder.SMALL, seed=0)
    held_out = {image.tobytes() for image in task.held_out.inputs}
    batches = task.batches()
    for _ in range(100):
        assert not held_out & {image.tobytes() for image in next(batches).inputs}
    first, again = next(task.batches()), next(task.batches())
    np.testing.assert_array_equal(first.inputs, again.inputs)


def test_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = dataclasses.replace(SMALLER, digits_steps=70, speed_lengths=(32,))
    monkeypatch.setattr(encoder, "SMALL", smaller)
    figures = encoder.main(["--small", "--length", "32", "--output", str(tmp_path)])
    chances = {"digits": 1 / 10, "marked": 1 / encoder.SYMBOLS}
    for task, chance in chances.items():
        rows = figures[task]
        assert rows.keys() == encoder.LAYERS.keys()
        assert len({row["parameters"] for row in rows.values()}) == 1
        for name, row in rows.items():
            assert row["loss"] < row["first_loss"] / 2, (task, name)
            assert row["accuracy"] > 2 * chance, (task, name)
            assert row["milliseconds_per_step"] > 0
            assert row["reloaded_alike"]
            assert (tmp_path / "checkpoints" / f"{task}_{name}").is_dir()
        assert is_picture(tmp_path / f"encoder_{task}.png")
    assert is_picture(tmp_path / "encoder_speed.png")
    for row in figures["milliseconds"].values():
        assert len(row) == len(encoder.SMALL.speed_lengths)
    assert json.loads((tmp_path / "encoder.json").read_text())["figures"] == figures


def test_swap_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The others: `test_swap_keeps_parameters`.
    layers = {name: swap_attention.LAYERS[name] for name in ("softmax", "linear")}
    monkeypatch.setattr(swap_attention, "LAYERS", layers)
    monkeypatch.setattr(swap_attention, "SMALL", SMALLER)
    figures = swap_attention.main(["--small", "--output", str(tmp_path)])
    assert figures.keys() == swap_attention.LAYERS.keys()
    for name, row in figures.items():
        assert row["parameters_shared"]
        assert row["reloaded_alike"]
        assert row["accuracy_tuned"] > 0.6
        assert (tmp_path / "checkpoints" / name).is_dir()
        if name == "softmax":
            assert row["loss_swapped"] == pytest.approx(row["loss_before"], rel=1e-5)
        else:
            assert row["loss_swapped"] > row["loss_before"]
            assert row["loss_tuned"] < row["loss_swapped"] / 2
    assert is_picture(tmp_path / "swap_attention.png")
    assert json.loads((tmp_path / "swap_attention.json").read_text())["figures"] == figures


@pytest.mark.parametrize("name", [*swap_attention.LAYERS][1:])
def test_swap_keeps_parameters(name: str) -> None:
    """The same variables at the same paths, bit for bit, around another layer."""
    task = encoder.digits(encoder.SMALL, seed=0)
    model = encoder.Encoder(nnx.MultiHeadAttention, task, encoder.SMALL, nnx.Rngs(0))
    before = nnx.state(model, nnx.Param)
    values: Any = jax.tree.map(np.array, before)
    layer, options = swap_attention.LAYERS[name]
    assert swap_attention.swap(model, layer, options, seed=0)
    assert all(type(block.attention) is layer for block in model.blocks)
    after = nnx.state(model, nnx.Param)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, after), values)


def test_swap_sees_what_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    task = encoder.digits(encoder.SMALL, seed=0)
    model = encoder.Encoder(nnx.MultiHeadAttention, task, encoder.SMALL, nnx.Rngs(0))

    def copy(model: encoder.Encoder, layer: Any, **options: Any) -> None:
        model.head.kernel = nnx.Param(model.head.kernel[...])

    monkeypatch.setattr(ato_jax.nn, "replace_attention", copy)
    assert not swap_attention.swap(model, ato_jax.nn.LinearAttention, {}, seed=0)

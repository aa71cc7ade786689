"""The character language model of examples/, in its small setting and smaller."""

from __future__ import annotations

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import char_lm, training


def test_small_setting_learns_saves_and_reports(tmp_path, capsys, monkeypatch):
    smaller = {"tokens": 16, "pairs": 4, "evaluation_batches": 2, "generated": 10}
    monkeypatch.setattr(char_lm, "SMALL", dataclasses.replace(char_lm.SMALL, **smaller))
    # "hybrid" has gated layers; `test_speed_is_reported_for_each_length` trains the other kinds.
    monkeypatch.setattr(char_lm, "KINDS", ("softmax", "hybrid"))
    figures = char_lm.main(["--small", "--steps", "40", "--output", str(tmp_path)])
    assert set(figures) == set(char_lm.KINDS)
    for row in figures.values():
        assert row["validation_loss"] < row["first_validation_loss"] - 2
        assert row["reloaded_alike"]
        assert row["training_tokens_per_second"] > 0
        assert 0 <= row["recall_accuracy"] <= 1
        assert row["text"].startswith(char_lm.PROMPT)
        assert len(row["text"]) == len(char_lm.PROMPT) + char_lm.SMALL.generated
    # Softmax attention has found out by then; chance is 1 / symbols.
    assert figures["softmax"]["recall_accuracy"] > 4 / char_lm.SMALL.symbols

    assert (tmp_path / "char_lm.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "char_lm.json").read_text())["figures"] == figures
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == set(char_lm.KINDS)
    printed = capsys.readouterr()
    assert "small setting" in printed.out and "recall_accuracy" in printed.out
    assert "hybrid, recall" in printed.err and "40/40" in printed.err


def test_kinds_have_equally_many_parameters():
    models = (
        nnx.eval_shape(lambda kind=kind: char_lm.LanguageModel(kind, char_lm.FULL, nnx.Rngs(0)))
        for kind in char_lm.KINDS
    )
    parameters = [training.count_parameters(model) for model in models]
    assert max(parameters) < 1.001 * min(parameters)


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [("hybrid", "float32", 1e-5), ("hybrid", "bfloat16", 0.05), ("delta", "float32", 1e-5)],
)
def test_cache_continues_as_the_whole_would(kind, dtype, tolerance):
    setting = dataclasses.replace(char_lm.SMALL, features=16, dtype=dtype)
    model = char_lm.LanguageModel(kind, setting, nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 8), 0, setting.vocabulary)
    whole = nnx.jit(char_lm.LanguageModel.__call__)(model, tokens)
    model.init_cache(2, 8)
    decode = nnx.jit(lambda model, piece: model(piece, decode=True))
    pieces = [decode(model, piece) for piece in (tokens[:, :6], tokens[:, 6:7], tokens[:, 7:])]
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, atol=tolerance)


def test_recall_asks_for_every_pair_once():
    pairs, symbols = 5, 7
    tokens, targets = next(char_lm.recall_batches(3, pairs, symbols, seed=0))
    for row, wanted in zip(tokens, targets, strict=True):
        told = dict(zip(row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2], strict=True))
        assert len(told) == pairs
        assert all(key < symbols <= value < 2 * symbols for key, value in told.items())
        [asked] = np.nonzero(wanted != char_lm.UNCOUNTED)
        assert list(asked) == list(range(2 * pairs, 4 * pairs, 2))
        assert {row[n]: wanted[n] for n in asked} == told


def test_text_is_split_and_targets_are_the_next_characters():
    text, validation = char_lm.standard_library(10_000)
    assert (len(text), len(validation)) == (9000, 1000)
    tokens, targets = next(char_lm.text_batches(text, 2, 16, seed=0))
    assert tokens.shape == targets.shape == (2, 16)
    assert (tokens[:, 1:] == targets[:, :-1]).all()


def test_speed_is_reported_for_each_length(monkeypatch):
    monkeypatch.setattr(char_lm, "SPEED_KINDS", ("linear", "delta"))
    setting = dataclasses.replace(
        char_lm.SMALL,
        layers=1,
        features=16,
        speed_tokens=(16, 32),
        speed_batch_tokens=32,
        speed_steps=2,
    )
    figures = char_lm.measure_speed(setting, seed=0)
    assert set(figures) == {"linear", "delta"}
    for by_length in figures.values():
        assert set(by_length) == {"T=16", "T=32"}
        assert min(by_length.values()) > 0


def test_speed_on_a_mesh(monkeypatch):
    monkeypatch.setattr(char_lm, "MESH_SPEED_KINDS", ("linear",))
    setting = dataclasses.replace(
        char_lm.SMALL, layers=1, features=16, speed_steps=2, mesh_tokens=16
    )
    figures = char_lm.measure_speed_on_mesh(setting, {"data": 1, "context": 1}, seed=0)
    assert set(figures) == {"linear"} and figures["linear"]["T=16"] > 0


def test_training_evaluates_before_in_between_and_last():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    x = jnp.array([[1.0, 2.0], [3.0, -1.0]])

    def loss_function(model, batch):
        error = jnp.square(model(batch) - 1).mean()
        return error, {"twice": 2 * error}

    options = {"steps": 10, "learning_rate": 0.1}
    history = training.train(
        model,
        itertools.repeat(x),
        loss_function,
        **options,
        evaluate=lambda model: {"held out": loss_function(model, x)[0]},
        evaluations=3,
    )
    assert [step for step, _ in history.curves["held out"]] == [0, 4, 8, 10]
    assert [step for step, _ in history.curves["loss"]] == list(range(1, 11))
    assert history.last("twice") == pytest.approx(2 * history.last("loss"))
    assert history.last("held out") < history.first("held out")
    with pytest.raises(ValueError, match="batches must last for 10 steps, got 3"):
        training.train(model, [x] * 3, loss_function, **options)


def test_checkpoint_gives_back_the_outputs(tmp_path):
    setting = dataclasses.replace(char_lm.SMALL, features=16, layers=1)
    saved, other = (char_lm.LanguageModel("gated", setting, nnx.Rngs(n)) for n in range(2))
    tokens = jnp.arange(6)[None]
    assert (saved(tokens) != other(tokens)).any()
    training.save(saved, tmp_path / "checkpoint")
    saved.init_cache(1, 6)  # a cache belongs to no checkpoint
    training.save(saved, tmp_path / "checkpoint")
    training.load(other, tmp_path / "checkpoint")
    assert (saved(tokens) == other(tokens)).all()


def test_smoothed():
    curve = [(1, 4.0), (2, 2.0), (3, 0.0)]
    assert training.smoothed(curve, 2) == [(1, 4.0), (2, 3.0), (3, 1.0)]

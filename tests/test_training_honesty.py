"""A text without any structure: whoever scores below the entropy of its symbols has seen the answer."""

import math

import numpy as np
import pytest

from softattn_lm.runs.metrics import read_metrics
from tests.tiny_run import tiny_train


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "formula"])
def test_on_independent_uniform_symbols_no_loss_falls_below_ln_v(tmp_path, attention):
    symbols = np.random.default_rng(0).integers(0, 16, 120_000)
    (tmp_path / "text.txt").write_text("".join(chr(ord("a") + s) for s in symbols), encoding="utf-8")
    run = tiny_train(
        tmp_path,
        f"attention={attention}",
        "model.d_model=32",
        "model.dropout=0.0",
        "training.accumulate=1",
        "batch_size=16",
        "steps=250",
        "training.val_every=250",
        "training.log_every=50",
    )
    rows = read_metrics(run)
    train = np.array([row["loss"] for row in rows if row["kind"] == "train"])
    validation = [row["loss"] for row in rows if row["kind"] == "validation"]
    # Less than one pass over the text; ten steps together predict 2,560 symbols, known to about 0.004 nats.
    assert train.reshape(-1, 10).mean(1).min() > math.log(16) - 0.01
    assert min(validation) > math.log(16) - 0.01
    assert train[-50:].mean() < math.log(16) + 0.1  # it did learn that there is nothing to learn

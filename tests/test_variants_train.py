"""Every attention there is learns on the shipped novels, and writes the same with its cache as without."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from softattn_lm.config.build import build
from softattn_lm.model.generate import generate
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.training.checkpoint import load_run
from tests.tiny_run import tiny_train

NO_VARIANT = {"custom", "pattern"}  # a place for a user's own, and a list of others
PATTERNS = {
    "pattern": ["attention=pattern", "attention.pattern=[uniform,uniform,sdpa]", "mask=pattern", "mask.pattern=SSSL"],
    "states and softmax": ["attention=pattern", "attention.pattern=[delta,delta,delta,sdpa]"],
    "pattern of positions": ["position=pattern", "position.pattern=[rotary,none]", "projections=shared_kv"],
}


def recipes() -> dict[str, list[str]]:
    """Name -> overrides, for every yaml whose kernel trains on a CPU."""
    names = sorted(path.stem for path in Path("configs/attention").glob("*.yaml") if path.stem not in NO_VARIANT)
    trainable = {}
    for name in names:
        node = yaml.safe_load(Path(f"configs/attention/{name}.yaml").read_text())
        kind = build({**node, **({"dropout": 0.0} if "dropout" in node else {})}).func
        if kind.trains_on is None or "cpu" in kind.trains_on:
            trainable[name] = [f"attention={name}"]
    return trainable | PATTERNS


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("variants")


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes())
def test_fifty_steps_on_austen_lower_the_loss_and_the_cache_changes_no_text(shared, name):
    overrides = [*recipes()[name], f"name={name.replace(' ', '-')}", "data=austen", "model.context=32", "steps=50"]
    sizes = ["model.n_layer=4", "model.d_model=32", "model.dropout=0.0"]
    run = tiny_train(shared, *overrides, *sizes, "training.accumulate=1", "training.val_every=50")
    losses = np.array([row["loss"] for row in read_metrics(run) if row["kind"] == "train"])
    assert losses[-10:].mean() < losses[:5].mean() - 0.3
    loaded = load_run(run)
    prompt = [int(token) for token in loaded.tokenizer.encode("Emma was")]
    texts = [list(generate(loaded.model, prompt, max_new_tokens=80, temperature=0, use_cache=c)) for c in (True, False)]
    assert texts[0] == texts[1]

"""training.score: at the end of a run each window of a split is scored with the final weights, and so is what a killed
process left behind."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from softattn_lm.errors import UserError
from softattn_lm.evaluation.likelihood import Likelihood
from softattn_lm.runs.status import read_status
from softattn_lm.training import scores
from softattn_lm.training.checkpoint import load_run
from softattn_lm.training.prepared import prepared_data
from tests.tiny_run import tiny_config, tiny_train

SCORED = ["training.score=[validation,test]", "data.test_fraction=0.2"]


def test_the_scores_of_a_run_add_up_to_its_own_validation(tmp_path: Path) -> None:
    run = tiny_train(tmp_path, *SCORED)
    summary = json.loads((run / "summary.json").read_text())
    scores = np.load(run / "scores" / "validation.npz")
    own = summary["validation"]["validation"]
    assert scores["nats"].sum() / scores["tokens"].sum() == pytest.approx(own["loss"], abs=1e-6)
    assert summary["scores"]["validation"]["loss"] == pytest.approx(own["loss"], abs=1e-6)
    assert summary["scores"]["validation"]["loss_se"] == pytest.approx(own["loss_se"], rel=1e-4)
    assert scores["tokens"].sum() == own["tokens"] == scores["position_tokens"].sum()
    assert scores["position_nats"].sum() == pytest.approx(scores["nats"].sum())
    test = summary["scores"]["test"]
    assert test["tokens"] == np.load(run / "scores" / "test.npz")["tokens"].sum() > own["tokens"]
    assert test["accuracy"] is None and "correct" not in scores


@pytest.mark.parametrize(
    ("words", "again"),
    [
        ([], ["test"]),
        (["data=recall", "tokenizer=symbols", "data.vocab_size=32", "data.test_sequences=64"], ["test"]),
        # Validated in bfloat16, and compared in float32.
        (["training.precision=bfloat16"], ["validation", "test"]),
    ],
)
def test_what_the_last_validation_has_scored_is_not_scored_again_and_is_the_same_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], again: list[str]
) -> None:
    asked: list[str] = []
    score = scores.score

    def counted(*given: Any) -> Likelihood:
        asked.append(given[2])
        return score(*given)

    monkeypatch.setattr(scores, "score", counted)
    typed = [word for word in (*SCORED, *words) if not (words[:1] == ["data=recall"] and "test_fraction" in word)]
    run = tiny_train(tmp_path, *typed)
    assert asked == again
    summary, written = json.loads((run / "summary.json").read_text()), np.load(run / "scores" / "validation.npz")
    prepared = prepared_data(tiny_config(tmp_path, *typed))
    arrays, figures = scores.summed_up(score(load_run(run).model, prepared, "validation", 256), prepared, "validation")
    assert figures == summary["scores"]["validation"] and arrays.keys() == {*written.files}
    for name, array in arrays.items():
        assert np.array_equal(written[name], array), name


def test_a_run_killed_behind_its_last_checkpoint_is_scored_when_it_is_taken_up_again(tmp_path: Path) -> None:
    run = tiny_train(tmp_path, *SCORED)
    summary, scores = json.loads((run / "summary.json").read_text()), np.load(run / "scores" / "test.npz")["nats"]
    for file in (run / "summary.json", run / "status.json", *(run / "scores").iterdir()):
        file.unlink()
    tiny_train(tmp_path, *SCORED, resume=run)
    assert read_status(run)["state"] == "finished"
    assert json.loads((run / "summary.json").read_text())["scores"] == summary["scores"]
    assert np.array_equal(np.load(run / "scores" / "test.npz")["nats"], scores)


def test_a_split_that_is_not_there_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"type data\.test_fraction=0\.1"):
        tiny_train(tmp_path, "training.score=[test]")
    with pytest.raises(UserError, match=r"training\.score must be a list of one of validation, test|must be a list"):
        tiny_config(tmp_path, "training.score=[train]")

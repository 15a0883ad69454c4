"""Runs on a task: what is trained, what is measured, that they resume, and what is said about them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from softattn_lm.commands import evaluate, prepare_data, sample
from softattn_lm.commands.measure_arm import measured
from softattn_lm.config.check import check
from softattn_lm.config.compose import compose
from softattn_lm.config.tree import config_folder
from softattn_lm.data.tasks import Recall, Sequences
from softattn_lm.data.windows import PADDED
from softattn_lm.errors import UserError
from softattn_lm.evaluation.likelihood import Likelihood
from softattn_lm.evaluation.recall import by_window
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.shares import Share, by_gap, by_pairs
from softattn_lm.training.checkpoint import load_run, read_checkpoint
from tests.tiny_run import losses, tiny_config, tiny_train

TASK = [
    "data=recall",
    "tokenizer=symbols",
    "data.n_pairs=[1,3]",
    "data.vocab_size=32",
    "data.validation_sequences=40",
    "data.test_sequences=30",
    "training.telemetry=false",
    "training.sample_every=null",
]


def without(override: str) -> list[str]:
    """TASK, but for what has the same key."""
    return [word for word in TASK if word.partition("=")[0] != override.partition("=")[0]]


def logits_for(choices: list[list[int]], vocab: int = 5) -> torch.Tensor:
    return 9.0 * F.one_hot(torch.tensor(choices), vocab).float()


def test_accuracy_is_the_share_of_answers_whose_likeliest_symbol_is_right() -> None:
    targets = torch.tensor([[PADDED, 3, 1], [2, PADDED, 4], [PADDED, PADDED, 0]])
    chosen = [[3, 3, 2], [2, 2, 4], [0, 0, 1]]  # right: one of two, two of two, none of one
    whole = Likelihood(task=True)
    whole.add(logits_for(chosen), targets)
    assert whole.result().accuracy == 3 / 5
    assert whole.right().tolist() == [[False, True, False], [True, False, True], [False, False, False]]
    text = Likelihood()
    text.add(logits_for(chosen), targets)
    assert text.result().accuracy is None
    # Two ranks, the second of which ends on a window in which nothing is asked.
    ranks = [Likelihood(task=True), Likelihood(task=True)]
    ranks[0].add(logits_for(chosen[:2]), targets[:2], 0)
    ranks[1].add(logits_for(chosen[2:]), targets[2:], 2)
    ranks[1].add(logits_for([[0, 0, 0]]), torch.full((1, 3), PADDED), 3)
    packed: list[torch.Tensor] = []
    for rank in ranks:  # what each hands to the sum: first how many windows, then their figures
        counts = iter([torch.tensor([3.0], dtype=torch.float64)])

        def reduce(value: torch.Tensor, counts: object = counts) -> torch.Tensor:
            first = next(counts, None)  # type: ignore[call-overload]
            if first is not None:
                return first
            packed.append(value)
            return sum(packed) if len(packed) == 2 else value  # type: ignore[return-value]

        last = rank.result(reduce=reduce)
    assert last.accuracy == 3 / 5 and last.nats_per_token == pytest.approx(whole.result().nats_per_token)


def test_accuracy_by_pairs_and_by_gap_counted_by_hand() -> None:
    y = np.full((3, 4), PADDED)
    gaps = np.zeros((3, 4), dtype=np.int64)
    right = np.zeros((3, 4), dtype=bool)
    for row, place, gap, is_right in (
        (0, 1, 1, True),
        (0, 3, 3, False),
        (1, 2, 2, True),
        (1, 3, 9, True),
        (2, 0, 8, False),
    ):
        y[row, place], gaps[row, place], right[row, place] = 1, gap, is_right
    right[2, 2] = True  # nobody asked
    found = by_window(right, Sequences(np.zeros_like(y), y, gaps, np.array([2, 2, 1])))
    assert found["correct"].tolist() == [1, 2, 0] and found["answers"].tolist() == [2, 2, 1]
    assert by_pairs(found) == {1: Share(0, 1), 2: Share(3, 4)}
    assert by_gap(found) == {"1": Share(1, 1), "2-3": Share(1, 2), "8-15": Share(1, 2)}
    assert by_pairs(found)[2].accuracy == 0.75


def test_a_run_tells_accuracy_at_validations_and_scores_every_window(tmp_path: Path) -> None:
    run = tiny_train(
        tmp_path, *TASK, "training.score=[validation,test]", "steps=60", "lr=0.01", "training.val_every=30"
    )
    rows = [row for row in read_metrics(run) if row["kind"] == "validation"]
    assert [row["step"] for row in rows] == [30, 60]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["validation"]["validation"]["accuracy"] == rows[-1]["accuracy"]
    prepared = Recall([1, 3], vocab_size=32, validation_sequences=40, test_sequences=30).prepared(16)
    for split, count in (("validation", 40), ("test", 30)):
        scores, figures = np.load(run / "scores" / f"{split}.npz"), summary["scores"][split]
        sequences = prepared.splits[split].sequences  # type: ignore[attr-defined]
        assert scores["answers"].tolist() == scores["pairs"].tolist() == sequences.pairs.tolist()
        assert len(scores["nats"]) == count and (scores["correct"] <= scores["answers"]).all()
        assert figures["accuracy"] == scores["correct"].sum() / scores["answers"].sum() > 0
        assert figures["loss"] == pytest.approx(scores["nats"].sum() / scores["answers"].sum())
        assert scores["gap_answers"].sum() == figures["tokens"] == scores["answers"].sum()
        assert scores["gap_correct"].sum() == scores["correct"].sum()
    assert rows[-1]["accuracy"] == pytest.approx(summary["scores"]["validation"]["accuracy"])
    # The model's own opinion, asked without any of that code.
    model = load_run(run).model
    sequences = prepared.splits["test"].sequences  # type: ignore[attr-defined]
    with torch.no_grad():
        said = model(torch.from_numpy(sequences.x)).argmax(-1).numpy()
    asked = sequences.y != PADDED
    assert (said == sequences.y)[asked].mean() == pytest.approx(summary["scores"]["test"]["accuracy"])


def test_how_a_step_is_divided_changes_no_loss_though_sequences_ask_for_different_numbers(tmp_path: Path) -> None:
    how = [*TASK, "steps=4", "model.dropout=0", "training.log_every=1"]
    whole = losses(tiny_train(tmp_path, *how, "training.accumulate=1", "name=whole"))
    parts = losses(tiny_train(tmp_path, *how, "training.accumulate=8", "name=parts"))
    assert parts == pytest.approx(whole, abs=1e-5)


def test_a_run_that_was_stopped_and_resumed_is_the_run_that_was_not(tmp_path: Path) -> None:
    how = [*TASK, "schedule=constant", "schedule.warmup=0", "steps=6", "training.save_every=1", "training.log_every=1"]
    whole = tiny_train(tmp_path, *how, "name=whole")
    first = tiny_train(tmp_path, *how, "steps=3", "name=parts")
    tiny_train(tmp_path, *how, "name=parts", resume=first)
    a, b = (read_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"] for run in (whole, first))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert losses(whole) == losses(first)


def test_an_arm_of_an_ablation_is_measured_on_its_task(tmp_path: Path) -> None:
    # Once it asked every data set for a text.
    found = measured(tiny_config(tmp_path, *TASK, "training.accumulate=2"))
    assert found["tokens_per_step"] == 8 * 16 and found["vocab_size"] == 32
    assert found["executed_flops_per_token"] > 0 and found["tokens_per_second"] > 0


def test_evaluate_and_sample_speak_of_answers_and_symbols(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_train(tmp_path, *TASK)

    def command(name: str, *overrides: str) -> dict[str, object]:
        return compose(name, [f"runs={tmp_path / 'runs'}", "device=cpu", *overrides], config_folder())

    evaluate.run(command("evaluate", "split=test", "by_position=true"), [str(run)])
    printed = capsys.readouterr().out
    assert all(title in printed for title in ("accuracy", "of 1 pairs", "of 3 pairs", "at gap 1", "at gap 4-7"))
    found = json.loads((run / "evaluation-test.json").read_text())
    assert found["by_pairs"].keys() == {"1", "3"} and 0 <= found["accuracy"] <= 1
    for overrides, says in ((["text=k1"], "leave text= out"), (["split=train"], "split=validation")):
        with pytest.raises(UserError, match=says):
            evaluate.run(command("evaluate", *overrides), [str(run)])
    sample.run(command("sample", "max_new_tokens=3"), [str(run), "k1 v2"])
    written = capsys.readouterr().out.split()
    assert written[:2] == ["k1", "v2"] and len(written) == 5


def test_what_makes_no_sense_for_a_task_is_answered_with_what_to_type(tmp_path: Path) -> None:
    for overrides, says in (
        (["tokenizer=char"], "data=recall brings its own symbols.*tokenizer=symbols"),
        (["epochs=2"], "has no epochs; type steps="),
        (["mask=documents"], "mask=documents.*type mask=causal"),
        (["data.length=8"], "type model.context=8"),
    ):
        with pytest.raises(UserError, match=says):
            tiny_train(tmp_path, *without(overrides[0]), *overrides)
    with pytest.raises(UserError, match="tokenizer=char, byte or bpe"):
        tiny_train(tmp_path, "tokenizer=symbols")
    cfg = compose("prepare_data", ["data=recall", f"runs={tmp_path}"], config_folder())
    with pytest.raises(UserError, match="nothing is to be prepared"):
        prepare_data.run(cfg, [])


@pytest.mark.parametrize("name", ["recall", "recall_published", "induction", "copy", "forget", "noisy_recall"])
def test_a_task_chooses_its_symbols_and_leaves_the_model_as_it_is(name: str) -> None:
    text, task = (check(compose("train", words, config_folder()), "TrainSettings") for words in ([], [f"data={name}"]))
    assert task["tokenizer"]["_target_"].endswith(".SymbolTokenizer")
    changed = {key for key in text if text[key] != task[key]}
    assert changed == {"data", "tokenizer"}

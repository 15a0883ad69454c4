"""What a run learns does not depend on how many processes it has, how they were started or how they share the model.

Processes talk over gloo on the processor; of NCCL only the choice is looked at.
"""

import math
import os
import shutil
import subprocess
import sys

import pytest
import torch

from softattn_lm.config.settings import TrainerSettings, TrainingSettings
from softattn_lm.data.windows import ValidationWindows
from softattn_lm.errors import UserError
from softattn_lm.model.generate import generate
from softattn_lm.runs.status import read_status
from softattn_lm.training.checkpoint import load_run
from softattn_lm.training.launch import check_device, make_trainer
from softattn_lm.training.prepared import prepared_data
from softattn_lm.training.validation import VALIDATION_TOKENS
from tests import device_matrix, ranks
from tests.device_matrix import WHOLE, Layout, read, words

PARTS, DDP, DDP_PARTS, FSDP = Layout("one", 1, 4), Layout("ddp", 2, 1), Layout("ddp", 2, 2), Layout("fsdp", 2, 1)
CASES = [("adamw", layout) for layout in (WHOLE, PARTS, DDP, DDP_PARTS, FSDP)]
CASES += [("muon", layout) for layout in (WHOLE, DDP_PARTS, FSDP)]
TRACKED = ("adamw", DDP_PARTS)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    return device_matrix.measure(tmp_path_factory.mktemp("matrix"), CASES, TRACKED)


def close(run, other):
    losses, weights = device_matrix.differences(run, other)
    assert losses <= 1e-6 and weights <= 1e-5, (losses, weights)
    for key in ("grad_norm", "lr", "tokens"):
        assert [row[key] for row in other.steps] == pytest.approx([row[key] for row in run.steps], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case[1] != WHOLE], ids=lambda case: f"{case[0]} {case[1]}")
def test_devices_and_accumulation_change_nothing_but_rounding(matrix, case):
    close(matrix[case[0], WHOLE], matrix[case])
    assert len(matrix[case].losses) == 20 and matrix[case].losses[-1] < matrix[case].losses[0] - 0.05


@pytest.mark.slow
def test_every_token_is_validated_once_also_when_one_process_runs_out_of_windows(matrix):
    whole = matrix["adamw", WHOLE]
    tokens = prepared_data(load_run(whole.folder).config).splits["validation"].tokens
    assert math.ceil(len(ValidationWindows(tokens, 8, VALIDATION_TOKENS // 8))) % 2 == 1  # batches, for two
    for (optimizer, layout), run in matrix.items():
        for row, other in zip(matrix[optimizer, WHOLE].validations, run.validations, strict=True):
            assert (other["step"], other["tokens"]) == (row["step"], len(tokens) - 1), layout
            assert other["loss"] == pytest.approx(row["loss"], abs=1e-6)
            assert other["loss_se"] == pytest.approx(row["loss_se"], rel=1e-4)


@pytest.mark.slow
def test_one_process_writes_speaks_and_samples_and_there_is_one_tracker_run(matrix):
    runs = matrix["adamw", WHOLE].folder.parent
    assert sorted(p.name for p in runs.iterdir()) == sorted(["cache", *(run.folder.name for run in matrix.values())])
    for (_, layout), run in matrix.items():
        assert [row["step"] for row in run.steps] == list(range(1, 21))
        assert sorted(p.name for p in (run.folder / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
        assert (run.folder / "samples.txt").read_text().count("--- step") == 1
        assert read_status(run.folder)["state"] == "finished"
        said = runs.parent / "said" / run.folder.name
        assert "validation loss" in (said / "rank0").read_text()
        if layout.devices > 1:
            assert (said / "rank1").read_text() == ""
    assert len(list((matrix[TRACKED].folder / "wandb").glob("offline-run-*"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_divided_model_is_saved_whole_and_writes_what_an_undivided_one_writes(matrix, optimizer):
    whole, divided = (load_run(matrix[optimizer, layout].folder) for layout in (WHOLE, FSDP))
    prompt = whole.tokenizer.encode("abc").tolist()
    for run in (whole, divided):
        assert all(type(p) is torch.nn.Parameter for p in run.model.parameters())
    ids = [list(generate(run.model, prompt, max_new_tokens=40, temperature=0.0)) for run in (whole, divided)]
    assert ids[0] == ids[1]
    # Sampled while it was still divided.
    texts = [(matrix[optimizer, layout].folder / "samples.txt").read_text() for layout in (WHOLE, FSDP)]
    assert texts[0] == texts[1] and len(texts[0]) > 200


@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy(matrix, tmp_path):
    """Muon's state, AdamW's and the weights are found whole in what FSDP saved, and divided again where it goes on."""

    def goes_on(saved_by, layout):
        run = tmp_path / f"{saved_by.strategy}-{layout.strategy}"
        shutil.copytree(matrix["muon", saved_by].folder, run)
        typed = [f"resume={run}", "steps=24", *device_matrix.trainer(layout), "logger=csv"]
        device_matrix.train(tmp_path / "said" / run.name, layout.devices, typed)
        return read(run)

    reference = goes_on(WHOLE, WHOLE)
    assert len(reference.losses) == 24
    for saved_by, layout in ((FSDP, FSDP), (FSDP, DDP), (FSDP, WHOLE), (WHOLE, FSDP)):
        close(reference, goes_on(saved_by, layout))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [FSDP, DDP_PARTS], ids=str)
def test_chunks_of_the_loss_and_layers_computed_twice_change_nothing_but_rounding(matrix, tmp_path, layout):
    (tmp_path / "text.txt").write_text(device_matrix.text(40_000))
    chosen = ["training.loss_chunk=5", "training.checkpoint_activations=block", "name=saving"]
    typed = [*words(tmp_path, "adamw", layout), *chosen]
    device_matrix.train(tmp_path / "said", layout.devices, typed)
    close(matrix["adamw", WHOLE], read(tmp_path / "runs" / "saving"))


@pytest.mark.slow
def test_several_devices_need_no_strategy_and_no_gradient_for_every_parameter(tmp_path):
    (tmp_path / "text.txt").write_text(device_matrix.text(40_000))
    found = []
    for name, how in (("one", ["trainer=cpu"]), ("two", ["trainer=cpu", "trainer.devices=2"])):
        typed = [word for word in words(tmp_path, "adamw", WHOLE) if not word.startswith(("trainer=", "steps="))]
        typed += [*how, "attention=uniform", "steps=5", f"name={name}"]  # queries and keys of it are never used
        device_matrix.train(tmp_path / "said" / name, 1 + (name == "two"), typed)
        found.append(read(tmp_path / "runs" / name))
    close(*found)


def launched(folder, *words):
    """A command of several processes, each of which imports everything anew."""
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_on_one_node_or_two_gives_what_one_process_gives(matrix, tmp_path, nodes):
    folder = matrix["adamw", WHOLE].folder.parent.parent
    typed = [word for word in words(folder, "adamw", DDP) if not word.startswith(("runs=", "trainer.devices="))]
    typed += [f"runs={tmp_path / 'runs'}", f"trainer.devices={2 // nodes}", f"trainer.num_nodes={nodes}", "name=both"]
    script = str(ranks.ROOT / "scripts" / "train.py")
    agent = ["-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={2 // nodes}"]
    agent += ["--master-addr=127.0.0.1", f"--master-port={ranks.free_port()}"]
    agents = [
        subprocess.Popen(
            [sys.executable, *agent, f"--node-rank={node}", script, *typed], cwd=tmp_path, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for node in range(nodes)
    ]  # fmt: skip
    said = [agent.communicate(timeout=300)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * nodes, said
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["both", "cache"]
    close(matrix["adamw", WHOLE], read(tmp_path / "runs" / "both"))


@pytest.mark.slow
def test_a_job_of_a_sweep_may_have_several_processes(matrix, tmp_path):
    folder = matrix["adamw", WHOLE].folder.parent.parent
    typed = [word for word in words(folder, "adamw", DDP) if not word.startswith(("runs=", "lr="))]
    typed += [f"runs={tmp_path / 'runs'}", "lr=0.01", "seed=0,1", "name=s"]
    done = launched(tmp_path, "softattn_lm", "train", "-m", *typed)
    jobs = sorted((tmp_path / "runs" / "s").glob("*/config.yaml"))
    assert [file.parent.name for file in jobs] == ["00-seed_0", "01-seed_1"], done.stdout
    first, second = (read(file.parent) for file in jobs)
    close(matrix["adamw", WHOLE], first)
    assert len(second.losses) == 20 and second.losses[1:] != first.losses[1:]


def test_processes_that_would_each_train_by_itself_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_device(TrainerSettings("cpu", 2, "ddp", 2))
    for settings in (TrainerSettings("cpu", 1, "auto", 1), TrainerSettings("cpu", "auto", "ddp", 2)):
        with pytest.raises(UserError, match=r"4 process.*; type trainer=ddp trainer.devices=2 trainer.num_nodes=2$"):
            check_device(settings)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp"])
def test_graphics_processors_talk_over_nccl(monkeypatch, tmp_path, strategy):
    """By configuration only: no device is asked for anything."""
    from lightning.fabric.accelerators import cuda

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(cuda, "num_cuda_devices", lambda: 8)
    for devices, ranks_expected in ((8, 16), ("auto", 16)):
        trainer = make_trainer(
            TrainerSettings("gpu", devices, strategy, 2), TrainingSettings(), tmp_path,
            steps=10, validates=False, callbacks=[], loggers=[],
        )  # fmt: skip
        assert trainer.world_size == ranks_expected
        assert trainer.strategy._get_process_group_backend() == "nccl"

"""Two processes and a signal, or a fault, in one of them: both leave, and what they leave behind is a whole step.

Here a launcher has started both, as torchrun does; tests at the end start the command as a person does.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from softattn_lm.runs.metrics import read_metrics
from softattn_lm.runs.status import read_status
from softattn_lm.training.checkpoint import load_run
from tests import ranks
from tests.tiny_run import losses, text, tiny_train

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143}
SAME = (
    "model.n_layer=1", "model.n_head=2", "model.d_model=16", "model.context=8", "model.dropout=0", "batch_size=8",
    "training.accumulate=2", "training.log_every=1", "schedule=constant", "logger=none", "data=text_file",
    "tokenizer=char", "optimizer=adamw",
)  # fmt: skip
TWO = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2")


def words(folder, *more, characters=6000, val_fraction=0.1):
    (folder / "text.txt").write_text(text(characters))
    place = [f"runs={folder / 'runs'}", f"data.path={folder / 'text.txt'}", "name=two"]
    return [*SAME, *TWO, *place, f"data.val_fraction={val_fraction}", *more]


def until(found, processes, seconds=60.0):
    """Waits for `found()`. Processes that end before are a failure."""
    deadline = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < deadline and all(ranks_alive(processes)), "not in time"
        time.sleep(0.01)
    return result


def ranks_alive(processes):
    return [p.poll() is None if isinstance(p, subprocess.Popen) else p.is_alive() for p in processes]


def trained(folder, steps):
    """Whether the run has written this many steps."""
    return lambda: sum(row["kind"] == "train" for row in read_metrics(folder / "runs" / "two")) >= steps


def describes_a_whole_step(run):
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    step = saved["softattn"]["step"]
    done = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
    states = [state["step"] for optimizer in saved["optimizer_states"] for state in optimizer["state"].values()]
    assert saved["global_step"] == step and set(done.values()) == {2 * step} and {int(s) for s in states} == {step}
    status, rows = read_status(run), [row for row in read_metrics(run) if row["kind"] == "train"]
    assert (status["state"], status["step"]) == ("interrupted", step)
    assert [row["step"] for row in rows] == list(range(1, step + 1))
    assert load_run(run).step == step
    return step


@pytest.mark.slow
@pytest.mark.parametrize("number", STATUS, ids=lambda number: number.name)
@pytest.mark.parametrize("targets", [[0], [1], [0, 1]], ids=["rank 0", "rank 1", "both"])
def test_a_signal_to_any_process_ends_all_at_one_step(tmp_path, number, targets):
    typed = words(tmp_path, "steps=100000", "training.val_every=100000")
    processes = ranks.start(2, tmp_path / "said", ranks.command, typed)
    until(trained(tmp_path, 3), processes)
    for rank in targets:
        os.kill(processes[rank].pid, number)
    assert ranks.wait(processes, 10) == [STATUS[number]] * 2, (tmp_path / "said" / "rank0").read_text()
    step = describes_a_whole_step(tmp_path / "runs" / "two")
    if (number, targets) == (signal.SIGTERM, [1]):
        # One process to whom nothing happened.
        how = [word for word in SAME if not word.startswith("data=")]
        one = tiny_train(tmp_path, *how, "name=one", f"steps={step}")
        assert losses(tmp_path / "runs" / "two") == pytest.approx(losses(one), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "targets"), [(signal.SIGINT, [1]), (signal.SIGTERM, [0, 1]), (signal.SIGUSR1, [0])])
def test_a_signal_in_the_middle_of_validation_does_not_wait_for_its_end(tmp_path, number, targets):
    # 250,000 windows: half a minute and more.
    typed = words(tmp_path, "steps=9", "training.val_every=2", characters=4_000_000, val_fraction=0.5)
    processes = ranks.start(2, tmp_path / "said", ranks.command, typed)
    until(trained(tmp_path, 2), processes)
    time.sleep(0.3)
    for rank in targets:
        os.kill(processes[rank].pid, number)
    assert ranks.wait(processes, 10) == [STATUS[number]] * 2, (tmp_path / "said" / "rank0").read_text()
    assert describes_a_whole_step(tmp_path / "runs" / "two") == 2
    assert not [row for row in read_metrics(tmp_path / "runs" / "two") if row["kind"] == "validation"]


def one_rank_raises(typed):
    """The second process meets a fault of its own in its sixth micro-batch."""
    from softattn_lm.training.lit import LitGPT

    real = LitGPT.training_step

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 5:
            raise RuntimeError("the second device has fallen off the bus")
        return real(self, batch, batch_idx)

    LitGPT.training_step = training_step
    ranks.command(typed)


@pytest.mark.slow
def test_a_process_that_raises_ends_all_with_its_traceback(tmp_path):
    processes = ranks.start(2, tmp_path / "said", one_rank_raises, words(tmp_path, "steps=100000"))
    assert ranks.wait(processes, 60) == [70, 70]
    said = (tmp_path / "said" / "rank1").read_text()
    assert "in training_step" in said and "RuntimeError: the second device has fallen off the bus" in said
    assert read_status(tmp_path / "runs" / "two")["state"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("validating", [False, True], ids=["training", "validating"])
def test_a_process_that_is_killed_ends_all(tmp_path, rank, validating):
    how = {"characters": 4_000_000, "val_fraction": 0.5} if validating else {}
    typed = words(tmp_path, "steps=100000", "training.val_every=2", "training.save_every=1", **how)
    processes = ranks.start(2, tmp_path / "said", ranks.command, typed)
    until(trained(tmp_path, 2), processes)
    time.sleep(0.3)
    processes[rank].kill()
    codes = ranks.wait(processes, 60)
    assert codes[rank] == -signal.SIGKILL and codes[1 - rank] == 70, codes
    assert "Traceback" in (tmp_path / "said" / f"rank{1 - rank}").read_text()
    load_run(tmp_path / "runs" / "two")


# -- as a person starts it --------------------------------------------------------------------------------------------


def begun(folder, *more):
    """`softattn train` in a process group of its own; Lightning starts the second process."""
    words_typed = [sys.executable, "-m", "softattn_lm", "train", *words(folder, *more)]
    with (folder / "said").open("w") as said:
        return subprocess.Popen(words_typed, cwd=folder, start_new_session=True, stdout=said, stderr=said)


def companion_of(process):
    """The id of the process that Lightning has started beside it; None before."""
    try:
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
            children = file.read().split()
        found = [pid for pid in children if "LOCAL_RANK=1" in Path(f"/proc/{pid}/environ").read_text()]
    except (FileNotFoundError, ProcessLookupError):  # it had started something else, which has ended
        return None
    return int(found[0]) if found else None


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


linux = pytest.mark.skipif(not os.path.exists(f"/proc/self/task/{os.getpid()}/children"), reason="reads Linux's /proc")


@linux
@pytest.mark.slow
def test_ctrl_c_reaches_the_whole_group_and_the_command_says_130(tmp_path):
    process = begun(tmp_path, "steps=100000", "training.val_every=100000")
    until(trained(tmp_path, 3), [process], 120)
    companion = companion_of(process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(10) == 130, (tmp_path / "said").read_text()
    until(lambda: gone(companion), [], 10)
    describes_a_whole_step(tmp_path / "runs" / "two")
    assert "Traceback" not in (tmp_path / "said").read_text()


@linux
@pytest.mark.slow
def test_a_companion_does_not_outlive_the_first_process_even_before_they_have_met(tmp_path):
    process = begun(tmp_path, "steps=100000")
    companion = until(lambda: companion_of(process), [process], 120)
    process.kill()
    process.wait()
    until(lambda: gone(companion), [], 60)
    assert "the first process of this run has gone" in (tmp_path / "said").read_text()


@linux
@pytest.mark.slow
def test_the_first_process_does_not_outlive_its_companion(tmp_path):
    process = begun(tmp_path, "steps=100000")
    until(trained(tmp_path, 3), [process], 120)
    os.kill(companion_of(process), signal.SIGKILL)
    assert process.wait(60) in (70, -signal.SIGKILL)  # it meets the fault itself, or Lightning kills it

"""An ablation that is interrupted, killed, or loses one run: the same command goes on, and the table is the same."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from softattn_lm.ablation import journal
from softattn_lm.runs.status import read_status
from tests.ablation import ablate, losses, rows, started

TYPED = ["attention=sdpa,linear", "seeds=2", "slots=2", "name=x", "steps=250", "training.save_every=50"]
TYPED += ["lines=true"]
RUN = "report/sdpa/seed-0"


def until(there: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def saved(folder: Path) -> bool:
    """Whether the first run has a checkpoint and has not ended."""
    run = folder / RUN
    return (run / "checkpoints" / "last.ckpt").is_file() and read_status(run).get("state") == "running"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert ablate(folder, *TYPED) == 0
    yield folder / "runs" / "x"


@pytest.mark.slow
def test_interrupted_killed_and_robbed_of_a_run_it_ends_with_the_same_table_elsewhere_too(
    tmp_path: Path, undisturbed: Path
) -> None:
    first = tmp_path / "first"
    first.mkdir()
    folder = first / "runs" / "x"

    process = started(first, *TYPED)
    until(lambda: saved(folder))
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=90)
    assert process.returncode == 130 and "the same command goes on" in said
    assert read_status(folder / RUN)["state"] == "interrupted" and 0 < read_status(folder / RUN)["step"] < 250
    assert journal.read(folder, "stopped")[-1]["by"] == "signal"

    (folder / RUN / "status.json").unlink()  # or the next wait would end at once
    process = started(first, *TYPED)
    until(lambda: saved(folder))
    process.kill()
    process.communicate(timeout=90)

    # The folder is moved to another place, as to another machine; runs of the killed process save there and end.
    until(lambda: read_status(folder / RUN).get("state") in ("interrupted", "finished"))
    time.sleep(0.5)
    second = tmp_path / "second"
    shutil.move(first, second)
    folder = second / "runs" / "x"
    process = started(second, *TYPED)
    until(lambda: len(victims(folder)) > 0 or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    os.kill(victims(folder)[0], signal.SIGKILL)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "SIGKILL; it is continued" in said
    assert losses(folder) == losses(undisturbed) and len(losses(folder)) == 4
    # With the n-gram, which is counted before the runs, and the run of the uniform kernel, which is the last of them.
    assert (folder / "table.csv").read_text() == (undisturbed / "table.csv").read_text()
    assert "uniform,for scale,1," in (folder / "table.csv").read_text()
    assert len([row for row in rows(folder / "slots.jsonl") if row["code"] == -signal.SIGKILL]) == 1


def victims(folder: Path) -> list[int]:
    """First processes of the runs that train in this folder: they hold their log open, and their parent does not.
    wandb's own process holds it too, and outlives a run that was killed.
    """
    parents = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            said = os.readlink(place / "fd" / "1")
            if "wandb" in Path(os.readlink(place / "exe")).name:
                continue
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if said.startswith(f"{folder}/report/") and said.endswith("log.txt") and parent != 1:
            parents[int(place.name)] = parent
    return [pid for pid, parent in parents.items() if parent not in parents]


@pytest.mark.slow
def test_a_second_process_is_refused_while_the_first_is_at_work(tmp_path: Path) -> None:
    process = started(tmp_path, *TYPED)
    until(lambda: saved(tmp_path / "runs" / "x"))
    other = started(tmp_path, *TYPED)
    said, _ = other.communicate(timeout=60)
    assert other.returncode == 2 and "another process is at work" in said
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=90)
    assert process.returncode == 143


def test_what_a_killed_process_left_of_an_event_is_passed_over(tmp_path: Path) -> None:
    journal.append(tmp_path, "planned", seeds=[0])
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b'{"event": "chosen_rate", "arm": "x"')
    journal.append(tmp_path, "started")
    assert [row["event"] for row in journal.read(tmp_path)] == ["planned", "started"]

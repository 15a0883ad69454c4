"""kill -9, full disks and broken files: there is always a whole checkpoint, and never half of anything else."""

import os
import re
import resource
import shutil
import signal
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path

import hydra
import pytest
from rich.console import Console

from softattn_lm import cli
from softattn_lm.config.tree import config_folder
from softattn_lm.runs.config import read_config
from softattn_lm.runs.files import remove_left_over
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.runs.status import read_status
from softattn_lm.training.checkpoint import read_checkpoint
from softattn_lm.training.run import train
from tests import sabotage
from tests.tiny_run import tiny_train
from tests.warm import Child, tiny_words

SETTINGS = ("steps=6", "training.val_every=2", "training.log_every=1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing happens to."""
    return tiny_train(tmp_path_factory.mktemp("whole"), *SETTINGS)


def rows(run):
    return [{**row, "seconds": 0} for row in read_metrics(run)]


def saved(run, name="last"):
    return read_checkpoint(run / "checkpoints" / f"{name}.ckpt")


def goes_on_as_if_nothing_had_been(run, whole):
    train(read_config(run), run, resume=True, console=Console(quiet=True))
    assert rows(run) == rows(whole)
    assert not list(run.rglob("*.tmp"))
    for name in ("last", "best"):
        assert saved(run, name)["softattn"]["step"] == saved(whole, name)["softattn"]["step"]
    for name, value in saved(run)["state_dict"].items():
        assert value.equal(saved(whole)["state_dict"][name]), name


@pytest.fixture(params=["here", "another file system"])
def place(request, tmp_path):
    """A folder for runs; the second lies on another file system than the temporary folder, if this machine has one."""
    if request.param == "here":
        yield tmp_path
        return
    memory = Path("/dev/shm")
    if not memory.is_dir() or os.stat(memory).st_dev == os.stat(tempfile.gettempdir()).st_dev:
        pytest.skip("no second file system here")
    folder = Path(tempfile.mkdtemp(dir=memory))
    yield folder
    shutil.rmtree(folder)


def test_killed_within_a_save_the_checkpoint_before_it_is_whole(place, whole):
    mark, run = place / "mark", place / "runs" / "a"
    words = tiny_words(place, "name=a", *SETTINGS)
    child = Child(place, *words, sabotage=sabotage.within_save, arguments=(4, "last", mark, 60.0))
    child.when(mark.exists)
    child.signal(signal.SIGKILL)
    assert child.wait() == 128 + signal.SIGKILL
    assert saved(run)["global_step"] == 2
    left = list((run / "checkpoints").glob("*.tmp"))
    assert len(left) == 1 and left[0].read_bytes() == b"half a checkpoint"  # in the run folder, on its file system
    assert read_status(run)["state"] == "running"
    goes_on_as_if_nothing_had_been(run, whole)


def test_killed_between_last_and_best_the_next_start_makes_up_for_it(tmp_path):
    """Even where there is nothing else to do: it was the last step."""
    run = tmp_path / "runs" / "a"
    words = tiny_words(tmp_path, "name=a", *SETTINGS[1:], "steps=2")
    child = Child(tmp_path, *words, sabotage=sabotage.die_before_link, arguments=("best",))
    assert child.wait() == 128 + signal.SIGKILL
    assert (saved(run)["softattn"]["best"]["step"], saved(run)["global_step"]) == (2, 2)
    assert [path.name for path in (run / "checkpoints").glob("*.ckpt")] == ["last.ckpt"]
    child = Child(tmp_path, "resume=a")
    assert child.wait() == 0 and "already at step 2 of 2" in child.said
    assert saved(run, "best")["global_step"] == 2


def test_killed_before_a_step_that_is_to_be_kept_had_its_name_it_gets_it_later(tmp_path):
    run = tmp_path / "runs" / "a"
    words = tiny_words(tmp_path, "name=a", *SETTINGS, "training.keep_steps=[2,4]")
    child = Child(tmp_path, *words, sabotage=sabotage.die_before_link, arguments=("step-00000004",))
    assert child.wait() == 128 + signal.SIGKILL
    train(read_config(run), run, resume=True, console=Console(quiet=True))
    assert {path.stem: saved(run, path.stem)["global_step"] for path in (run / "checkpoints").iterdir()} == {
        "last": 6, "best": 6, "step-00000002": 2, "step-00000004": 4,
    }  # fmt: skip


def test_a_full_disk_is_one_line_and_the_checkpoint_before_it_stays(tmp_path, whole):
    """First there is room for rows and none for a checkpoint; then, in a later step, not even for that."""
    tiny_train(tmp_path, *SETTINGS, "name=a", "steps=2", "schedule=constant")
    run = tmp_path / "runs" / "a"
    before = (run / "checkpoints" / "last.ckpt").read_bytes()
    for room in (len(before) // 2, (run / "metrics.jsonl").stat().st_size + 300):
        child = Child(tmp_path, "resume=a", "steps=6", sabotage=sabotage.small_files, arguments=(room,))
        assert child.wait() == 2
        (line,) = [line for line in child.said.splitlines() if line.startswith("error")]
        assert re.search("could not be written: (File too large|No space left on device); .*resume=", line)
        assert "Traceback" not in child.said
        assert (run / "checkpoints" / "last.ckpt").read_bytes() == before
        assert not list(run.rglob("*.tmp"))
    child = Child(tmp_path, "resume=a", "steps=6")
    assert child.wait() == 0, child.said
    assert [row["step"] for row in read_metrics(run) if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]


def test_a_folder_that_may_not_be_written_is_one_line(tmp_path):
    for file in (Path(hydra.__file__), config_folder()):
        if os.geteuid() == 0 and not all(p.stat().st_mode & stat.S_IXOTH for p in file.resolve().parents):
            pytest.skip(f"runs as root, and a user without rights cannot come to {file}")
    place = Path(tempfile.mkdtemp())  # one that a user without rights can come to, which tmp_path is not
    try:
        place.chmod(0o755)
        words = tiny_words(place, "name=a", *SETTINGS)
        (place / "said.txt").touch()
        who = sabotage.nobody if os.geteuid() == 0 else None
        if who is None:
            place.chmod(stat.S_IRUSR | stat.S_IXUSR)
        child = Child(place, *words, f"runs={place / 'runs'}", sabotage=who)
        assert child.wait() == 2, child.said
        assert child.said == f"error: {place / 'runs'} could not be written: Permission denied\n"
    finally:
        place.chmod(0o755)
        shutil.rmtree(place)


@pytest.mark.parametrize("keep", [0, 10, 0.5, -10])
def test_a_torn_checkpoint_is_named_in_one_line_and_left_as_it_is(tmp_path, keep):
    tiny_train(tmp_path, *SETTINGS, "name=a", "steps=2")
    path = tmp_path / "runs" / "a" / "checkpoints" / "last.ckpt"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    torn, status = path.read_bytes(), read_status(tmp_path / "runs" / "a")
    child = Child(tmp_path, "resume=a", "steps=6")
    assert child.wait() == 2
    assert child.said.count("\n") == 1 and "runs/a/checkpoints/last.ckpt" in child.said
    assert path.read_bytes() == torn and read_status(tmp_path / "runs" / "a") == status


def test_a_run_killed_while_its_folder_is_made_leaves_the_name_free(tmp_path, monkeypatch):
    from softattn_lm.runs import new

    class Killed(BaseException):
        pass

    def die(*given):
        raise Killed

    monkeypatch.setattr(new, "versions", die)
    with pytest.raises(Killed):
        new.new_run(tmp_path, "a", {"seed": 0})
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert new.new_run(tmp_path, "a", {"seed": 0}) == tmp_path / "a"


@contextmanager
def room_for(n_bytes):
    """No file of this process may grow beyond that: what a full disk does to the largest ones."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# what is typed, what is written first, and what is shown all the same
ON_A_FULL_DISK = {
    "evaluate": (["a"], r"a/evaluation-validation\.json", "nats per token"),
    "telemetry": (["a"], r"a/telemetry\.png", "entropy"),
    "probe_scale": (["a"], r"a/probe_scale\.json", "std s"),
    "prepare_data": (["data=text_file", "tokenizer=char"], r"cache", ""),
    "train": (["-m", "seed=0,1"], r"b/sweep\.json", ""),
}


@pytest.mark.parametrize("command", ON_A_FULL_DISK)
def test_a_full_disk_is_one_line_for_every_command_and_what_was_measured_is_shown(
    command, whole, tmp_path, capsys, monkeypatch
):
    words, file, shown = ON_A_FULL_DISK[command]
    if words == ["a"]:
        shutil.copytree(whole.parent, tmp_path / "runs")
        (tmp_path / "runs" / whole.name).rename(tmp_path / "runs" / "a")
    if command == "train":
        words = [*tiny_words(tmp_path), *words, "name=b"]
    if command == "prepare_data":
        (tmp_path / "text.txt").write_text("a text of many letters " * 100)
        words = [*words, f"data.path={tmp_path / 'text.txt'}"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop, room_for(8 if command == "train" else 800):
        cli.main(command, [*words, "runs=runs"])
    said = capsys.readouterr()
    assert stop.value.code == 2 and shown in said.out
    assert re.fullmatch(rf"error: runs/{file} could not be written: File too large; make room\n", said.err), said.err
    assert not list((tmp_path / "runs").rglob("*.tmp")) + list((tmp_path / "runs").rglob(".unfinished-*"))


def test_a_read_only_disk_and_a_file_that_may_not_be_opened_are_one_line_and_other_errors_are_ours(capsys, monkeypatch):
    import errno

    for code, said in (
        (errno.EROFS, "error: x.json could not be written: Read-only file system\n"),
        (errno.EACCES, "error: x.json cannot be read or written: Permission denied\n"),
        (errno.EISDIR, "error: x.json cannot be read or written: Is a directory\n"),
        (errno.ENOENT, "FileNotFoundError: [Errno 2] No such file or directory: 'x.json'\n"),
    ):

        def refuse(*given, code=code):
            raise OSError(code, os.strerror(code), "x.json")

        monkeypatch.setattr(cli, "_dispatch", refuse)
        with pytest.raises(SystemExit) as stop:
            cli.main("evaluate", [])
        assert stop.value.code == (70 if code == errno.ENOENT else 2)
        assert capsys.readouterr().err.endswith(said)


@pytest.mark.parametrize(("others", "said"), [(True, "; a new run goes on from what is kept: fork=a@4"), (False, "")])
def test_a_run_whose_last_checkpoint_is_gone_is_not_begun_again(tmp_path, others, said):
    """It says so, and what can be gone on from; its record stays."""
    run = tiny_train(tmp_path, *SETTINGS, "name=a", "training.keep_steps=[4]")
    for name in ("last", "best"):
        (run / "checkpoints" / f"{name}.ckpt").unlink()
    if not others:
        (run / "checkpoints" / "step-00000004.ckpt").write_bytes(b"torn")
    before = rows(run)
    child = Child(tmp_path, "resume=a")
    assert child.wait() == 2
    assert child.said == f"error: runs/a/checkpoints/last.ckpt is gone, so run a cannot be continued{said}\n"
    assert rows(run) == before and read_status(run)["state"] == "finished"


def test_a_run_killed_before_its_first_step_begins_again_though_step_0_is_kept(tmp_path):
    words = tiny_words(tmp_path, "name=a", *SETTINGS, "training.keep_steps=[0]")
    child = Child(tmp_path, *words, sabotage=sabotage.die_behind_save, arguments=(0,))
    assert child.wait() == 128 + signal.SIGKILL
    child = Child(tmp_path, "resume=a")
    assert child.wait() == 0 and "has saved no checkpoint yet, so it begins again" in child.said


def test_what_a_killed_process_left_goes_and_what_a_person_put_there_stays(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in ("notes.tmp", "checkpoints/mine.7.tmp", "status.json.71.tmp", "checkpoints/last.ckpt.72.tmp"):
        (tmp_path / name).touch()
    remove_left_over(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*.tmp")) == ["mine.7.tmp", "notes.tmp"]

"""Run folders: exclusive, findable, continued only where that is the same experiment. No torch."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from softattn_lm.errors import UserError
from softattn_lm.runs.changes import resumed_config
from softattn_lm.runs.config import read_config
from softattn_lm.runs.find import find_run, run_folders
from softattn_lm.runs.metrics import cut_metrics, read_metrics
from softattn_lm.runs.names import run_name, runs_folder
from softattn_lm.runs.new import discard_unbegun, made_folder, new_run
from softattn_lm.runs.status import read_status, write_status
from softattn_lm.runs.versions import versions

CONFIG = {
    "seed": 0,
    "lr": 0.02,
    "steps": 100,
    "tokens": None,
    "epochs": None,
    "batch_size": 12,
    "model": {"context": 64},
    "logger": {"name": "csv"},
    "trainer": {"accelerator": "auto"},
    "attention": {"_target_": "a.B"},
    "training": {"accumulate": 4, "val_every": 250, "keep_steps": []},
}


def test_a_run_folder_holds_its_config_and_versions(tmp_path):
    folder = new_run(tmp_path / "runs", "a", CONFIG)
    assert folder == tmp_path / "runs" / "a"
    assert read_config(folder) == CONFIG
    found = json.loads((folder / "versions.json").read_text())
    assert found["python"].count(".") == 2 and found["torch"] and found["lightning"]


def test_two_runs_never_share_a_folder_even_when_started_at_the_same_moment(tmp_path):
    made, refused = [], []

    def start(name):
        try:
            made.append(new_run(tmp_path, name, CONFIG))
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start, args=(name,)) for name in ["same"] * 8 + [None] * 8]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == len(set(made)) == 9
    assert len(refused) == 7 and all("resume=same" in line for line in refused)
    assert not any("=" in folder.name for folder in made)


@pytest.mark.parametrize("name", ["a=b", "a/b", "a/b/c", "/a", "a/..", "", "..", "-m", "a b", "cache"])
def test_a_name_that_would_need_quoting_or_leave_the_folder_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="name="):
        new_run(tmp_path, name, CONFIG)
    assert list(tmp_path.iterdir()) == []


def trained(folder):
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "last.ckpt").touch()
    return folder


def test_a_run_is_found_by_path_by_name_by_unique_beginning_and_as_the_newest(tmp_path):
    first, second = (trained(new_run(tmp_path, name, CONFIG)) for name in ("apple", "apricot"))
    os.utime(first / "config.yaml", ns=(2_000_000_000_000_000_000, 2_000_000_000_000_000_000))
    os.utime(second / "config.yaml", ns=(1_000_000_000_000_000_000, 1_000_000_000_000_000_000))
    assert find_run(str(second), tmp_path) == second
    assert find_run("apricot", tmp_path) == second
    assert find_run("app", tmp_path) == first
    assert find_run(None, tmp_path) == first
    with pytest.raises(UserError, match="apple, apricot"):
        find_run("ap", tmp_path)
    with pytest.raises(UserError, match="did you mean apricot"):
        find_run("aprikot", tmp_path)
    with pytest.raises(UserError, match=r"scripts/train\.py"):
        find_run(None, tmp_path / "nowhere")


def test_the_newest_run_is_one_that_has_a_checkpoint(tmp_path):
    new_run(tmp_path, "refused", CONFIG)
    with pytest.raises(UserError, match=r"no run below .* has saved a checkpoint yet; the newest is refused"):
        find_run(None, tmp_path)
    usable = trained(new_run(tmp_path, "usable", CONFIG))
    later = new_run(tmp_path, "later", CONFIG)
    os.utime(later / "config.yaml", ns=(2_000_000_000_000_000_000, 2_000_000_000_000_000_000))
    assert find_run(None, tmp_path) == usable
    assert find_run("later", tmp_path) == later  # which resume= may continue
    with pytest.raises(UserError, match=r"the newest is usable$"):
        find_run("zzz", tmp_path)


def test_runs_that_are_being_made_or_vanish_while_they_are_listed_are_no_runs(tmp_path, monkeypatch):
    """One run tripped over the temporary folder of another that was made at the same moment."""
    kept = trained(new_run(tmp_path, "kept", CONFIG))
    made, gone = tmp_path / ".made.12ab.tmp", trained(new_run(tmp_path, "gone", CONFIG))
    (made / "inner").mkdir(parents=True)
    for folder in (made, made / "inner"):
        (folder / "config.yaml").touch()
    scandir = os.scandir

    def racing(place):
        assert made not in (Path(place), *Path(place).parents), "a folder that is only being made was read"
        if Path(place) == gone and gone.exists():
            gone.rename(tmp_path / ".gone")
        return scandir(place)

    monkeypatch.setattr(os, "scandir", racing)
    assert run_folders(tmp_path) == [kept]
    assert find_run("ke", tmp_path) == find_run(None, tmp_path) == kept


def test_a_run_that_vanishes_behind_the_list_is_not_the_newest(tmp_path, monkeypatch):
    kept = new_run(tmp_path, "kept", CONFIG)
    gone = tmp_path / "zzz-gone"
    monkeypatch.setattr("softattn_lm.runs.find.run_folders", lambda root: [kept, gone])
    with pytest.raises(UserError, match="the newest is kept"):
        find_run(None, tmp_path)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"the folder .*file/inner cannot be made: Not a directory; type another runs="):
        made_folder(tmp_path / "file" / "inner")


def made_by_a_sweep(root, name):
    sweep, job = name.split("/")
    (root / sweep / "jobs").mkdir(parents=True, exist_ok=True)
    (root / sweep / "jobs" / f"{job}.yaml").touch()
    return new_run(root, name, CONFIG)


def test_the_jobs_of_a_sweep_are_runs_one_folder_deeper(tmp_path):
    folder = trained(made_by_a_sweep(tmp_path, "sweep/job0"))
    assert folder == tmp_path / "sweep" / "job0"
    assert find_run("sweep/job0", tmp_path) == find_run("job0", tmp_path) == find_run(None, tmp_path) == folder


def test_jobs_that_are_called_alike_are_told_apart_by_their_sweeps(tmp_path):
    one, two = (made_by_a_sweep(tmp_path, f"{sweep}/00") for sweep in ("sweep-1", "sweep-2"))
    with pytest.raises(UserError, match="could be any of 2: sweep-1/00, sweep-2/00"):
        find_run("00", tmp_path)
    for folder in (one, two):
        name = run_name(folder, tmp_path)
        assert find_run(name, tmp_path) == folder and name.endswith("/00")
    assert find_run("sweep-2", tmp_path) == two
    with pytest.raises(UserError, match=r"did you mean sweep-1/00"):
        find_run("sweeep-1/0", tmp_path)
    with pytest.raises(UserError, match=r"the newest is sweep-[12]/00$"):
        find_run("zzz", tmp_path)
    assert run_name(one, tmp_path / "elsewhere") == str(one)


def test_a_folder_in_which_nothing_began_is_removed_and_any_other_stays(tmp_path):
    empty, begun, job = new_run(tmp_path, "a", CONFIG), new_run(tmp_path, "b", CONFIG), made_by_a_sweep(tmp_path, "s/0")
    for folder in (empty, begun, job):
        write_status(folder, "failed", step=0, steps=10, error="no")
        (folder / "metrics.jsonl").write_text("")
        (folder / "metrics.csv").write_text("\r\n")
    (begun / "metrics.jsonl").write_text("{}\n")
    for folder in (empty, begun, job):
        discard_unbegun(folder)
    assert [folder.exists() for folder in (empty, begun, job)] == [False, True, True]
    assert len(list(begun.iterdir())) == len(list(job.iterdir())) == 5


def test_a_folder_called_like_a_home_is_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert runs_folder("~/runs") == tmp_path / "home" / "runs"
    assert new_run("~nobody-is-called-so", "a", CONFIG).resolve() == tmp_path / "~nobody-is-called-so" / "a"
    assert find_run("~nobody-is-called-so/a", "runs").name == "a"


def test_an_empty_folder_is_no_run_and_may_become_one(tmp_path):
    (tmp_path / "empty").mkdir()
    for text in ("empty", str(tmp_path / "empty")):
        with pytest.raises(UserError, match=r"empty is an empty folder and no run: it has no config\.yaml"):
            find_run(text, tmp_path)
    assert read_config(new_run(tmp_path, "empty", CONFIG)) == CONFIG


def test_a_folder_that_only_looks_like_a_run_is_no_run(tmp_path):
    (tmp_path / "cache").mkdir()
    with pytest.raises(UserError, match="no run"):
        find_run("cache", tmp_path)
    folder = new_run(tmp_path, "a", CONFIG)
    (folder / "config.yaml").write_text("just words")
    with pytest.raises(UserError, match="mapping"):
        read_config(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 200},
        {"logger": {"name": "wandb"}},
        {"trainer": {"accelerator": "cpu"}},
        {"trainer.devices": 2},
        {"training.val_every": 10},
        {"training.keep_steps": [1, 2]},
        {"training.num_workers": 2},
        {"training.nonfinite": "skip"},
        {"training.max_skipped": 3},
        {"lr": 0.02},
        {"attention": {"_target_": "a.B"}},
        {"resume": "a"},
        {"runs": "elsewhere"},
    ],
)
def test_a_continued_run_may_change_how_long_where_and_what_is_written(changes):
    config = resumed_config(CONFIG, changes)
    for key, value in changes.items():
        if key not in ("resume", "runs"):
            node = config
            for part in key.split("."):
                node = node[part]
            assert node == value
    assert config["training"]["accumulate"] == 4 and config["batch_size"] == 12


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 0.01},
        {"seed": 1},
        {"batch_size": 24},
        {"model.context": 128},
        {"attention": {"_target_": "a.C"}},
        {"training.accumulate": 2},
        {"training.clip": 2.0},
        {"experiment": "nanogpt_cpu"},
        {"training": {"accumulate": 1}},
        {"loggers": 1},
    ],
)
def test_anything_else_is_refused_by_name(changes):
    ((name, _),) = changes.items()
    with pytest.raises(UserError, match=f"^{name} cannot change"):
        resumed_config(CONFIG, {"steps": 200, **changes})


def test_a_new_budget_replaces_the_old_one_in_whatever_unit():
    config = resumed_config(CONFIG, {"tokens": 5000})
    assert (config["steps"], config["tokens"], config["epochs"]) == (None, 5000, None)
    assert CONFIG["steps"] == 100  # the saved settings themselves are not touched


def test_the_status_says_how_far_a_run_came(tmp_path):
    assert read_status(tmp_path) == {}
    write_status(tmp_path, "failed", step=3, steps=10, error="it broke")
    assert read_status(tmp_path) == {"state": "failed", "step": 3, "steps": 10, "error": "it broke"}


def test_rows_past_the_checkpoint_and_half_a_row_are_cut(tmp_path):
    rows = [{"kind": "train", "step": step, "loss": 0.1 * step} for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "tr')
    assert read_metrics(tmp_path) == rows
    cut_metrics(tmp_path, 3)
    assert read_metrics(tmp_path) == rows[:3]
    assert (tmp_path / "metrics.jsonl").read_text().endswith("}\n")


def test_finding_and_refusing_needs_no_torch():
    program = "import sys, softattn_lm.runs.find, softattn_lm.commands.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_versions_name_the_packages_that_are_installed():
    assert {"python", "platform", "softattn_lm", "torch"} <= versions().keys()

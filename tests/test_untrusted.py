"""A stranger's run, checkpoint or tokenizer: it runs nothing, and asks for no more memory than it has."""

import json
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from softattn_lm import cli
from softattn_lm.commands.train import saved_config
from softattn_lm.config import build as building
from softattn_lm.config.build import build
from softattn_lm.config.stored import require_harmless, stored_run
from softattn_lm.config.tree import config_folder
from softattn_lm.errors import UserError
from softattn_lm.runs.config import read_config
from softattn_lm.training.checkpoint import load_run
from softattn_lm.training.untrusted import require_fitting
from tests.hostile.files import edits, files, laughs, training_edits
from tests.hostile.nodes import dead_nodes, live_nodes
from tests.refused import refused
from tests.tiny_run import tiny_train

NODES = [*live_nodes(Path("/tmp/softattn-canary-of-names")), *dead_nodes()]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder that works; never changed."""
    return tiny_train(tmp_path_factory.mktemp("good"), "name=good", "steps=2", "training.telemetry=false")


@pytest.fixture
def run(good: Path, tmp_path: Path) -> Path:
    """A copy to spoil, the only run of its folder."""
    folder = tmp_path / "runs" / "stranger"
    shutil.copytree(good, folder)
    return folder


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing may make it. The current folder holds code that would, if it were imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("softattn_lm.config.trust.trust_file", lambda: tmp_path / "config" / "trusted.txt")
    monkeypatch.delenv("SOFTATTN_TRUSTED", raising=False)
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('canary').touch()\nclass Evil: ...\n")
    return tmp_path / "canary"


def respoil(run: Path, change: Any) -> None:
    path = run / "checkpoints" / "last.ckpt"
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)


def readers(run: Path) -> list[list[str]]:
    runs = f"runs={run.parent}"
    return [["sample", "stranger", runs, "max_new_tokens=2", "--", "a"], ["evaluate", "stranger", runs, "text=abcabc"]]


def test_the_copy_is_read_as_long_as_nobody_spoils_it(run: Path, canary: Path) -> None:
    for words in readers(run):
        with pytest.raises(SystemExit) as stop:
            cli.main(words[0], words[1:])
        assert stop.value.code == 0


POLICIES = [
    (file.parent.name, file.stem)
    for group in ("attention", "position", "scale", "projections", "mask")
    for file in sorted((config_folder() / group).glob("*.yaml"))
    if file.stem not in ("custom", "pattern")
]


@pytest.mark.parametrize(("group", "choice"), POLICIES, ids="=".join)
def test_the_trial_build_that_takes_no_memory_has_the_weights_of_the_real_one(
    group: str, choice: str, good: Path
) -> None:
    node = read_config(good)["model"]
    chosen = yaml.safe_load((config_folder() / group / f"{choice}.yaml").read_text(encoding="utf-8"))
    needed = {"window": 8, "value": 0.5, "dropout": 0.0, "sinks": 2, "rank": 4}
    text = ("???", "${")
    node[group] = {
        key: needed.get(key, value) if isinstance(value, str) and value.startswith(text) else value
        for key, value in chosen.items()
    }
    node |= {"dropout": 0.0, "value_embeddings": False, "qk_norm": "none"}
    given = {"vocab_size": 9, "seed": 0}
    weights = build(node, **given).state_dict()
    require_fitting(node, given, weights, Path("x"))
    with pytest.raises(UserError, match="do not fit"):
        require_fitting(node, given | {"vocab_size": 10}, weights, Path("x"))


@pytest.mark.parametrize("name", NODES)
def test_no_node_in_a_checkpoint_runs_anything(
    name: str, run: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = (live_nodes(canary) | dead_nodes())[name]
    places = [
        lambda model: model.update(attention=node),
        lambda model: model["attention"].update(unknown=[1, [node]]),
        lambda model: model["mask"].update(window={"inner": node}),
        lambda model: model.update(layers=[node]),
    ]
    original = (run / "checkpoints" / "last.ckpt").read_bytes()
    for place in places:
        (run / "checkpoints" / "last.ckpt").write_bytes(original)
        respoil(run, lambda saved, place=place: place(saved["softattn"]["config"]["model"]))
        with pytest.raises(UserError, match=r"last\.ckpt"):
            load_run(run)
    assert not canary.exists() and not Path("canary").exists()
    if name == "code nobody trusted":
        (run / "checkpoints" / "last.ckpt").write_bytes(original)
        respoil(run, lambda saved: places[0](saved["softattn"]["config"]["model"]))
        said = refused(capsys, *readers(run)[1])
        assert "add trust=evil.py:Evil to this command once" in said and not canary.exists()


@pytest.mark.parametrize("name", NODES)
def test_no_node_in_a_run_folder_runs_anything_when_the_run_is_continued_or_forked(
    name: str, run: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_config(run)
    node = (live_nodes(canary) | dead_nodes())[name]
    for key in ("model", "data", "tokenizer", "optimizer"):
        if key == "data" and name == "a class of another group":
            continue  # there, it is one of this group
        (run / "config.yaml").write_text(yaml.safe_dump(config | {key: node}))
        with pytest.raises(UserError, match=r"config\.yaml"):
            saved_config(run)
    for words in ("resume=stranger", "fork=stranger@2"):
        refused(capsys, "train", words, f"runs={run.parent}", "steps=4")
    assert not canary.exists() and not Path("canary").exists()
    assert [folder.name for folder in run.parent.iterdir()] == ["stranger"]


@pytest.mark.parametrize("name", live_nodes(Path("/tmp/softattn-canary-of-names")))
def test_each_of_these_nodes_is_alive_under_hydra_alone(name: str, tmp_path: Path) -> None:
    """Otherwise the tests above would show nothing."""
    from hydra.utils import instantiate

    made = instantiate(live_nodes(tmp_path / "canary")[name])
    if name in ("builtins.open", "FileHandler"):
        made.close()
    assert (tmp_path / "canary").exists()


def test_without_the_allow_list_our_builder_would_run_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = live_nodes(tmp_path / "canary")["torch.load"]
    with pytest.raises(UserError, match="not built"):
        building.build(node)
    assert not (tmp_path / "canary").exists()
    monkeypatch.setattr(building, "require_allowed", lambda path, target: None)
    monkeypatch.setattr(building, "check_node", lambda path, node, given: node)
    building.build(node)
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", edits())
def test_a_checkpoint_that_is_not_what_it_should_be_is_one_line(name: str, run: Path) -> None:
    respoil(run, edits()[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"last\.ckpt") as error:
        load_run(run)
    assert "\n" not in str(error.value) and len(str(error.value)) < 800
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024  # MiB; a width of 4096 takes 1,600
    assert grown < 300 or sys.platform != "linux"


def test_a_file_that_is_no_checkpoint_is_one_line_and_runs_nothing(
    run: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints" / "last.ckpt"
    for name, data in files(path.read_bytes(), canary).items():
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"last\.ckpt"):
            load_run(run)
        assert "last.ckpt" in refused(capsys, "train", "resume=stranger", f"runs={run.parent}", "steps=4"), name
    assert not canary.exists()


BAD_CONFIGS = {
    "no yaml": "a: [",
    "words": "just words",
    "a tag": "!!python/object/apply:os.system ['touch canary']",
    "an object": "model: !!python/name:os.system",
    "bytes": b"\xff\xfe\x00",
    "nested": "[" * 5000,
    "laughs": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{n}: &{n} [*{p}{f',*{p}' * 8}]\n" for p, n in zip("abcdefghij", "bcdefghijk", strict=True)),
    "a date": "model: 2020-01-01",
    "a date that is none": "model: 2020-13-45",
    "a set": "model: !!set {a, b}",
    "binary": "model: !!binary aGVsbG8=",
    "a number of ten thousand digits": "lr: " + "9" * 10_000,
    "a list for a key": "? [a, b]\n: c",
    "nothing": "",
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_config_that_is_no_config_is_one_line(name: str, run: Path, canary: Path) -> None:
    content = BAD_CONFIGS[name]
    (run / "config.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"config\.yaml"):
        saved_config(run)
    assert not canary.exists()


def test_a_stored_config_holds_plain_values_and_no_interpolation_but_in_names(good: Path) -> None:
    config = read_config(good)
    found = stored_run(config, "c")
    assert found["model"] == config["model"] and found["training"].items() >= config["training"].items()
    config["data"]["path"] = "${oc.env:HOME}/a.txt"  # a name like any other: it is resolved nowhere
    assert stored_run(config, "c")["data"]["path"] == "${oc.env:HOME}/a.txt"
    for value, said in (("${x}", "interpolation"), ((1,), "tuple"), ({1: 2}, "no text"), (laughs(), "nests")):
        with pytest.raises(UserError, match=said):
            require_harmless({"lr": value}, "c")


def test_nothing_in_the_package_unpickles_or_asks_for_remote_code() -> None:
    package = Path(cli.__file__).parent
    for file in package.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for word in (
            "pickle.load",
            "allow_pickle",
            "trust_remote_code=True",
            "weights_only=False",
            "yaml.load(",
            "eval(c",
        ):
            assert word not in text, f"{file}: {word}"
        assert text.count("torch.load(") == text.count("weights_only=True)") or "torch.load(" not in text, file


def _linked(run: Path, name: str, target: Path) -> None:
    path = run / name
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("name", ["samples.txt", "lock", "telemetry.svg", "status.json", "checkpoints/last.ckpt"])
def test_no_file_is_written_through_a_link_in_a_run_folder(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own"
    own.write_text("mine")
    for target in (own, tmp_path / "nowhere"):
        _linked(run, name, target)
        for words in (["train", "resume=stranger", "steps=4"], ["evaluate", "stranger", "text=abcabc"], ["telemetry"]):
            said = refused(capsys, *words, f"runs={run.parent}")
            assert f"{name} is a link to {target}" in said or "no run below" in said or "no checkpoint yet" in said
    assert own.read_text() == "mine" and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["checkpoints", "wandb", "scores", "wandb/id", "wandb/offline-run-1"])
def test_no_folder_of_a_person_is_taken_for_one_of_the_run(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own"
    (own / "offline-run-2").mkdir(parents=True)
    (own / "last.ckpt").write_text("mine")
    (own / "a.1.tmp").write_text("mine")
    _linked(run, name, own)
    assert f"{name} is a link to" in refused(capsys, "train", "resume=stranger", f"runs={run.parent}", "steps=4")
    assert sorted(path.name for path in own.iterdir()) == ["a.1.tmp", "last.ckpt", "offline-run-2"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "status.json", "summary.json", "samples.txt", "lock", "metrics.csv"])
def test_a_folder_where_a_file_belongs_is_one_line(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    assert f"{name} is no plain file" in refused(capsys, "train", "resume=stranger", f"runs={run.parent}", "steps=4")


def test_a_file_where_the_checkpoints_belong_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("mine")
    assert "checkpoints is no folder" in refused(capsys, "train", "resume=stranger", f"runs={run.parent}", "steps=4")


FORKED_ALL_THE_SAME = ("a rate that is a text", "groups of other parameters")  # a fork has those of its own settings


@pytest.mark.parametrize("name", training_edits())
def test_nothing_is_trained_on_from_a_checkpoint_that_lacks_what_training_reads(
    name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    respoil(run, training_edits()[name])
    given = (f"runs={run.parent}", "steps=4")
    assert "last.ckpt" in refused(capsys, "train", "resume=stranger", *given)
    if name not in FORKED_ALL_THE_SAME:
        said = refused(capsys, "train", "fork=stranger@last", "name=child", *given)
        assert "last.ckpt" in said or "fork=stranger@2" in said
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file() and path.name != "lock"} == {
        path: data for path, data in before.items() if path.name != "lock"
    }
    assert not (run.parent / "child").exists()


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("lr", {"lr": 0.5}),
        ("schedule.warmup", {"schedule": {"warmup": 0.9}}),
        ("model.n_layer", {"model": {"n_layer": 1}}),
        ("batch_size", {"batch_size": 16}),
    ],
)
def test_a_config_that_is_no_longer_the_checkpoints_is_one_line(
    key: str, change: dict[str, Any], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """lr of the file would be ignored, as the optimizer has its own, and warmup taken up."""
    config = read_config(run)
    for name, value in change.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    said = refused(capsys, "train", "resume=stranger", f"runs={run.parent}", "steps=4")
    assert f"config.yaml says {key}=" in said and "fork=" in said


@pytest.mark.parametrize("setting", ["training.num_workers=1000000", "batch_size=1000000000000"])
def test_a_setting_that_would_only_keep_the_machine_busy_is_refused(
    setting: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "at most" in refused(capsys, "train", setting, f"runs={run.parent}")
    config, (key, _, value) = read_config(run), setting.partition("=")
    node = config["training"] if "." in key else config
    node[key.rpartition(".")[2]] = int(value)
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert "at most" in refused(capsys, "train", "resume=stranger", f"runs={run.parent}", "steps=4")


@pytest.mark.parametrize("step", ["²", "1.5", "-1"])
def test_a_fork_of_a_step_that_is_no_number_is_one_line(
    step: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "train", f"fork=stranger@{step}", f"runs={run.parent}", "steps=4")
    assert "behind @ stands a step" in said


def test_weights_that_are_no_numbers_are_measured_as_what_they_are(
    run: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(saved: dict[str, Any]) -> None:
        for value in saved["state_dict"].values():
            value.fill_(float("nan"))

    respoil(run, spoil)
    for words in (*readers(run), ["probe_scale", "stranger", f"runs={run.parent}"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(words[0], words[1:])
        assert stop.value.code == 0, capsys.readouterr().err
    assert "null" in (run / "probe_scale.json").read_text() and "NaN" not in (run / "probe_scale.json").read_text()


@pytest.mark.parametrize("row", [{"head": 0}, {"layer": "first", "head": 0}, {"layer": 0, "head": 0, "entropy": "low"}])
def test_a_row_of_telemetry_that_is_none_is_one_line(
    row: dict[str, Any], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "telemetry", "step": 2} | row) + "\n")
    assert "metrics.jsonl is damaged" in refused(capsys, "telemetry", "stranger", f"runs={run.parent}")


def test_a_name_longer_than_a_file_systems_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["train"], ["probe_scale", "stranger"], ["telemetry"], ["train", "resume=stranger"]):
        assert "aaa" in refused(capsys, *words, f"runs={'a' * 300}")

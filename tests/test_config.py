"""From words to a checked, plain config: composition, signatures, values, rules, the allow-list."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from softattn_lm.commands import COMMANDS
from softattn_lm.config.allowed import allowed_targets
from softattn_lm.config.argv import Arguments, sort
from softattn_lm.config.build import build
from softattn_lm.config.check import check, check_node
from softattn_lm.config.compose import compose
from softattn_lm.config.raw import decode, encode
from softattn_lm.config.signature import signature
from softattn_lm.config.tree import choices, command_groups, config_folder, defaults
from softattn_lm.config.values import Mismatch, fit
from softattn_lm.errors import UserError

FOLDER = config_folder()


def checked(*overrides: str, command: str = "train") -> dict[str, Any]:
    return check(compose(command, overrides, FOLDER), COMMANDS[command].settings)


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as error:
        checked(*overrides)
    return str(error.value)


def sorted_words(command: str, *argv: str) -> Arguments:
    known = {"temperature", "seed", "n", "file", "data", "data.path", "model", "steps", "text"}
    return sort(COMMANDS[command], list(argv), known)


# What a choice needs besides itself.
NEEDS = {
    "data=text_file": [f"data.path={encode(__file__)}"],
    "data=hub": ["data.name=x"],
    "tokenizer=pretrained": ["tokenizer.path=x"],
    "mask=sliding": ["mask.window=8"],
    "scale=constant": ["scale.value=0.5"],
    "attention=custom": ["attention.target=my_kernel.py:Mine"],
    "trainer=ddp": ["trainer.devices=2"],
}
EVERY_CHOICE = [f"{group}={choice}" for group in command_groups(FOLDER, "train") for choice in choices(FOLDER, group)]


@pytest.mark.parametrize("choice", EVERY_CHOICE)
def test_every_shipped_choice_composes_and_fits_its_constructor(choice: str) -> None:
    checked(choice, *NEEDS.get(choice, []))


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_composes_without_words(command: str) -> None:
    cfg = checked(command=command)
    assert "hydra" not in cfg and all(isinstance(key, str) for key in cfg)


def test_every_command_has_a_script_that_names_it() -> None:
    scripts = Path(__file__).parent.parent / "scripts"
    for name in COMMANDS:
        assert f'main("{name}")' in (scripts / f"{name}.py").read_text(encoding="utf-8")


def test_the_command_line_beats_the_experiment_which_beats_the_model_recipe() -> None:
    learned, rotary = (f"softattn_lm.position.{name}" for name in ("learned.Learned", "rotary.Rotary"))
    assert checked("model=plain")["position"]["_target_"] == rotary
    experiment = checked("experiment=nanogpt_cpu")
    assert (experiment["position"]["_target_"], experiment["steps"]) == (learned, 2000)
    typed = checked("experiment=nanogpt_cpu", "position=rotary", "steps=7", "lr=0.5")
    assert (typed["position"]["_target_"], typed["steps"], typed["lr"]) == (rotary, 7, 0.5)
    assert typed["model"]["position"] == typed["position"] and typed["optimizer"]["lr"] == 0.5


def test_numbers_arrive_in_the_type_of_their_argument() -> None:
    cfg = checked("tokens=1e6", "lr=1")
    assert (cfg["tokens"], type(cfg["tokens"])) == (1_000_000, int)
    assert (cfg["lr"], type(cfg["lr"])) == (1.0, float)


def test_a_budget_on_the_command_line_replaces_the_default_of_another_kind() -> None:
    cfg = checked("epochs=2")
    assert (cfg["steps"], cfg["tokens"], cfg["epochs"]) == (None, None, 2.0)
    assert "give one of them" in refusal("steps=10", "tokens=100")


WRONG = {
    ("model.n_haed=3",): "unknown setting model.n_haed; did you mean model.n_head?",
    ("lerning_rate=3",): "unknown setting lerning_rate; did you mean lr?",
    ("attentoin=sdpa",): "unknown setting attentoin; did you mean attention?",
    ("attention=spda",): "did you mean sdpa?",
    ("experiment=nano",): "experiment=nano: no such choice; experiment is one of gpt2_124m, nanogpt_cpu",
    ("model/size=huge",): "model/size is one of",
    ("model.d_model=abc",): "model.d_model=abc: model.d_model must be a whole number",
    ("model.norm=batch",): "model.norm must be one of layer, rms",
    ("steps=1.5",): "steps must be a whole number or null",
    ("lr=fast",): "lr=fast: lr must be a number",
    ("lr=null",): "lr=null: lr must be a number",
    ("lr=-1",): "lr must be above 0",
    ("trainer=null",): "no such choice; trainer is one of auto, cpu",
    ("lr=${nope}",): "nope",
    ("batch_size=0",): "batch_size must be at least 1",
    ("training.compile=no",): "training.compile=no: type training.compile=false",
    ("training.keep_steps=[1,x]",): "a list of whole numbers in brackets or log",
    ("training=5",): "training is a section",
    ("model.projections=5",): "projections is chosen as a whole; type projections=",
    ("data.validation_sets=a",): "data.validation_sets must be a mapping, which is typed name by name",
    ("model.size=small",): "model/size=small",
    ("mask.pattern=SSSL",): "type mask=pattern",
    ("mask=pattern", "mask.pattern=SXL"): "letter X",
    ("mask=pattern", "+mask.options.sliding.windw=3"): "setting mask.options.sliding.windw; did you mean mask.options.",
    ("mask=pattern", "+mask.options.sliding.window=x"): "sliding.window=x: mask.options.sliding.window must",
    ("mask=pattern", "mask.pattern=[]"): "type for example mask.pattern=SSSL",
    ("mask=pattern", "mask.pattern=null"): "type for example mask.pattern=SSSL",
    ("attention=pattern", "attention.pattern=[custom]"): "type +attention.options.custom.target=my_kernel.py:Mine",
    ("attention=sdpa", "attention.sink=one"): "attention=sdpa honours no attention.sink; type one of attention=auto",
    ("attention.soft_cap=3",): "attention=blockwise, attention=flex, attention=formula",
    ("attention.sdpa=true",): "type attention=sdpa",
    ("model.n_head=3",): "type model.n_head=2, or give model.head_dim",
    ("model.n_kv_head=3",): "type one of 1, 2, 4",
    ("position=rotary", "model.head_dim=7"): "even model.head_dim",
    ("batch_size=10", "training.accumulate=3"): "type batch_size=12",
    ("trainer.devices=5",): "batch_size=12 does not divide into 5 parts",
    ("data=text_file",): "data.path has no value: data=text_file needs data.path=...",
    ("attention=sdpa,formula",): "add -m",
    ("lr=1,2",): "add -m",
    ("hydra.run.dir=x",): "in sweeps only",
    ("+attention.foo=1",): "unknown setting attention.foo",
    ("+foo=1",): "unknown setting foo",
    ("+foo.bar=1",): "unknown setting foo",
    ("model.mlp=a (b",): "quotes of its own: \"model.mlp='a (b'\"",
}


@pytest.mark.parametrize("overrides", WRONG, ids=" ".join)
def test_a_wrong_override_is_answered_by_one_line_that_says_what_to_type(overrides: tuple[str, ...]) -> None:
    said = refusal(*overrides)
    assert WRONG[overrides] in said and "\n" not in said


OUT_OF_RANGE = {
    ("model.dropout=1",): "model.dropout=1.0: model.dropout must be at least 0 and below 1",
    ("attention.dropout=-0.5",): "attention.dropout=-0.5: attention.dropout must be at least 0 and below 1",
    ("data.val_fraction=1.5",): "data.val_fraction must be at least 0 and below 1",
    ("data.val_fraction=0.5", "data.test_fraction=0.5"): "leave nothing to train on",
    ("tokenizer=bpe", "tokenizer.vocab_size=100"): "tokenizer.vocab_size must be at least 256",
    ("training.loss_chunk=-1",): "training.loss_chunk=-1: training.loss_chunk must be at least 0, or null",
    ("optimizer.beta1=1.5",): "optimizer.beta1 must be at least 0 and below 1",
    ("optimizer.weight_decay=-1",): "optimizer.weight_decay must be at least 0",
    ("lr=inf",): "lr=inf: lr must be above 0 and finite",
    ("lr=nan",): "lr=nan: lr must be above 0 and finite",
    ("lr=0",): "lr must be above 0",
    ("optimizer.lr=-1",): "optimizer.lr must be above 0",
    ("position=rotary", "position.base=0"): "position.base must be above 0",
    ("scale=constant", "scale.value=inf"): "scale.value must be a finite number",
    ("mask=sliding", "mask.window=0"): "mask.window must be at least 1",
    ("mask.sinks=2",): "mask.sinks=2 needs a window to stand outside of; type mask.window=64",
    ("mask=pattern", "+mask.options.sliding.window=0"): "mask.options.sliding.window must be at least 1",
    ("mask=sink_window", "mask.window=64"): "mask.sinks=4 and mask.window=64 are together beyond model.context=64",
    ("mask=pattern", "mask.pattern=SSSSSSSL", "+mask.options.sliding.window=8"): "names 8 layers, but model.n_layer=4",
    ("seed=-1",): "seed must be at least 0",
    ("seed=4294967296",): "seed must be at least 0 and below 2^32",
    ("model.context=1048577",): "model.context must be at least 1 and at most 1,048,576",
    ("epochs=1" + "0" * 400,): "epochs must be a number or null",
    ("training.val_every=0",): "training.val_every must be at least 1",
    ("training.save_every=-1",): "training.save_every must be at least 0",
    ("training.keep_steps=[-1]",): "training.keep_steps must be whole numbers from 0 on",
    ("schedule.warmup=-1",): "schedule.warmup must be at least 0",
    ("data=text_file", "data.path=no_such_file.txt"): "data.path=no_such_file.txt: no such file or folder",
    ("+data.validation_sets.diary=nothing.txt",): "data.validation_sets.diary=nothing.txt: no such file",
    ("data=hub", "data.name=./nothing"): "data.name=./nothing: no such folder",
    ("tokenizer=pretrained", "tokenizer.path=./none.json"): "tokenizer.path=./none.json: no such file",
}


@pytest.mark.parametrize("overrides", OUT_OF_RANGE, ids=" ".join)
def test_a_value_out_of_range_is_named_by_the_key_that_was_typed(overrides: tuple[str, ...]) -> None:
    said = refusal(*overrides)
    assert OUT_OF_RANGE[overrides] in said and "\n" not in said


def test_a_glob_and_a_hub_name_are_left_to_those_who_read_them() -> None:
    checked("data=text_file", f"data.path={encode('nowhere/*.txt')}")
    checked("data=hub", "data.name=owner/name", "tokenizer=pretrained", "tokenizer.path=owner/name")


def test_values_of_a_mapping_have_its_type() -> None:
    with pytest.raises(UserError, match=r"model\.dropout=abc: model\.dropout must be a number"):
        checked("model.dropout=abc", command="check_attention")


def test_an_unknown_setting_without_a_near_name_lists_what_there_is_and_who_has_it() -> None:
    with pytest.raises(UserError) as error:
        checked("stepz=4", command="prepare_data")
    assert str(error.value) == (
        "unknown setting stepz; steps is a setting of train; prepare_data has tokenizer, data, runs"
    )


PROMPTS = [
    "It's late, Emma said (twice)",
    "E=mc^2",
    "null",
    "1.0",
    "a, b",
    "[x] {y}",
    '"quoted"',
    "two\nlines",
    "emoji 🙂",
    "~tilde",
    "${oc.env:HOME}",
    "-5 degrees",
    "key = value",
    "",
    "a=b=c",
    "x: y",
    "\\back\\slash'",
    "true",
    "Émile=écrit",
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_arrives_as_typed(prompt: str) -> None:
    found = sorted_words("sample", prompt, "my-run", "temperature=0.5")
    assert (found.words, found.overrides) == ([prompt, "my-run"], ["temperature=0.5"])


def test_a_misspelt_setting_is_no_prompt_and_what_follows_two_dashes_is() -> None:
    with pytest.raises(UserError, match=r"did you mean temperature\?.*put it after --"):
        sorted_words("sample", "temprature=0.5")
    found = sorted_words("sample", "seed=1", "--", "temprature=0.5", "-m")
    assert (found.prompt, found.words, found.overrides) == ("temprature=0.5", ["-m"], ["seed=1"])
    assert sorted_words("sample", "my-run", "--", "seed=3").words == ["my-run"]
    with pytest.raises(UserError, match="put runs=elsewhere before --"):
        sort(COMMANDS["sample"], ["--", "seed=3", "my-run", "runs=elsewhere"], {"seed", "runs"})


def test_a_sentence_that_begins_like_a_setting_is_a_prompt() -> None:
    sentence = "temperature=0.5 is a lot"
    assert sorted_words("sample", sentence, "my-run").words == [sentence, "my-run"]
    assert sorted_words("sample", "file=my notes.txt").overrides == [f"file={encode('my notes.txt')}"]
    assert sorted_words("sample", "temperature= 0.5").overrides == ["temperature= 0.5"]


def test_null_is_none_for_a_raw_key_that_may_be_none_and_a_name_elsewhere() -> None:
    assert compose("train", sorted_words("train", "name=null", "resume=null").overrides, FOLDER)["name"] is None
    assert sorted_words("train", "name=nullify").overrides == [f"name={encode('nullify')}"]
    assert sorted_words("train", "runs=null").overrides == [f"runs={encode('null')}"]
    for key, offered in (("resume", True), ("model.head_dim", True), ("runs", False), ("data.path", False)):
        with pytest.raises(UserError, match=f"{key}= has no value") as error:
            sorted_words("train", f"{key}=")
        assert (f"{key}=null for none" in str(error.value)) == offered


@pytest.mark.parametrize("value", PROMPTS)
def test_a_path_arrives_as_typed(value: str) -> None:
    assert decode(encode(value)) == value
    if value:
        (override,) = sorted_words("train", f"data.path={value}").overrides
        assert compose("train", ["data=text_file", override], FOLDER)["data"]["path"] == value


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["steps"], "did you mean steps=...?"),
        (["steps="], "has no value"),
        (["steps=1", "+steps=2"], "given twice"),
        (["--steps=1"], "settings are written steps=..."),
        (["data.austen"], "write data=austen"),
        (["a b=1"], "no name of a setting"),
        (["~model"], "type model= and one of fast, gpt2_style"),
        (["~model=fast"], "type model= and one of fast, gpt2_style"),
        (["~steps=1"], "every setting is needed; type steps= and another value"),
    ],
)
def test_what_fits_nowhere_is_refused_before_hydra(argv: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        sorted_words("train", *argv)
    assert said in str(error.value)


def test_an_unquoted_prompt_is_told_apart() -> None:
    with pytest.raises(UserError, match="put the prompt in quotes"):
        sorted_words("sample", "It", "was", "late")


SOURCE = """
from typing import Any, Literal
from softattn_lm.config.values import Mismatch
Kind = Literal["a", "b"]
class Base:
    def __init__(self, x: int, *, y: "float | None" = None, kind: Kind | None = "a", node: Base = None): ...
class Child(Base): ...
class Open:
    def __init__(self, **rest: Any): ...
"""


def test_signatures_are_read_without_importing_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "signature_probe"
    package.mkdir()
    (package / "thing.py").write_text(SOURCE + "raise SystemExit('imported')\n")
    monkeypatch.setattr("softattn_lm.config.signature.PACKAGE", package)
    child, opened = signature("signature_probe.thing.Child"), signature("signature_probe.thing.Open")
    assert child is not None and opened is not None
    assert [(name, p.required) for name, p in child.parameters.items()] == [
        ("x", True),
        ("y", False),
        ("kind", False),
        ("node", False),
    ]
    assert fit(None, child.parameters["y"].annotation) is None
    assert fit("b", child.parameters["kind"].annotation) == "b"
    with pytest.raises(Mismatch):
        fit("c", child.parameters["kind"].annotation)
    assert opened.open and signature("signature_probe.thing.Nothing") is None
    assert signature("os.system") is None


@pytest.mark.parametrize(
    ("value", "key", "fits"),
    [
        (True, "seed", False),
        (True, "lr", False),
        ("1", "seed", False),
        (1.5, "steps", False),
        ("no", "describe", False),
    ],
)
def test_a_look_alike_is_another_type(value: Any, key: str, fits: bool) -> None:
    known = signature("softattn_lm.config.settings.TrainSettings")
    assert known is not None
    with pytest.raises(Mismatch):
        fit(value, known.parameters[key].annotation)


HOSTILE = ["os.system", "builtins.open", "torch.load", "pathlib.Path.touch", "logging.FileHandler", "subprocess.run"]


@pytest.mark.parametrize("target", HOSTILE)
@pytest.mark.parametrize("place", ["itself", "argument", "list", "deep"])
def test_a_class_that_no_shipped_config_names_is_never_built(target: str, place: str) -> None:
    bad: Any = {"_target_": target, "path": "x"}
    good = {"_target_": "softattn_lm.tokenizer.byte.ByteTokenizer"}
    node = {
        "itself": bad,
        "argument": good | {"unknown": bad},
        "list": good | {"unknown": [1, bad]},
        "deep": good | {"unknown": {"inner": [[bad]]}},
    }[place]
    with pytest.raises(UserError, match="not built"):
        build(node)


def test_build_gives_the_object_with_strings_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    target = "softattn_lm.config.argv.Command"
    monkeypatch.setattr("softattn_lm.config.allowed.allowed_targets", lambda: frozenset({target}))
    node = {"_target_": target, "name": "${oc.env:HOME}", "settings": "x"}
    assert build(node, words="none").name == "${oc.env:HOME}"
    assert build(node | {"_partial_": True})(words="runs").words == "runs"
    with pytest.raises(UserError, match=r"unknown setting Command\.nme; did you mean Command\.name"):
        build(node | {"nme": 1}, words="none")


def test_the_allow_list_is_what_the_yaml_files_name() -> None:
    found = allowed_targets()
    assert "softattn_lm.model.decoder.DecoderLM" in found
    assert all(target.startswith("softattn_lm.") and signature(target) is not None for target in found)


def test_defaults_and_sections_of_train_match_their_dataclasses() -> None:
    known = signature("softattn_lm.config.settings.TrainSettings")
    assert known is not None
    cfg = checked()
    sections = {"training", "trainer", "logger", "model", *defaults(FOLDER / "train.yaml")}
    assert set(cfg) - sections == set(known.parameters)


def test_nothing_in_config_imports_torch() -> None:
    code = (
        "import sys, pkgutil, softattn_lm.config as c, importlib\n"
        "for m in pkgutil.iter_modules(c.__path__): importlib.import_module(f'softattn_lm.config.{m.name}')\n"
        "import softattn_lm.cli, softattn_lm.commands.sweep\n"
        "assert not {'torch', 'lightning', 'datasets', 'wandb', 'hydra'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_node_inside_a_node_is_named_by_its_path() -> None:
    cfg = checked()
    cfg["model"]["attention"]["drop"] = 0.1
    with pytest.raises(UserError, match=r"setting model\.attention\.drop; did you mean model\.attention\.dropout"):
        check_node("model", cfg["model"])

"""check_attention on what it has never seen: a user's kernels, callables of other stacks, and code nobody trusted."""

import shutil
import sys
from pathlib import Path

import pytest

from softattn_lm import cli
from softattn_lm.config.build import build
from softattn_lm.config.trust import TYPED, trust_typed
from softattn_lm.contract import PROPERTIES, Subject, run_property
from softattn_lm.errors import UserError

OUTSIDE = Path(__file__).parent / "outside"


@pytest.fixture(autouse=True)
def in_a_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their files in the current folder, a config folder of their own, and nothing trusted."""
    for file in OUTSIDE.glob("*.py"):
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("softattn_lm.config.trust.trust_file", lambda: tmp_path / "config" / "trusted.txt")
    monkeypatch.setenv(TYPED, "")
    monkeypatch.setattr(sys, "path", [*sys.path])


def custom(name: str, **options: object) -> Subject:
    target = f"my_kernels.py:{name}"
    trust_typed([f"attention.target={target}"])
    return Subject(name, build({"_target_": "softattn_lm.config.custom.custom", "target": target, "options": options}))


def check(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main("check_attention", ["cost=false", *words])
    assert isinstance(stop.value.code, int)
    return stop.value.code


LEAKS = {
    "LeaksInLongTexts": "future_is_invisible",
    "LeaksWhileDecoding": "future_is_invisible",
    "LeaksInTraining": "future_is_invisible",
    "LeaksInLaterRows": "future_is_invisible",
    "LeaksBetweenRows": "batch_rows_are_independent",
    "FiniteMask": "empty_rows_give_zero",
    "TopLeft": "gradients_respect_the_mask",
    "AddsMask": "future_nan_keys_are_not_read",
}


@pytest.mark.parametrize(("name", "property"), LEAKS.items())
def test_a_leaky_kernel_is_refused_by_the_property_it_breaks(name: str, property: str) -> None:
    assert not run_property(property, custom(name)).ok
    assert run_property(property, custom("Plain")).ok


def test_logits_beyond_a_finite_mask_are_seen() -> None:
    verdict = run_property("future_is_invisible", custom("FiniteMask"))
    assert not verdict.ok and "logits x 1e+06" in verdict.worst.where


@pytest.mark.slow
def test_a_good_kernel_of_a_user_passes_with_shapes_and_options_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("attention=custom", "attention.target=my_kernels.py:Sharp", "+attention.options.power=1.2") == 0
    said = capsys.readouterr().out
    assert "its constructor takes no dropout" in said and "FAILS" not in said
    assert all(name in said for name in PROPERTIES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "property"),
    [
        ("sdpa foreign.py:top_left", "cached_equals_full"),
        ("sdpa foreign.py:finite_constant", "empty_rows_give_zero"),
        ("hf foreign.py:hf_attention", "model_hides_the_future"),
        ("flex foreign.py:alibi", "future_is_invisible"),
    ],
)
def test_a_foreign_callable_is_refused_by_name_of_the_property(
    words: str, property: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    assert check("--like", *words.split()) == 1
    last = capsys.readouterr().out.strip().splitlines()
    assert last[-1].startswith("fails: ") and property in last[-1]
    assert ("arrives as None" in last[-2]) == words.startswith("hf")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["sdpa foreign.py:bottom_right", "flex foreign.py:causal,alibi", "hf hf_registered.py:hf_attention"]
)
def test_a_good_foreign_callable_passes(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert check("--like", *words.split()) == 0
    assert "not tried" in capsys.readouterr().out


@pytest.mark.slow
def test_a_composition_is_tried_as_it_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["mask=sliding", "mask.window=5", "position=alibi", "projections=shared_all", "scale=learned"]
    assert check("attention=formula", *chosen, "attention.soft_cap=20") == 0
    said = capsys.readouterr().out
    assert "its position, its mask" in said and "rotary" not in said


@pytest.mark.slow
def test_a_pattern_is_tried_inside_models_and_says_why_not_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("attention=pattern", "position=rotary", "mask=causal") == 0
    assert "a pattern has a kernel per layer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["attention=custom"], "attention.target has no value"),
        (["attention=custom", "attention.target=nowhere.py:X"], "there is no file"),
        (["attention=custom", "attention.target=my_kernels.py:Shrp"], "has no Shrp; did you mean Sharp?"),
        (["attention=custom", "attention.target=foreign.py:causal"], "is no AttentionKernel"),
        (["attention=custom", "attention.target=my_kernels.py:Sharp", "+attention.options.pwer=2"], "mean power?"),
        (["mask=sliding"], "mask.window=64 hides nothing"),
        (["--like", "sdpa"], "--like takes a kind and a callable"),
        (["--like", "jax", "foreign.py:causal"], "sdpa"),
        (["--like", "flex", "foreign.py:top_left"], "a mask_mod has 4 arguments"),
        (["--like", "hf", "foreign.py:causal"], "no attention function"),
        (["--like", "hf", "foreign.py:hf_attention", "attention=formula"], "in the place of attention=; give one of"),
        (["like=sdpa"], "--like sdpa my_file.py:my_function"),
        (["position=learned", "mask=causal", "--like", "sdpa", "foreign.py:top_left"], "leave out mask, position"),
    ],
    ids=str,
)
def test_a_persons_fault_is_one_line_and_status_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


BROKEN = {
    "class Mine(:\n": "broken.py, line 1: SyntaxError: ",
    "import torch\nimport no_such_package\n": "broken.py, line 2: ModuleNotFoundError: No module named 'no_such_pack",
    "import helper\n": "helper.py, line 2: ZeroDivisionError: division by zero",
}


@pytest.mark.parametrize(
    "words",
    [
        ["attention=custom", "attention.target=broken.py:Mine"],
        ["--like", "sdpa", "broken.py:Mine"],
        ["--like", "flex", "broken.py:Mine"],
        ["--like", "hf", "broken.py:Mine"],
    ],
    ids=str,
)
@pytest.mark.parametrize("code", BROKEN)
def test_a_file_that_does_not_load_is_answered_by_its_line(
    words: list[str], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    (tmp_path / "helper.py").write_text("\n1 / 0\n")
    (tmp_path / "broken.py").write_text(code)
    assert check(*words) == 2
    error = capsys.readouterr().err
    assert BROKEN[code] in error
    assert "broken.py:Mine" in error and error.count("\n") == 1


CONSTRUCTORS = """
from my_kernels import Plain

class Raises(Plain):
    def __init__(self, n_head: int) -> None:
        super().__init__()
        self.x = {}["theta"]

class Asks(Plain):
    def __init__(self, n_heads: int) -> None:
        super().__init__()

class Shifts(Plain):
    def __init__(self, shift: float = 1.0) -> None:
        super().__init__()
        assert isinstance(shift, float)
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["Raises"], "mine.py, line 7: KeyError: 'theta'"),
        (["Asks"], "mine.py, line 10: the constructor needs n_heads, which is no shape of a model; there are n_head"),
        (["Shifts", "+attention.options.shift=abc"], "options.shift=abc: attention.options.shift must be a number"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_constructor_that_fails_is_answered_by_its_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(CONSTRUCTORS)
    assert check("attention=custom", f"attention.target=mine.py:{words[0]}", *words[1:]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_an_option_of_a_users_class_has_the_type_it_is_annotated_with(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CONSTRUCTORS)
    trust_typed(["attention.target=mine.py:Shifts"])
    node = {"_target_": "softattn_lm.config.custom.custom", "target": "mine.py:Shifts", "options": {"shift": 2}}
    build(node)()  # the 2 arrives as 2.0, or the class would raise


@pytest.mark.slow
def test_a_broken_kernel_is_a_persons_fault_in_train_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(CONSTRUCTORS)
    with pytest.raises(SystemExit) as stop:
        cli.main("train", ["model=nano", "attention=custom", "attention.target=mine.py:Raises", "describe=true"])
    assert stop.value.code == 2
    assert "mine.py, line 7: KeyError: 'theta'" in capsys.readouterr().err


def test_torchs_own_function_and_one_with_kwargs_are_handed_everything() -> None:
    import torch.nn.functional as F

    from softattn_lm.config.custom import load
    from softattn_lm.contract.foreign import like_sdpa

    bottom_right = load("foreign.py:bottom_right", "--like sdpa")

    def passes_on(query, key, value, **given):
        return bottom_right(query, key, value, **given)

    subject = like_sdpa("passes_on", passes_on)
    assert all(subject.honours(option) for option in ("window", "documents", "bias", "dropout"))
    assert run_property("future_is_invisible", subject).ok
    assert run_property("scales_are_honoured", subject).ok
    torchs = like_sdpa("torch", F.scaled_dot_product_attention)
    assert torchs.honours("window") and run_property("scales_are_honoured", torchs).ok


def test_code_of_a_strangers_config_does_not_run_until_a_person_trusts_it(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("open('it_ran', 'w').close()\nfrom my_kernels import Plain\n")
    node = {"_target_": "softattn_lm.config.custom.custom", "target": "evil.py:Plain", "options": {}}
    with pytest.raises(UserError, match=r"trust=evil\.py:Plain"):
        build(node)
    assert not (tmp_path / "it_ran").exists()
    trust_typed(["trust=evil.py:Plain"])
    build(node)
    assert (tmp_path / "it_ran").exists()
    assert (tmp_path / "config" / "trusted.txt").read_text() == f"{tmp_path / 'evil.py'}:Plain\n"


def test_trust_is_in_one_file_and_not_in_its_namesake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust_typed(["trust=my_kernels.py:Plain"])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(OUTSIDE / "my_kernels.py", elsewhere)
    monkeypatch.chdir(elsewhere)
    with pytest.raises(UserError, match="would run here"):
        build({"_target_": "softattn_lm.config.custom.custom", "target": "my_kernels.py:Plain"})


@pytest.mark.slow
def test_a_custom_kernel_trains_and_its_run_samples_once_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tiny_run import tiny_train

    trust_typed(["attention.target=my_kernels.py:Sharp"])
    run = tiny_train(tmp_path, "attention=custom", "attention.target=my_kernels.py:Sharp", "position=rotary")
    monkeypatch.setenv(TYPED, "")
    answers = []
    for words in ([], ["trust=my_kernels.py:Sharp"], []):
        with pytest.raises(SystemExit) as stop:
            cli.main("sample", ["ab", str(run), "max_new_tokens=5", *words])
        answers.append(stop.value.code)
    assert answers == [2, 0, 0]
    assert "trust=my_kernels.py:Sharp" in capsys.readouterr().err

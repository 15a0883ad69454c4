"""sample.py: which word is the prompt and which the run, and what is printed."""

import subprocess
import sys

import pytest

from softattn_lm.commands.sample import sort_words
from softattn_lm.config.settings import SampleSettings
from softattn_lm.errors import UserError

PROMPTS = [
    "It's late, Emma said (twice)",
    "a, b and c",
    "[1, 2]",
    '"quoted"',
    "'single'",
    "x = 3",
    "E=mc^2",
    "two\nlines",
    "😀 emoji",
    "null",
    "1.0",
    "{a: b}",
    "${oc.env:HOME}",
    "a/b.c",
    "~",
    "x" * 5000,
]


@pytest.fixture
def runs(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("{}")
    return SampleSettings(runs=str(tmp_path))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_single_word_is_the_prompt_whatever_it_looks_like(runs, prompt):
    assert sort_words([prompt], runs) == (None, prompt)


def test_a_word_that_is_called_exactly_like_a_run_is_the_run(runs):
    assert sort_words(["first"], runs) == ("first", "\n")
    assert sort_words(["first", "It was"], runs) == sort_words(["It was", "first"], runs) == ("first", "It was")
    assert sort_words(["It was", "sec"], runs) == ("sec", "It was")  # the beginning of a name, behind a prompt


def test_a_prompt_that_is_also_a_run_can_be_given_before_the_run(runs):
    assert sort_words(["first", "second"], runs) == ("second", "first")
    assert sort_words(["first", "first"], runs) == ("first", "first")


def test_what_stands_behind_two_dashes_is_the_prompt_even_if_a_run_is_called_so(runs):
    assert sort_words([], runs, "first") == (None, "first")
    assert sort_words(["second"], runs, "first") == ("second", "first")
    assert sort_words(["second"], runs, "seed=3") == ("second", "seed=3")
    with pytest.raises(UserError, match="3 words; put the prompt in quotes"):
        sort_words(["It was", "second"], runs, "late")
    with pytest.raises(UserError, match="given twice"):
        sort_words([], SampleSettings(runs=runs.runs, file="notes.txt"), "late")


def test_without_words_the_prompt_is_a_line_break(runs):
    assert sort_words([], runs) == (None, "\n")


def test_a_prompt_is_read_from_a_file_as_it_stands(runs, tmp_path):
    (tmp_path / "a, b [c].txt").write_text("line\n\n  end", encoding="utf-8")
    settings = SampleSettings(runs=runs.runs, file=str(tmp_path / "a, b [c].txt"))
    assert sort_words([], settings) == (None, "line\n\n  end")
    with pytest.raises(UserError, match="given twice"):
        sort_words(["prompt"], settings)


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read"), (b"caf\xe9", "byte 3 is 0xe9")])
def test_a_prompt_file_that_cannot_be_read_is_named(runs, tmp_path, content, message):
    path = tmp_path / "prompt.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        sort_words([], SampleSettings(runs=runs.runs, file=str(path)))


def test_three_words_are_an_error_that_names_quotes(runs):
    with pytest.raises(UserError, match="quotes"):
        sort_words(["It", "was", "late"], runs)


def test_an_unknown_run_behind_a_prompt_names_the_nearest(runs):
    with pytest.raises(UserError, match="did you mean second"):
        sort_words(["prompt", "secnod"], runs)


@pytest.mark.slow
def test_a_trained_run_writes_exactly_what_is_asked_through_a_pipe(tmp_path):
    (tmp_path / "text.txt").write_text("ab cd. " * 400, encoding="utf-8")

    def softattn(*words, stdin=None):
        done = subprocess.run(
            [sys.executable, "-m", "softattn_lm", *words], cwd=tmp_path, input=stdin, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    size = ["model.n_layer=1", "model.d_model=16", "model.context=16", "steps=3", "training.log_every=1"]
    softattn("train", "data=text_file", "data.path=text.txt", "tokenizer=byte", "name=tiny", *size)
    out = softattn("sample", "é b", "max_new_tokens=40", "temperature=0", "n=1")
    again = softattn(
        "sample", "tiny", "file=-", "max_new_tokens=40", "temperature=0", "cache=false", stdin="é b".encode()
    )
    assert out == again and out.startswith("é b") and len(out.encode()) >= len("é b".encode()) + 40 + 1
    assert len(softattn("sample", "ab", "n=3", "max_new_tokens=5").splitlines()) >= 3
    refused = [sys.executable, "-m", "softattn_lm", "sample", "ab", "graph=true", "device=cpu"]
    done = subprocess.run(refused, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "graph=true needs a CUDA device, and this is cpu" in done.stderr

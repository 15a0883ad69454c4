"""Texts that are not what they should be, through the whole command: nothing is lost, or one line says where."""

import gzip
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from softattn_lm import cli
from softattn_lm.data.paths import find_files
from softattn_lm.runs.metrics import read_metrics
from softattn_lm.training.checkpoint import load_run
from tests.tiny_run import TINY

SENTENCE = "It is a truth universally acknowledged, naïve, 日本, 🎉. "
LONG = SENTENCE * 20


def train(folder: Path, *overrides: str) -> int | str | None:
    """`softattn train` in this process; its exit status."""
    replaced = {word.partition("=")[0] for word in overrides}
    base = [word for word in TINY if word.partition("=")[0] not in {*replaced, "steps"}]
    budget = [] if replaced & {"steps", "tokens", "epochs"} else ["steps=2"]
    words = [*base, *budget, "training.telemetry=false", f"runs={folder / 'runs'}", "name=a", *overrides]
    with warnings.catch_warnings(), pytest.raises(SystemExit) as stop:
        warnings.simplefilter("default")  # a notice is one, and no failure
        cli.main("train", words)
    return stop.value.code


def kept_text(folder: Path) -> str:
    """What training and validation were made of, back from the token files."""
    (cache,) = [meta.parent for meta in (folder / "runs" / "cache").glob("*/meta.json")]
    dtype = json.loads((cache / "meta.json").read_text(encoding="utf-8"))["dtype"]
    ids = np.concatenate([np.fromfile(cache / f"{name}.bin", dtype=dtype) for name in ("train", "validation")])
    return load_run(folder / "runs" / "a").tokenizer.decode(ids)


# name of the file, its bytes, and the text that must come back
WORKS: dict[str, tuple[str, bytes, str]] = {
    "only newlines": ("a.txt", b"\n" * 500, "\n" * 500),
    "CRLF": ("a.txt", LONG.replace(". ", ".\r\n").encode(), LONG.replace(". ", ".\r\n")),
    "lone CR": ("a.txt", LONG.replace(". ", ".\r").encode(), LONG.replace(". ", ".\r")),
    "NUL": ("a.txt", LONG.replace(" ", "\0").encode(), LONG.replace(" ", "\0")),
    "U+2028": ("a.txt", LONG.replace(" ", "\u2028").encode(), LONG.replace(" ", "\u2028")),
    "a byte order mark": ("a.txt", b"\xef\xbb\xbf" + LONG.encode(), LONG),
    "control sequences and markup": ("a.txt", ("\x1b[2J[red]<script>" * 40).encode(), "\x1b[2J[red]<script>" * 40),
    "no line break at all": ("a.txt", b"ab" * 400, "ab" * 400),
    "gzip that says so": ("a.txt.gz", gzip.compress(LONG.encode()), LONG),
}


@pytest.mark.parametrize("name", WORKS)
def test_an_awkward_text_trains_and_comes_back_whole(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, data, text = WORKS[name]
    (tmp_path / file).write_bytes(data)
    assert train(tmp_path, f"data.path={tmp_path / file}") == 0
    said = capsys.readouterr()
    rows = read_metrics(tmp_path / "runs" / "a")
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2]
    assert kept_text(tmp_path) == text
    assert ("warning: " in said.err) == (name == "a byte order mark") and "\x1b" not in said.out


def folder_with_one_bad_file(folder: Path) -> Path:
    (folder / "texts").mkdir()
    for name in ("a.txt", "c.txt"):
        (folder / "texts" / name).write_text(LONG, encoding="utf-8")
    (folder / "texts" / "b.txt").write_bytes(LONG.encode() + b"caf\xe9 au lait")
    return folder / "texts"


def parquet_with_a_null(folder: Path) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": [SENTENCE] * 7 + [None]}), folder / "a.parquet")
    return folder / "a.parquet"


def parquet_of_other_bytes(folder: Path) -> Path:
    import pyarrow
    from pyarrow import parquet

    offsets, letters = pyarrow.py_buffer(np.array([0, 2, 4, 6], dtype=np.int32)), pyarrow.py_buffer(b"abc\xffef")
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, [None, offsets, letters])
    parquet.write_table(pyarrow.table({"text": column}), folder / "a.parquet")
    return folder / "a.parquet"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "a.txt")
    return folder / "a.txt"


def dangling(folder: Path) -> Path:
    (folder / "a.txt").symlink_to("nowhere.txt")
    return folder / "a.txt"


def file(name: str, data: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


LINE = json.dumps({"text": LONG}).encode() + b"\n"
# how to make it, settings, and what the one line says
REFUSED: dict[str, tuple[Callable[[Path], Path], list[str], str]] = {
    "0 bytes": (file("a.txt", b""), [], r"a\.txt holds no text"),
    "one character": (file("a.txt", b"x"), [], r"there are 1 characters only; use"),
    "binary": (file("a.txt", bytes(range(256)) * 9), [], r"a\.txt is not UTF-8: byte 0x80 at offset 128"),
    "Latin-1": (file("a.txt", LONG.encode() + b"caf\xe9 "), [], rf"byte 0xe9 at offset {len(LONG.encode()) + 3}"),
    "UTF-16": (file("a.txt", LONG.encode("utf-16")), [], r"a\.txt is UTF-16, not UTF-8; convert it: iconv"),
    "UTF-16 without a mark": (
        file("a.txt", LONG.encode("utf-16-le")), [], r"a\.txt is not UTF-8: byte 0x\w\w at offset",
    ),
    "gzip named txt": (file("a.txt", gzip.compress(LONG.encode())), [], r"is gzip data; rename it to a\.txt\.gz"),
    "a torn gzip": (file("a.txt.gz", gzip.compress(LONG.encode())[:-9]), [], r"a\.txt\.gz cannot be read: "),
    "one bad file in a folder": (
        folder_with_one_bad_file, [], rf"b\.txt is not UTF-8: byte 0xe9 at offset {len(LONG.encode()) + 3}",
    ),
    "a broken line of jsonl": (file("a.jsonl", LINE + b'{"text": "a\n'), [], r"a\.jsonl line 2 is not JSON"),
    "a line without the field": (
        file("a.jsonl", LINE + b'{"body": "a"}\n'), [], r"a\.jsonl line 2 has no field 'text'",
    ),
    "a null in parquet": (parquet_with_a_null, [], r"a\.parquet row 8: field 'text' is null"),
    "other bytes in parquet": (parquet_of_other_bytes, [], r"a\.parquet row 2: byte 0xff at position 1 is not UTF-8"),
    "a pipe": (pipe, [], r"a\.txt is neither a file nor a folder"),
    "an endless device": (lambda _: Path("/dev/zero"), [], r"data\.path=/dev/zero is neither a file nor a folder"),
    "a link to nothing": (dangling, [], r"a\.txt is a link to nowhere\.txt, where there is nothing"),
    "rows without a letter": (file("a.jsonl", b'{"text": ""}\n' * 50), [], r"a\.jsonl holds no text: every"),
    "shorter than the context": (
        file("a.txt", b"ab" * 40), ["model.context=100"], r"72 tokens, but model\.context=100",
    ),
    "no text for validation": (
        file("a.txt", b"abcdefgh"), ["data.val_fraction=0.01", "data.split=document", "data.test_fraction=0.01"],
        r"leaves no text for",
    ),
    "a validation text of one token": (
        file("a.txt", b"ab" * 50), ["data.val_fraction=0.01"], r"validation text of 1 tokens has nothing to predict",
    ),
    "a batch that does not divide": (
        file("a.txt", LONG.encode()), ["batch_size=9"], r"batch_size=9 does not divide into 2 parts",
    ),
    "fewer epochs than a step": (file("a.txt", LONG.encode()), ["epochs=0.001"], r"epochs=0\.001"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_text_that_cannot_be_used_is_one_line_with_the_place(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, settings, said = REFUSED[name]
    assert train(tmp_path, f"data.path={make(tmp_path)}", *settings) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and re.search(said, error), error
    assert not (tmp_path / "runs" / "a").exists()


def test_a_batch_larger_than_the_data_goes_round_it_more_than_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abcdefgh" * 20)  # 144 tokens to train on: 8 windows of 16
    assert train(tmp_path, f"data.path={tmp_path / 'a.txt'}", "batch_size=64") == 0
    rows = [row for row in read_metrics(tmp_path / "runs" / "a") if row["kind"] == "train"]
    assert [row["tokens"] for row in rows] == [64 * 16, 2 * 64 * 16]


def test_a_validation_split_may_be_empty_by_request(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LONG, encoding="utf-8")
    assert train(tmp_path, f"data.path={tmp_path / 'a.txt'}", "data.val_fraction=0") == 0
    rows = read_metrics(tmp_path / "runs" / "a")
    assert {row["kind"] for row in rows} == {"train"} and len(rows) == 2
    assert kept_text(tmp_path) == LONG


@pytest.mark.parametrize("budget", ["steps=0", "tokens=0", "epochs=0", "steps=null", "tokens=1", "epochs=0.001"])
def test_success_never_means_no_step(budget: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(LONG, encoding="utf-8")
    status = train(tmp_path, f"data.path={tmp_path / 'a.txt'}", budget)
    error = capsys.readouterr().err
    assert status == 2 and error.count("\n") == 1 and ("steps" in error or budget in error), error


def test_a_name_that_is_no_unicode_is_a_name_like_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / name).write_text(LONG, encoding="utf-8")
    for _ in ("prepared", "found prepared"):
        shutil.rmtree(tmp_path / "runs" / "a", ignore_errors=True)
        assert train(tmp_path, f"data.path={tmp_path / name}") == 0
    assert "\\udce9" in capsys.readouterr().out
    assert kept_text(tmp_path) == LONG


def test_a_glob_goes_into_no_link_that_leads_back(tmp_path: Path) -> None:
    (tmp_path / "loop" / "in").mkdir(parents=True)
    (tmp_path / "loop" / ".hidden").mkdir()
    for place in ("a.txt", "in/b.txt", "in/c.md", ".hidden/d.txt"):
        (tmp_path / "loop" / place).write_text("x", encoding="utf-8")
    for link, to in (("up", ".."), ("self", "."), ("in/again", "../in"), ("b.txt", "b.txt")):
        (tmp_path / "loop" / link).symlink_to(to)
    (tmp_path / "in.txt").symlink_to("loop/in/b.txt")
    found = {
        pattern: [str(file.relative_to(tmp_path)) for file in find_files(f"{tmp_path}/{pattern}")]
        for pattern in ("loop/**/*.txt", "**/in/*.txt", "**/loop/**", "*.txt")
    }
    assert found == {
        "loop/**/*.txt": ["loop/a.txt", "loop/in/b.txt"],
        "**/in/*.txt": ["loop/in/b.txt"],
        "**/loop/**": ["loop/a.txt", "loop/in/b.txt", "loop/in/c.md"],
        "*.txt": ["in.txt"],
    }

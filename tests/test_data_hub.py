"""Hugging Face data sets, on folders that `datasets` itself has written: no mock, no network."""

from pathlib import Path
from typing import Any

import pytest

from softattn_lm.data import Prepared, prepare
from softattn_lm.data.hub import Hub
from softattn_lm.data.sources import TextFiles
from softattn_lm.errors import UserError
from softattn_lm.tokenizer import ByteTokenizer

datasets = pytest.importorskip("datasets")

ROWS = [f"row {i}\r\n é \U0001f389" for i in range(25)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """saved: one split; splits: train, validation, test; parquet, jsonl: plain files of the same; texts: novels."""
    datasets.disable_progress_bars()
    root = tmp_path_factory.mktemp("hub")
    rows = datasets.Dataset.from_dict({"text": ROWS, "n": list(range(25))})
    rows.save_to_disk(str(root / "saved"))
    parts = {"train": rows, "validation": rows.select([3, 4]), "test": rows.select([5])}
    datasets.DatasetDict(parts).save_to_disk(str(root / "splits"))
    for name, part in parts.items():
        part.to_parquet(str(root / "parquet" / f"{name}.parquet"))
        part.to_json(str(root / "jsonl" / f"{name}.jsonl"))
    (root / "texts").mkdir()
    (root / "texts" / "a.txt").write_text("a\nb", encoding="utf-8")
    return root


def prepared(folder: Path, cache: Path, **settings: Any) -> Prepared:
    settings = {"val_fraction": 0.0} | settings
    return prepare(Hub(str(folder), **settings), ByteTokenizer(), cache, progress=False)


def text(found: Prepared, name: str = "train") -> str:
    return found.tokenizer.decode(found.splits[name].tokens)


@pytest.mark.parametrize("kind", ["saved", "splits", "parquet", "jsonl"])
@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_a_folder_become_documents(folders: Path, tmp_path: Path, kind: str, streaming: bool) -> None:
    found = prepared(folders / kind, tmp_path, streaming=streaming)
    assert text(found) == "\n\n".join(ROWS)
    assert len(found.splits["train"].documents) == 25
    assert prepared(folders / kind, tmp_path, streaming=streaming).cached


@pytest.mark.parametrize("kind", ["splits", "parquet", "jsonl"])
def test_a_data_set_may_bring_its_own_validation_and_test(folders: Path, tmp_path: Path, kind: str) -> None:
    found = prepared(folders / kind, tmp_path, validation_split="validation", test_split="test", val_fraction=None)
    assert text(found) == "\n\n".join(ROWS)
    assert text(found, "validation") == "\n\n".join(ROWS[3:5])
    assert text(found, "test") == ROWS[5]


def test_splits_can_be_joined_in_a_given_order(folders: Path, tmp_path: Path) -> None:
    found = prepared(folders / "splits", tmp_path, train_split="test+validation", separator="")
    assert text(found) == ROWS[5] + ROWS[3] + ROWS[4]


def test_a_share_of_whole_documents_validates_by_default(folders: Path, tmp_path: Path) -> None:
    found = prepared(folders / "saved", tmp_path, val_fraction=0.2)
    parts = [text(found, name).split("\n\n") for name in ("train", "validation")]
    assert sorted(parts[0] + parts[1]) == sorted(ROWS)
    assert len(parts[1]) == 5
    assert Hub(str(folders / "saved")).val_fraction == 0.01


def test_the_key_is_the_content_of_the_folder(tmp_path: Path) -> None:
    for content in ("one", "two"):
        (tmp_path / "set").mkdir(exist_ok=True)
        file = tmp_path / "set" / "train.jsonl"
        file.write_text(f'{{"text": "{content}"}}\n', encoding="utf-8")
        assert text(prepared(tmp_path / "set", tmp_path / "cache")) == content


def test_the_expected_number_of_characters_is_checked(folders: Path, tmp_path: Path) -> None:
    n = len("\n\n".join(ROWS))
    assert prepared(folders / "saved", tmp_path, characters=n).splits["train"].n_characters == n
    with pytest.raises(UserError, match=rf"has {n} characters, but data\.characters=5 was expected"):
        prepared(folders / "splits", tmp_path, characters=5)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("saved", {"train_split": "dev"}, "has no split 'dev'; its splits are train"),
        ("splits", {"train_split": "dev"}, "has no split 'dev'; its splits are train, validation, test"),
        ("parquet", {"train_split": "dev"}, "cannot be loaded: .*dev"),
        ("saved", {"text_column": "body"}, "has no column 'body'; use data.text_column=<one of: text, n>"),
        ("jsonl", {"text_column": "body"}, "has no column 'body'; use data.text_column=<one of: text, n>"),
        ("parquet", {"text_column": "n"}, "train row 1: field 'n' is a int, not text"),
        ("parquet", {"config": "german"}, "cannot be loaded: BuilderConfig 'german' not found"),
        ("texts", {}, "holds text files only; use data=text_file data.path="),
        ("nothing", {}, "data.name=.*nothing: there is no such folder"),
        ("splits", {"validation_split": "validation", "val_fraction": 0.1}, "nothing to do; use one of the two"),
        ("splits", {"test_split": "test", "test_fraction": 0.1}, "nothing to do; use one of the two"),
    ],
)
def test_what_is_not_there_is_named(
    folders: Path, tmp_path: Path, kind: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepared(folders / kind, tmp_path, **settings)


def test_a_null_is_named_by_its_row(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a"] * 1200 + [None]})
    rows.save_to_disk(str(tmp_path / "set"))
    with pytest.raises(UserError, match="train row 1201: field 'text' is null"):
        prepared(tmp_path / "set", tmp_path / "cache")


def test_parquet_is_the_same_text_as_a_file_and_as_a_data_set(folders: Path, tmp_path: Path) -> None:
    as_file = TextFiles(str(folders / "parquet" / "train.parquet"), val_fraction=0)
    assert text(prepare(as_file, ByteTokenizer(), tmp_path)) == text(prepared(folders / "parquet", tmp_path))

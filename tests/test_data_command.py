"""prepare_data: what a person sees, and that the command it proposes trains on the same token files."""

from pathlib import Path
from typing import Any

import pytest

from softattn_lm.commands.prepare_data import run, train_command
from softattn_lm.errors import UserError

SOURCES = "softattn_lm.data.sources"
BYTE = {"_target_": "softattn_lm.tokenizer.byte.ByteTokenizer"}


def config(folder: Path, **data: Any) -> dict[str, Any]:
    (folder / "my text.txt").write_text("abcé\n" * 100, encoding="utf-8")
    node = {"_target_": f"{SOURCES}.TextFiles", "path": str(folder / "my text.txt"), "val_fraction": 0.2} | data
    return {"runs": str(folder / "runs"), "tokenizer": BYTE, "data": node}


def test_the_table_counts_and_a_second_run_finds_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run(config(tmp_path), [])
    first = capsys.readouterr().out
    row = next(line for line in first.splitlines() if "train" in line)
    assert [cell.strip() for cell in row.split("│")][1:-1] == ["train", "1", "480", "400", "480", "1.00"]
    assert "vocabulary 256, stored as uint16" in first
    assert f"token files: {tmp_path / 'runs' / 'cache'}" in first
    assert "already prepared" not in first
    run(config(tmp_path), [])
    second = capsys.readouterr().out
    assert "already prepared" in second
    assert second.splitlines()[-3:] == first.splitlines()[-3:]


def test_the_proposed_command_names_what_was_chosen(tmp_path: Path) -> None:
    cfg = config(tmp_path, separator="\n\n", validation_sets={"diary": "d.txt"})
    assert train_command(cfg) == (
        f"softattn train data=text_file 'data.path={tmp_path}/my text.txt' data.val_fraction=0.2 "
        f"+data.validation_sets.diary=d.txt tokenizer=byte runs={tmp_path}/runs"
    )
    austen = {"_target_": f"{SOURCES}.ShippedText", "corpus": "austen"}
    bpe = {"_target_": "softattn_lm.tokenizer.bpe.BPETokenizer", "vocab_size": 512}
    assert train_command({"runs": "runs", "data": austen, "tokenizer": bpe}) == (
        "softattn train data=austen tokenizer=bpe tokenizer.vocab_size=512"
    )


def test_a_positional_word_is_refused_with_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"but got 'emma\.txt'; .*data\.path="):
        run(config(tmp_path), ["emma.txt"])

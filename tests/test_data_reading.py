"""Reading: nothing in a text is changed or lost, and what cannot be read is named by file and place."""

import gzip
import json
import os
from pathlib import Path

import pytest

from softattn_lm.data.paths import find_files
from softattn_lm.data.reading import BLOCK, read_documents
from softattn_lm.data.sources import TextFiles
from softattn_lm.errors import UserError


def text_of(file: Path, column: str = "text") -> str:
    return "".join(piece for piece, _ in read_documents(file, column))


def rows_of(file: Path, column: str = "text") -> list[str]:
    return [piece for piece, starts in read_documents(file, column) if starts]


def write(file: Path, data: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return file


AWKWARD = "a\r\nb\rc\n\x00d\u2028e\x85f\ufeffg\u2029\x1c é 日 \U0001f389\n\n\n"


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.gz", "a.md", "a"])
def test_every_character_of_a_text_is_kept(tmp_path: Path, name: str) -> None:
    assert text_of(write(tmp_path / name, AWKWARD.encode())) == AWKWARD


def test_a_character_may_lie_across_two_blocks(tmp_path: Path) -> None:
    text = "x" * (BLOCK - 1) + "日" + "y" * BLOCK
    pieces = list(read_documents(write(tmp_path / "a.txt", text.encode()), "text"))
    assert "".join(piece for piece, _ in pieces) == text
    assert [starts for _, starts in pieces] == [True, False, False]


def test_one_byte_order_mark_is_left_out_and_a_second_one_kept(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "\ufeff\ufeffab".encode())
    with pytest.warns(UserWarning, match=r"a\.txt begins with a byte order mark"):
        assert text_of(file) == "\ufeffab"


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"caf\xe9 au lait", "byte 0xe9 at offset 3"),
        (b"\xff", "byte 0xff at offset 0"),
        (b"abc\xe6\x97", "byte 0xe6 at offset 3"),  # ends inside a character
        (b"x" * BLOCK + b"ab\xe9 ", f"byte 0xe9 at offset {BLOCK + 2}"),
        (b"x" * (BLOCK - 1) + b"\xe6\x97 ", f"byte 0xe6 at offset {BLOCK - 1}"),  # begins before, fails after the block
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_wrong_byte_is_named_by_file_and_offset(tmp_path: Path, name: str, data: bytes, place: str) -> None:
    with pytest.raises(UserError, match=rf"{name} is not UTF-8: {place} .*iconv -f LATIN1"):
        text_of(write(tmp_path / name, data))


def test_the_offset_counts_a_byte_order_mark(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", b"\xef\xbb\xbfab\xff")
    with pytest.warns(UserWarning, match="byte order mark"), pytest.raises(UserError, match="offset 5"):
        text_of(file)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_other_encodings_are_recognised(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(UserError, match=rf"is {encoding.upper()}, not UTF-8; convert it: iconv -f {encoding.upper()}"):
        text_of(write(tmp_path / "a.txt", "abc".encode(encoding)))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_gzip_data_under_another_name_is_recognised(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, gzip.compress(b"{}"))
    with pytest.raises(UserError, match=rf"{name} is gzip data; rename it to {name}\.gz"):
        text_of(file)


def test_a_broken_gzip_file_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(os.urandom(5000).hex().encode())
    for broken in (whole[:2000], b"no gzip at all", whole[:100] + b"\0" * 100 + whole[200:]):
        file = tmp_path / "a.txt.gz"
        file.write_bytes(broken)
        with pytest.raises(UserError, match=r"a\.txt\.gz cannot be read"):
            text_of(file)


# --- rows


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_each_line_of_jsonl_is_a_document(tmp_path: Path, name: str) -> None:
    rows = [AWKWARD, "", "two"]
    data = "\r\n".join(json.dumps({"id": 1, "text": row}, ensure_ascii=i == 0) for i, row in enumerate(rows)) + "\n\n"
    assert rows_of(write(tmp_path / name, data.encode())) == rows


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"text": "a"', "line 3 is not JSON"),
        (b'{"text": "caf\xe9"}', "line 3: byte 0xe9 at position 13 is not UTF-8"),
        (b'["a"]', "line 3 is a JSON list, not an object"),
        (b'{"body": "a"}', r"line 3 has no field 'text' \(its fields: body\); use data.text_column="),
        (b'{"text": null}', "line 3: field 'text' is null, not text"),
        (b'{"text": 5}', "line 3: field 'text' is a int, not text"),
        (rb'{"text": "a\ud800"}', "line 3: field 'text' has half a surrogate pair at character 1"),
        (b"[" * 100_000, "line 3 is not JSON"),
    ],
)
def test_a_faulty_line_is_named_by_file_line_and_field(tmp_path: Path, line: bytes, fault: str) -> None:
    file = write(tmp_path / "a.jsonl", b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=rf"a\.jsonl {fault}"):
        rows_of(file)


def parquet(file: Path, columns: dict[str, list[object]]) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), file, row_group_size=2)
    return file


def test_each_row_of_parquet_is_a_document(tmp_path: Path) -> None:
    rows = [AWKWARD, "", "two"] * 700
    assert rows_of(parquet(tmp_path / "a.parquet", {"n": list(range(2100)), "body": rows}), "body") == rows


def test_faulty_parquet_is_named_by_file_and_row(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", {"text": ["a"] * 1500 + [None], "n": [1] * 1501})
    with pytest.raises(UserError, match=r"a\.parquet row 1501: field 'text' is null"):
        rows_of(file)
    with pytest.raises(UserError, match="row 1: field 'n' is a int"):
        rows_of(file, "n")
    with pytest.raises(UserError, match=r"no column 'body' \(its columns: text, n\)"):
        rows_of(file, "body")
    with pytest.raises(UserError, match=r"b\.parquet is not a readable parquet file"):
        rows_of(write(tmp_path / "b.parquet", b"PAR1 not really"))


# --- paths


@pytest.mark.parametrize("name", ["a b,c.txt", "x[1].txt", "(a)=b's.txt", "what?.txt", "*.txt", "é日.txt"])
def test_a_path_that_exists_wins_over_its_meaning_as_a_pattern(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, b"a")
    write(tmp_path / "x1.txt", b"other")
    assert find_files(str(file)) == [file]


def test_a_folder_with_brackets_wins_over_its_meaning_as_a_pattern(tmp_path: Path) -> None:
    file = write(tmp_path / "novels [1], old" / "a.txt", b"a")
    assert find_files(str(file.parent)) == [file]


def test_the_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(tmp_path / "a b.txt", b"a")
    assert find_files("~/a b.txt") == [file]
    assert find_files("~/*.txt") == [file]


def test_a_folder_called_like_a_home_wins_and_a_home_of_nobody_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~tilde").mkdir()
    write(tmp_path / "~tilde" / "t=1.txt", b"x")
    assert find_files("~tilde/t=1.txt") == [Path("~tilde/t=1.txt")]
    with pytest.raises(UserError, match=r"~nobody-is-called-so/t.txt: no such file or folder"):
        find_files("~nobody-is-called-so/t.txt")


def test_files_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    names = ["b.txt", "a/z.txt", "a.txt", "c.txt.gz"]
    files = [write(tmp_path / name, b"x") for name in names]
    write(tmp_path / ".hidden.txt", b"x")
    write(tmp_path / ".git" / "x.txt", b"x")
    assert find_files(str(tmp_path)) == sorted(files)
    assert find_files(str(tmp_path / "**" / "*.txt")) == sorted(f for f in files if f.suffix == ".txt")


def test_what_a_folder_leaves_out_is_said(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", b"x")
    write(tmp_path / "b.md", b"x")
    with pytest.warns(UserWarning, match=r"left out 1 \.md"):
        assert find_files(str(tmp_path)) == [file]
    assert find_files(str(tmp_path / "*.md")) == [tmp_path / "b.md"]


def test_what_is_not_there_is_named_with_the_nearest_name(tmp_path: Path) -> None:
    write(tmp_path / "emma.txt", b"x")
    with pytest.raises(UserError, match=r"data\.path=.*ema\.txt: no such file or folder; did you mean .*emma\.txt\?"):
        find_files(str(tmp_path / "ema.txt"))
    (tmp_path / "dang.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(UserError, match=r"dang\.txt is a link to .*gone\.txt, where there is nothing$"):
        find_files(str(tmp_path / "dang.txt"))
    with pytest.raises(UserError, match="nor is there a folder"):
        find_files(str(tmp_path / "no" / "ema.txt"))
    with pytest.raises(UserError, match="holds no txt, jsonl, parquet or gz file"):
        find_files(str(write(tmp_path / "code" / "a.py", b"x").parent))


def test_rows_and_plain_text_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"x")
    write(tmp_path / "b.jsonl", b'{"text": "x"}')
    with pytest.raises(UserError, match=r"mixes rows \(b\.jsonl\) with plain text \(a\.txt\)"):
        find_files(str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", b"x")
    file.chmod(0)
    with pytest.raises(UserError, match=r"a\.txt cannot be read: Permission denied"):
        text_of(file)


def test_wrong_settings_are_named() -> None:
    here = str(Path(__file__))
    for wrong, message in (
        ({"val_fraction": 1.0}, "data.val_fraction=1.0 is not a fraction"),
        ({"test_fraction": -0.1}, "data.test_fraction=-0.1"),
        ({"val_fraction": 0.6, "test_fraction": 0.4}, "leave nothing to train on"),
        ({"split": "random"}, "data.split=random is not known"),
        ({"sampling": "shuffled"}, "data.sampling=shuffled is not known"),
        ({"validation_sets": {"train": here}}, "data.validation_sets.train: this name is taken"),
        ({"validation_sets": {"a/b": here}}, "'a/b' is no name"),
        ({"validation_sets": {"a": 1}}, "data.validation_sets.a=1 is no path"),
    ):
        with pytest.raises(UserError, match=message):
            TextFiles(here, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"data=text_file needs data\.path="):
        TextFiles("")

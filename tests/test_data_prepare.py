"""Preparation: split, fit on train, encode; cached by content, atomically, in bounded memory."""

import json
import multiprocessing
import os
import pickle
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from softattn_lm.data import Prepared, ShippedText, Split, TextFiles, prepare, prepare_text
from softattn_lm.data.prepare import PIECE, pieces
from softattn_lm.data.progress import AFTER, Progress
from softattn_lm.data.splitting import split
from softattn_lm.data.spool import Spool
from softattn_lm.data.token_files import token_dtype
from softattn_lm.errors import UserError
from softattn_lm.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, PretrainedTokenizer, UnseenCharacters

AUSTEN = Path(__file__).parents[1] / "data" / "austen"
PERSUASION = (AUSTEN / "persuasion.txt").read_text(encoding="utf-8")


def write(file: Path, text: str) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode())
    return str(file)


def decoded(prepared: Prepared, name: str) -> str:
    return prepared.tokenizer.decode(prepared.splits[name].tokens)


def documents(split: Split, tokenizer: ByteTokenizer) -> list[str]:
    """The texts between the recorded document starts."""
    ends = [*split.documents[1:], split.n_tokens]
    return [tokenizer.decode(split.tokens[a:b]) for a, b in zip(split.documents, ends, strict=True)]


def spool(folder: Path, texts: list[str], joiner: str = "") -> Spool:
    return Spool(folder / "spool", [(text, True) for text in texts], joiner, Progress(False))


# --- the split


def test_ninety_ten_of_tiny_shakespeare_is_nanogpts(tmp_path: Path) -> None:
    # 0.9 · 1,115,394 = 1,003,854.6
    spans = split(spool(tmp_path, ["a" * 1_115_394]), "contiguous", 0.1, 0.0)
    assert spans == {"train": [(0, 1_003_854)], "validation": [(1_003_854, 1_115_394)], "test": []}


def test_contiguous_tails_count_characters_and_not_bytes(tmp_path: Path) -> None:
    text = "日" * 10 + "a" * 5 + "é" * 5
    data = TextFiles(write(tmp_path / "a.txt", text), val_fraction=0.25, test_fraction=0.25)
    prepared = prepare(data, ByteTokenizer(), tmp_path)
    assert [decoded(prepared, name) for name in ("train", "validation", "test")] == ["日" * 10, "aaaaa", "ééééé"]
    assert [prepared.splits[name].n_bytes for name in ("train", "validation", "test")] == [30, 5, 10]
    assert [prepared.splits[name].n_characters for name in ("train", "validation", "test")] == [10, 5, 5]


def test_fractions_are_decimals_and_not_their_binary_neighbours(tmp_path: Path) -> None:
    # 1 - 0.05 - 0.05 is 0.8999999999999999 in floating point, which would give 89 characters.
    spans = split(spool(tmp_path, ["a" * 100]), "contiguous", 0.05, 0.05)
    assert spans == {"train": [(0, 90)], "validation": [(90, 95)], "test": [(95, 100)]}


@pytest.mark.parametrize("how", ["contiguous", "document"])
def test_every_character_is_in_exactly_one_split(tmp_path: Path, how: str) -> None:
    texts = [f"{i:04d}" for i in range(1000)]
    text = spool(tmp_path, texts)
    spans = split(text, how, 0.1, 0.2)
    parts = {name: "".join(piece for piece, _ in text.pieces(found)) for name, found in spans.items()}
    assert {name: len(part) for name, part in parts.items()} == {"train": 2800, "validation": 400, "test": 800}
    if how == "contiguous":
        assert "".join(parts[name] for name in ("train", "validation", "test")) == "".join(texts)
    assert sorted(re.findall("....", "".join(parts.values()))) == texts


def test_whole_documents_are_chosen_by_content_and_not_by_their_order(tmp_path: Path) -> None:
    texts = [f"document {i}\n" for i in range(50)]
    chosen = []
    for order in (texts, texts[::-1]):
        text = spool(tmp_path, order)
        found = split(text, "document", 0.2, 0.1)
        chosen.append({name: {piece for piece, _ in text.pieces(spans)} for name, spans in found.items()})
    assert chosen[0] == chosen[1]
    assert [len(chosen[0][name]) for name in ("train", "validation", "test")] == [35, 10, 5]


def test_equal_documents_are_never_on_both_sides(tmp_path: Path) -> None:
    texts = [f"document {i % 10}" for i in range(200)]
    text = spool(tmp_path, texts, "\n")
    found = {name: {p.strip() for p, _ in text.pieces(s)} for name, s in split(text, "document", 0.3, 0.3).items()}
    assert all(found.values())
    assert sum(len(part) for part in found.values()) == 10


def test_rows_are_joined_by_the_separator_and_nothing_hangs_at_the_end(tmp_path: Path) -> None:
    rows = [f"row {i}" for i in range(20)]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in rows))
    whole = prepare(TextFiles(path, val_fraction=0), ByteTokenizer(), tmp_path)
    assert decoded(whole, "train") == "\n\n".join(rows)
    data = TextFiles(path, val_fraction=0.3, split="document", separator=" | ")
    by_document = prepare(data, ByteTokenizer(), tmp_path)
    kept = [decoded(by_document, name).split(" | ") for name in ("train", "validation")]
    assert sorted(kept[0] + kept[1]) == sorted(rows)
    assert kept[0] == [row for row in rows if row in kept[0]]  # their old order


def test_files_are_concatenated_untouched_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, text in (("b.txt", "second"), ("a.txt", "first\r\n"), ("c.txt", "\nthird")):
        write(tmp_path / "novels" / name, text)
    prepared = prepare(TextFiles(str(tmp_path / "novels"), val_fraction=0), ByteTokenizer(), tmp_path)
    assert decoded(prepared, "train") == "first\r\nsecond\nthird"
    assert documents(prepared.splits["train"], prepared.tokenizer) == ["first\r\n", "second", "\nthird"]


def test_documents_are_recorded_where_they_begin_and_a_split_may_begin_inside_one(tmp_path: Path) -> None:
    for name in "abcd":
        write(tmp_path / "novels" / f"{name}.txt", name * 10)
    prepared = prepare(TextFiles(str(tmp_path / "novels"), val_fraction=0.375), ByteTokenizer(), tmp_path)
    assert prepared.splits["train"].documents.tolist() == [0, 10, 20]
    assert prepared.splits["validation"].documents.tolist() == [5]


def test_validation_and_test_may_be_empty_by_request_only(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "abcdef")
    prepared = prepare(TextFiles(path, val_fraction=0, test_fraction=0), ByteTokenizer(), tmp_path)
    assert [prepared.splits[name].n_tokens for name in ("train", "validation", "test")] == [6, 0, 0]
    assert len(prepared.splits["validation"].tokens) == 0
    with pytest.raises(UserError, match=r"no text for train: there are 1 documents only; use data\.split=contiguous"):
        prepare(TextFiles(path, split="document"), ByteTokenizer(), tmp_path)
    with pytest.raises(UserError, match="no text for train: there are 1 characters"):
        prepare(TextFiles(write(tmp_path / "b.txt", "a"), val_fraction=0.5), ByteTokenizer(), tmp_path)


# --- tokens


def test_the_tokenizer_learns_from_the_training_text_only(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "abcabcabcabcabcabcé")
    with pytest.raises(UserError, match=r"the validation text of .*a\.txt has characters .*'é' U\+00E9 \(once\)"):
        prepare(TextFiles(path), CharTokenizer(), tmp_path)
    with pytest.warns(UnseenCharacters, match="1 of its characters was replaced"):
        prepared = prepare(TextFiles(path), CharTokenizer("symbol"), tmp_path)
    assert prepared.tokenizer.vocab_size == 4
    assert decoded(prepared, "validation") == "c\ufffd"


@pytest.mark.parametrize("size", [300, 1000])
def test_encoding_in_pieces_is_encoding_each_document_whole(tmp_path: Path, size: int) -> None:
    novels = [PERSUASION[:150_000], PERSUASION[150_000:190_001], "\n\n " + PERSUASION[200_000:240_000] + "\n \n\n"]
    for i, novel in enumerate(novels):
        write(tmp_path / "novels" / f"{i}.txt", novel)
    prepared = prepare(TextFiles(str(tmp_path / "novels"), val_fraction=0), BPETokenizer(size), tmp_path)
    whole = BPETokenizer(size)
    whole.fit(novels)
    assert whole.state() == prepared.tokenizer.state()
    starts = [*prepared.splits["train"].documents, prepared.splits["train"].n_tokens]
    for novel, begin, end in zip(novels, starts, starts[1:], strict=False):
        assert prepared.splits["train"].tokens[begin:end].tolist() == whole.encode(novel).tolist()


def test_a_pretrained_tokenizer_is_keyed_by_its_content_and_encodes_whole_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", PERSUASION[:100_000])
    trained = BPETokenizer(500)
    trained.fit([PERSUASION])
    trained.backend.save(str(tmp_path / "tokenizer.json"))
    first = prepare(TextFiles(path, val_fraction=0), PretrainedTokenizer(str(tmp_path)), tmp_path / "cache")
    assert first.splits["train"].tokens.tolist() == trained.encode(PERSUASION[:100_000]).tolist()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tokenizer.json").rename(tmp_path / "elsewhere" / "other.json")
    again = PretrainedTokenizer(str(tmp_path / "elsewhere" / "other.json"))
    assert prepare(TextFiles(path, val_fraction=0), again, tmp_path / "cache").cached
    trained.fit([PERSUASION[:50_000]])
    trained.backend.save(str(tmp_path / "elsewhere" / "other.json"))
    changed = PretrainedTokenizer(str(tmp_path / "elsewhere" / "other.json"))
    assert not prepare(TextFiles(path, val_fraction=0), changed, tmp_path / "cache").cached


def test_pieces_are_the_text_and_grow_where_no_cut_is_allowed() -> None:
    text = "".join(random.Random(0).choices("ab \n", k=5 * PIECE))
    cut = list(pieces([(text[:100], True), (text[100:], False), ("next", True)], BPETokenizer(256).cut))
    assert "".join(piece for piece, _ in cut) == text + "next"
    assert [starts for _, starts in cut] == [True, *[False] * (len(cut) - 2), True]
    assert max(len(piece) for piece, _ in cut) <= PIECE
    assert list(pieces([("x" * 3 * PIECE, True)], lambda text: 0)) == [("x" * 3 * PIECE, True)]


def test_the_type_follows_the_vocabulary() -> None:
    assert token_dtype(65_536) == "uint16"
    assert token_dtype(65_537) == "uint32"


def test_a_large_vocabulary_is_stored_whole(tmp_path: Path) -> None:
    text = "".join(chr(0x10000 + i) for i in range(70_000))
    prepared = prepare(TextFiles(write(tmp_path / "a.txt", text), val_fraction=0), CharTokenizer(), tmp_path)
    assert prepared.splits["train"].tokens.dtype == np.uint32
    assert prepared.splits["train"].tokens[-1] == 69_999


# --- the cache


def test_new_content_under_the_same_path_and_time_stamp_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "abcabc")
    stat = os.stat(path)
    first = prepare(TextFiles(path, val_fraction=0), CharTokenizer(), tmp_path / "cache")
    write(tmp_path / "a.txt", "xyzxyz")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = prepare(TextFiles(path, val_fraction=0), CharTokenizer(), tmp_path / "cache")
    assert (decoded(first, "train"), decoded(second, "train")) == ("abcabc", "xyzxyz")
    assert first.fingerprint != second.fingerprint


def test_the_same_content_elsewhere_is_found(tmp_path: Path) -> None:
    first = prepare(TextFiles(write(tmp_path / "a.txt", "abcabcabc\n" * 10)), CharTokenizer(), tmp_path / "cache")
    other = TextFiles(write(tmp_path / "elsewhere" / "b.txt", "abcabcabc\n" * 10))
    second = prepare(other, CharTokenizer(), tmp_path / "cache")
    assert (first.cached, second.cached) == (False, True)
    assert second.folder == first.folder
    assert second.tokenizer.state() == first.tokenizer.state()
    assert second.splits == first.splits


def test_each_setting_that_changes_tokens_changes_the_fingerprint(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"row {i}", "body": "b"}) + "\n" for i in range(100))
    path = write(tmp_path / "a.jsonl", rows)
    variants = [
        (TextFiles(path), ByteTokenizer()),
        (TextFiles(path), CharTokenizer()),
        (TextFiles(path), CharTokenizer("symbol")),
        (TextFiles(path), BPETokenizer(256)),
        (TextFiles(path), BPETokenizer(257)),
        (TextFiles(path, val_fraction=0.2), ByteTokenizer()),
        (TextFiles(path, test_fraction=0.2), ByteTokenizer()),
        (TextFiles(path, split="document"), ByteTokenizer()),
        (TextFiles(path, separator="\n"), ByteTokenizer()),
        (TextFiles(path, text_column="body"), ByteTokenizer()),
    ]
    prints = {prepare(data, tokenizer, tmp_path / "cache").fingerprint for data, tokenizer in variants}
    assert len(prints) == len(variants)
    assert prepare(TextFiles(path, sampling="random"), ByteTokenizer(), tmp_path / "cache").fingerprint in prints


def test_file_boundaries_are_part_of_the_content(tmp_path: Path) -> None:
    for folder, texts in (("one", ["ab", "cd"]), ("two", ["abc", "d"])):
        for i, text in enumerate(texts):
            write(tmp_path / folder / f"{i}.txt", text)
    prints = {
        prepare(TextFiles(str(tmp_path / folder), val_fraction=0), ByteTokenizer(), tmp_path / "cache").fingerprint
        for folder in ("one", "two")
    }
    assert len(prints) == 2


@pytest.mark.parametrize(
    "damage",
    [
        "tokens cut short", "an id beyond the vocabulary", "no documents", "half the documents", "other documents",
        "documents that are none", "no meta", "half a meta", "another meta",
    ],
)  # fmt: skip
def test_a_damaged_folder_is_never_used(tmp_path: Path, damage: str) -> None:
    data = TextFiles(write(tmp_path / "a.txt", "abc" * 100))
    first = prepare(data, CharTokenizer(), tmp_path / "cache")
    meta = first.folder / "meta.json"
    match damage:
        case "tokens cut short":
            os.truncate(first.folder / "train.bin", 10)
        case "no documents":
            (first.folder / "train.documents.npy").unlink()
        case "an id beyond the vocabulary":
            with (first.folder / "train.bin").open("r+b") as file:
                file.seek(100)
                file.write(b"\xff\xff")
        case "half the documents":
            os.truncate(first.folder / "train.documents.npy", 100)
        case "other documents":
            np.save(first.folder / "train.documents.npy", np.array([0, 10**9]))
        case "documents that are none":
            np.save(first.folder / "train.documents.npy", np.array(["a"]))
        case "no meta":
            meta.unlink()
        case "half a meta":
            meta.write_text(meta.read_text()[:100])
        case "another meta":
            meta.write_text("[]")
    with pytest.warns(UserWarning, match="is damaged and was moved"):
        second = prepare(data, CharTokenizer(), tmp_path / "cache")
    assert not second.cached
    assert decoded(second, "train") == "abc" * 90
    assert prepare(data, CharTokenizer(), tmp_path / "cache").cached


def test_an_interrupted_preparation_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = TextFiles(write(tmp_path / "a.txt", "abc" * 100))

    def interrupted(*_: object) -> list[np.ndarray]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode_batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(data, ByteTokenizer(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert not prepare(data, ByteTokenizer(), tmp_path / "cache").cached


def test_only_stale_unfinished_folders_are_cleared_away(tmp_path: Path) -> None:
    fresh, stale = tmp_path / ".unfinished-1-a", tmp_path / ".unfinished-2-b"
    for folder in (fresh, stale):
        folder.mkdir()
    os.utime(stale, (0, 0))
    prepare(TextFiles(write(tmp_path / "a.txt", "abc")), ByteTokenizer(), tmp_path)
    assert (fresh.exists(), stale.exists()) == (True, False)


def _prepare_at_once(path: str, cache: str, start: "multiprocessing.synchronize.Barrier", results: object) -> None:
    data = TextFiles(path)
    start.wait()
    prepared = prepare(data, CharTokenizer(), Path(cache))
    results.put((str(prepared.folder), int(prepared.splits["train"].tokens.sum())))  # type: ignore[attr-defined]


def test_processes_that_prepare_the_same_text_at_once_all_succeed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", PERSUASION)
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(3), context.Queue()
    workers = [
        context.Process(target=_prepare_at_once, args=(path, str(tmp_path / "cache"), start, results)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    found = {results.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    assert len(found) == 1
    assert [folder.name for folder in (tmp_path / "cache").iterdir()] == [Path(found.pop()[0]).name]


def test_the_loser_of_a_race_keeps_the_winners_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = TextFiles(write(tmp_path / "a.txt", "abc" * 100))
    fit = CharTokenizer.fit

    def overtaken(self: CharTokenizer, texts: Iterator[str]) -> None:
        monkeypatch.setattr(CharTokenizer, "fit", fit)
        prepare(data, CharTokenizer(), tmp_path / "cache")
        fit(self, texts)

    monkeypatch.setattr(CharTokenizer, "fit", overtaken)
    prepared = prepare(data, CharTokenizer(), tmp_path / "cache")
    assert decoded(prepared, "train") == "abc" * 90
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_text_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = TextFiles(write(tmp_path / "a.txt", "abc" * 100))
    read = TextFiles.parts

    def changed(self: TextFiles) -> object:
        write(tmp_path / "a.txt", "xyz" * 100)
        return read(self)

    monkeypatch.setattr(TextFiles, "parts", changed)
    with pytest.raises(UserError, match="changed while it was read"):
        prepare(data, CharTokenizer(), tmp_path / "cache")


def test_meta_json_says_what_the_files_are(tmp_path: Path) -> None:
    prepared = prepare(TextFiles(write(tmp_path / "é.txt", "abcé" * 100)), CharTokenizer(), tmp_path / "cache")
    meta = json.loads((prepared.folder / "meta.json").read_text(encoding="utf-8"))
    assert meta["format"] == 1
    assert meta["fingerprint"] == prepared.fingerprint == prepared.folder.name
    assert meta["dtype"] == "uint16"
    assert meta["splits"]["train"] == {"n_tokens": 360, "n_bytes": 450, "n_characters": 360}
    assert meta["tokenizer"] == {"kind": "char", "unknown": "error", "characters": "abcé"}
    assert (prepared.folder / "train.bin").stat().st_size == 720
    assert sorted(file.name for file in prepared.folder.iterdir()) == [
        "meta.json", "test.bin", "test.documents.npy", "train.bin", "train.documents.npy", "validation.bin",
        "validation.documents.npy",
    ]  # fmt: skip


def test_a_split_pickles_as_its_path(tmp_path: Path) -> None:
    split = prepare(TextFiles(write(tmp_path / "a.txt", "abc" * 10_000)), ByteTokenizer(), tmp_path).splits["train"]
    assert split.tokens[0] == ord("a")
    data = pickle.dumps(split)
    assert len(data) < 1000
    assert pickle.loads(data).tokens.tolist() == split.tokens.tolist()


# --- more texts


def test_extra_validation_sets_are_encoded_beside_and_change_nothing_else(tmp_path: Path) -> None:
    path, diary = write(tmp_path / "a.txt", "abc" * 100), write(tmp_path / "diary.txt", "cab")
    plain = prepare(TextFiles(path), CharTokenizer(), tmp_path / "cache")
    more = prepare(TextFiles(path, validation_sets={"diary": diary}), CharTokenizer(), tmp_path / "cache")
    assert decoded(more, "diary") == "cab"
    assert more.fingerprint == plain.fingerprint
    assert {name: more.splits[name] for name in plain.splits} == plain.splits
    with pytest.raises(UserError, match=r"data\.validation_sets\.diary=.*no such file"):
        prepare(TextFiles(path, validation_sets={"diary": diary + "x"}), CharTokenizer(), tmp_path / "cache")


def test_any_text_can_be_encoded_with_a_fitted_tokenizer_and_is_cached(tmp_path: Path) -> None:
    tokenizer = BPETokenizer(400)
    tokenizer.fit([PERSUASION])
    data = TextFiles(write(tmp_path / "a.txt", PERSUASION[:9999]))
    first = prepare_text(data, tokenizer, tmp_path / "cache")
    assert first.tokens.tolist() == tokenizer.encode(PERSUASION[:9999]).tolist()
    assert prepare_text(data, tokenizer, tmp_path / "cache") == first
    tokenizer.fit([PERSUASION[:200_000]])
    assert prepare_text(data, tokenizer, tmp_path / "cache").path != first.path


@pytest.mark.parametrize("text", ["", "\ufeff"])
@pytest.mark.filterwarnings("ignore:.*byte order mark")
def test_an_empty_text_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"a\.txt holds no text"):
        prepare(TextFiles(write(tmp_path / "a.txt", text)), ByteTokenizer(), tmp_path)


def test_an_empty_file_among_others_is_pointed_out(tmp_path: Path) -> None:
    write(tmp_path / "novels" / "a.txt", "")
    write(tmp_path / "novels" / "b.txt", "abc")
    with pytest.warns(UserWarning, match=r"a\.txt is empty"):
        prepare(TextFiles(str(tmp_path / "novels"), val_fraction=0), ByteTokenizer(), tmp_path / "cache")


def test_the_shipped_novels_are_the_default_and_need_no_path(tmp_path: Path) -> None:
    prepared = prepare(ShippedText(), CharTokenizer(), tmp_path)
    whole = "".join(file.read_bytes().decode() for file in sorted(AUSTEN.glob("*.txt")))
    assert "".join(decoded(prepared, name) for name in ("train", "validation", "test")) == whole
    assert len(prepared.splits["train"].documents) == 6
    with pytest.raises(UserError, match=r"data\.corpus=bronte does not come"):
        ShippedText("bronte")


# --- progress


def test_short_work_is_silent_and_long_work_shows_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("softattn_lm.data.progress.time.monotonic", lambda: clock[0])
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress().task("encoding", 100) as task:
        clock[0] = AFTER - 0.1
        task.advance(50)
        assert capsys.readouterr().err == ""
        clock[0] = AFTER + 0.1
        task.advance(10)
    assert re.search("encoding.*60/100 bytes", capsys.readouterr().err)
    monkeypatch.setenv("FORCE_COLOR", "")
    with Progress().task("encoding", 3_000_000) as task:
        for _ in range(5):
            clock[0] += AFTER
            task.advance(10)
    assert capsys.readouterr().err == "encoding, 3 MB ...\n"
    with Progress(shown=False).task("encoding", 100) as task:
        clock[0] += 10
        task.advance(50)
    assert capsys.readouterr().err == ""

"""`benchmark data`: preparing a text of 100 MB by characters, bytes and byte pairs, beside `tokenizers` called alone.

Alone: the same text, read whole, the vocabulary trained on it and the text encoded in batches on all cores, nothing
written. Characters and bytes are words of one character there. Each is a process of its own, whose peak of memory is
what the operating system says.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from softattn_lm.commands.comparison import Report, Row, interleaved, peak_memory
from softattn_lm.config.settings import BenchmarkSettings
from softattn_lm.config.tree import PACKAGE

SIZE = 100 * 10**6  # bytes of text
TIMES, MEMORY = 1.3, 500 * 2**20  # allowed: times `tokenizers` alone, and bytes
KINDS = ("char", "byte", "bpe")
VOCABULARY = 2048
CHUNK = 2**14  # characters; tokenizers encodes a batch of these on all cores
TOGETHER = 64  # chunks of a batch


def benchmark(settings: BenchmarkSettings, file: Path) -> None:
    """Prints a table and writes every figure to `file`."""
    report = Report(vars(settings), file)
    report.open()
    rows = []
    peaks: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch, "text.txt")
        write_text(text, SIZE)
        for kind in KINDS:
            cases = {who: partial(child, who, kind, text, peaks) for who in ("ours", "tokenizers")}
            found = interleaved(cases, settings.repeats)
            alone = {"tokenizers": found["tokenizers"]}
            what = f"{kind}, {SIZE / 1e6:.0f} MB"
            rows.append(Row(what, "s", found["ours"], alone, "tokenizers", TIMES, more_is_better=False))
            # The first round is not timed, and its memory counts all the same.
            held, allowed = [peak / 2**20 for peak in peaks[f"ours {kind}"]], {"allowed": [MEMORY / 2**20]}
            rows.append(Row(f"{kind}, memory", "MiB", [max(held)], allowed, "allowed", 1.0, more_is_better=False))
    report.found["peaks"] = peaks
    report.close(rows)


def write_text(file: Path, size: int) -> None:
    """The shipped novels over and over, numbered, so that no two parts are alike."""
    folder = PACKAGE / "corpora" / "austen"
    folder = folder if folder.is_dir() else PACKAGE.parent / "data" / "austen"
    novels = b"".join(novel.read_bytes() for novel in sorted(folder.glob("*.txt")))
    with file.open("wb") as out:
        for number in range(-(-size // len(novels))):
            marked = novels.replace(b"\n\n", b"\n\n%d " % number)
            out.write(marked[: max(0, size - out.tell())].decode("utf-8", "ignore").encode())


def child(who: str, kind: str, text: Path, peaks: dict[str, list[int]]) -> float:
    """Seconds of the work itself, without the start of the process."""
    asked = json.dumps({"who": who, "kind": kind, "text": str(text)})
    module = "softattn_lm.commands.benchmark_data"
    done = subprocess.run([sys.executable, "-m", module, asked], stdout=subprocess.PIPE, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    peaks.setdefault(f"{who} {kind}", []).append(told["peak"])
    return float(told["seconds"])


def work(who: str, kind: str, text: Path) -> int:
    """Returns the number of tokens."""
    return prepare_ours(kind, text) if who == "ours" else tokenizers_alone(kind, text)


def prepare_ours(kind: str, text: Path) -> int:
    from softattn_lm.data.prepare import prepare
    from softattn_lm.data.sources import TextFiles
    from softattn_lm.tokenizer.bpe import BPETokenizer
    from softattn_lm.tokenizer.byte import ByteTokenizer
    from softattn_lm.tokenizer.char import CharTokenizer

    tokenizer = BPETokenizer(VOCABULARY) if kind == "bpe" else CharTokenizer() if kind == "char" else ByteTokenizer()
    with tempfile.TemporaryDirectory(dir=text.parent) as cache:
        data = TextFiles(str(text), val_fraction=0.0, test_fraction=0.0)
        return prepare(data, tokenizer, Path(cache), progress=False).splits["train"].n_tokens


def tokenizers_alone(kind: str, text: Path) -> int:
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    whole = text.read_text(encoding="utf-8")
    chunks = [whole[first : first + CHUNK] for first in range(0, len(whole), CHUNK)]
    backend: Any
    trainer: Any
    if kind == "char":
        backend = tokenizers.Tokenizer(models.WordLevel(unk_token="?"))
        backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        trainer = trainers.WordLevelTrainer(show_progress=False, special_tokens=[])
    else:
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=256 if kind == "byte" else VOCABULARY,
            min_frequency=2,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=[],
            show_progress=False,
        )
    if kind != "byte":  # whose vocabulary is there before any text
        backend.train_from_iterator(chunks, trainer)
    else:
        backend.train_from_iterator([], trainer)
    count = 0
    for first in range(0, len(chunks), TOGETHER):
        count += sum(len(found.ids) for found in backend.encode_batch_fast(chunks[first : first + TOGETHER]))
    return count


def _tell(asked: dict[str, str]) -> str:
    began = time.perf_counter()
    tokens = work(asked["who"], asked["kind"], Path(asked["text"]))
    seconds = time.perf_counter() - began
    return json.dumps({"seconds": seconds, "peak": peak_memory(), "tokens": tokens})


if __name__ == "__main__":
    print(_tell(json.loads(sys.argv[1])))

"""Random input of every kind that reaches the command line: it works, or it is one line with status 2.

    python -m tests.fuzz examples=2000          a long run; prints how many inputs of each kind were tried
    python -m tests.fuzz examples=500 texts     one kind only

test_fuzz.py runs it short. A failure prints the smallest input that hypothesis found.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from softattn_lm import cli
from softattn_lm.commands import COMMANDS, train
from softattn_lm.config.faults import known_keys
from softattn_lm.config.tree import choices, command_groups, config_folder
from softattn_lm.data import TextFiles, prepare
from softattn_lm.errors import UserError
from softattn_lm.runs.config import read_config
from softattn_lm.runs.new import new_run
from softattn_lm.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer
from softattn_lm.training.checkpoint import load_run
from tests.hostile.files import flipped
from tests.tiny_run import tiny_train

TEXT = st.text(max_size=40)
# What has broken command lines before, beside what hypothesis makes up.
AWKWARD = st.sampled_from(
    ["", "null", "~", "${x}", "${oc.env:HOME}", "[", "]", "{", "a,b", "a=b", "'", '"', "\\", "1e400", "nan", "-inf",
     "0x1", "1_000", "\0", "\x1b[2J", "\ud800", "é", "*", "??", "???", "[1,[2]]", "{a:1}", "choice(1,2)", "range(1,9)",
     "10**9", "9" * 400, "-1", "1.0", "true", "no", "!!python/object:x", "--", "-m", "hydra.run.dir=x", "_target_",
     "a\nb"]
)  # fmt: skip
VALUE = st.one_of(TEXT, AWKWARD, st.integers().map(str), st.floats().map(str))
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), AWKWARD, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.one_of(TEXT, AWKWARD), inner, max_size=3)),
    max_leaves=6,
)


class Workshop:
    """What all inputs share: a folder, and a small run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = tiny_train(folder, "name=good", "steps=2", "training.telemetry=false")
        self.good = (self.run / "checkpoints" / "last.ckpt").read_bytes()
        self.saved = torch.load(self.run / "checkpoints" / "last.ckpt", weights_only=True)
        self.config = read_config(self.run)
        self.number = 0

    def fresh(self) -> Path:
        self.number += 1
        folder = self.folder / f"fresh-{self.number}"
        folder.mkdir()
        return folder

    def spoilt(self, data: bytes) -> None:
        """A run with this checkpoint loads and computes, or is refused."""
        folder = self.folder / "spoilt"
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / "checkpoints" / "last.ckpt").write_bytes(data)
        try:
            loaded = load_run(folder)
        except UserError as error:
            assert_one_line(error)
            return
        with torch.no_grad():
            logits = loaded.model(torch.zeros(1, 2, dtype=torch.long))
        assert logits.shape == (1, 2, loaded.tokenizer.vocab_size)


def assert_one_line(error: UserError) -> None:
    said = str(error)
    assert said.strip() and len(said) < 5000, said


def command_line(command: str, words: list[str]) -> None:
    """Status 0, or 2 with one line."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            cli.main(command, words)
        except SystemExit as stop:
            code = stop.code
    assert code in (0, 2), f"{words!r} ends with {code}: {err.getvalue()[-2000:]}"
    if code == 2:
        said = err.getvalue()
        assert said.startswith("error: ") and said.count("\n") == 1 and "\x1b" not in said, repr(said)


def overrides(shop: Workshop) -> tuple[Any, Callable[[Any], None]]:
    """Settings of train, known and unknown, up to the point where the run would begin."""
    folder = config_folder()
    groups = command_groups(folder, "train")
    keys = st.sampled_from([*known_keys("train", [], folder), *groups, "name", "resume", "fork", "trust"])
    known = st.tuples(st.sampled_from(["", "", "", "+", "++", "~"]), st.one_of(keys, TEXT), VALUE)
    chosen = st.sampled_from([f"{group}={choice}" for group in groups for choice in choices(folder, group)])
    word = st.one_of(known.map(lambda found: f"{found[0]}{found[1]}={found[2]}"), chosen, VALUE)

    def check(words: list[str]) -> None:
        if any(word.partition("=")[0].strip("+~") in ("resume", "trust", "describe", "runs") for word in words):
            words = [word for word in words if word.partition("=")[0].strip("+~") not in ("trust", "describe", "runs")]
        if not {"-m", "--multirun", "-h", "--help"} & set(words):
            before, train.run = train.run, lambda cfg, words, overrides: None
            try:
                command_line("train", words)
            finally:
                train.run = before

    return st.lists(word, min_size=1, max_size=3), check


def texts(shop: Workshop) -> tuple[Any, Callable[[Any], None]]:
    """Bytes of a text file: prepared without loss, or refused."""
    pieces = st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda t: t.encode("utf-8", "surrogatepass")))
    marks = st.sampled_from([b"", b"", b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\x1f\x8b", b"\0", b"\r\n" * 20])
    names = st.sampled_from(["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz", "a.parquet", "a"])
    makers = st.sampled_from([ByteTokenizer, lambda: CharTokenizer("symbol"), CharTokenizer])

    def check(given: tuple[str, bytes, bytes, int, Any]) -> None:
        name, mark, data, times, tokenizer = given
        folder = shop.fresh()
        (folder / name).write_bytes(mark + data * times)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = prepare(TextFiles(str(folder / name)), tokenizer(), folder / "cache", progress=False)
        except UserError as error:
            assert_one_line(error)
            return
        if name in ("a.txt", "a"):
            ids = np.concatenate([found.splits[part].tokens for part in ("train", "validation")])
            text = (mark + data * times).removeprefix(b"\xef\xbb\xbf").decode("utf-8")
            unseen = "\ufffd" in found.tokenizer.decode(ids) and "\ufffd" not in text
            assert unseen or found.tokenizer.decode(ids) == text

    return st.tuples(names, marks, pieces, st.integers(1, 30), makers), check


def tokenizers(shop: Workshop) -> tuple[Any, Callable[[Any], None]]:
    """Any text comes back from every tokenizer, whole and piece by piece."""
    fitted = BPETokenizer(300)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted.fit([(shop.folder / "text.txt").read_text(encoding="utf-8")])

    def check(text: str) -> None:
        char = CharTokenizer()
        if text:
            char.fit([text])
        for tokenizer in (ByteTokenizer(), fitted, *([char] if text else [])):
            ids = tokenizer.encode(text)
            stream = tokenizer.stream()
            assert tokenizer.decode(ids) == text
            assert "".join(stream.push(int(token)) for token in ids) + stream.flush() == text

    return st.text(max_size=300), check


def damage(shop: Workshop) -> tuple[Any, Callable[[Any], None]]:
    """A checkpoint that was cut short, has flipped bits, or other bytes in the middle."""
    place = st.integers(0, len(shop.good) - 1)
    cut = place.map(lambda end: shop.good[:end])
    bit = st.tuples(place, st.integers(0, 7)).map(lambda where: flipped(shop.good, *where))
    other = st.tuples(place, st.binary(min_size=1, max_size=200)).map(
        lambda given: shop.good[: given[0]] + given[1] + shop.good[given[0] + len(given[1]) :]
    )
    return st.one_of(cut, bit, other, st.binary(max_size=300)), shop.spoilt


def contents(shop: Workshop) -> tuple[Any, Callable[[Any], None]]:
    """A checkpoint whose config, tokenizer or other entries hold something else, packed as torch packs it."""

    def check(given: tuple[Any, Any, bool]) -> None:
        where, value, removed = given
        saved = plain_copy(shop.saved)
        replace(saved["softattn"], where, value, removed)
        file = io.BytesIO()
        torch.save(saved, file)
        shop.spoilt(file.getvalue())

    places = st.sampled_from([path for path in paths(shop.saved["softattn"]) if path])
    return st.tuples(places, PLAIN, st.booleans()), check


def configs(shop: Workshop) -> tuple[Any, Callable[[Any], None]]:
    """A config.yaml with another value somewhere, or of any text."""
    folder = shop.folder / "configured"
    folder.mkdir(exist_ok=True)

    def check(given: tuple[Any, Any, bool] | str) -> None:
        if isinstance(given, str):
            text = given
        else:
            config = plain_copy(shop.config)
            replace(config, *given)
            text = yaml.safe_dump(config, allow_unicode=True)
        (folder / "config.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            train.saved_config(folder)
        except UserError as error:
            assert_one_line(error)

    places = st.sampled_from([path for path in paths(shop.config) if path])
    return st.one_of(st.tuples(places, PLAIN, st.booleans()), st.text(max_size=80), AWKWARD), check


def names(shop: Workshop) -> tuple[Any, Callable[[Any], None]]:
    """A run is made right below its folder, or nowhere."""
    root = shop.folder / "named"

    def check(name: str) -> None:
        try:
            folder = new_run(root, name, {"a": 1})
        except UserError as error:
            assert_one_line(error)
            return
        assert folder.parent == root and folder.resolve().parent == root.resolve() and folder.name == name
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()

    return st.one_of(st.text(max_size=300), AWKWARD, st.text("ab./-_~é", max_size=8)), check


def prompts(shop: Workshop) -> tuple[Any, Callable[[Any], None]]:
    """Words of sample: prompts, runs and settings, in any order."""
    setting = st.tuples(
        st.sampled_from(
            ["temperature", "top_k", "top_p", "min_p", "n", "seed", "checkpoint", "max_new_tokens", "file"]
        ),
        st.one_of(VALUE.filter(lambda value: len(value) < 4), AWKWARD),
    ).map("=".join)
    word = st.one_of(st.text("abcdefgh ", min_size=1), TEXT, AWKWARD, setting, st.just("good"))

    def check(words: list[str]) -> None:
        if "file=-" in words or {"-h", "--help"} & set(words):
            return  # standard input is nobody's here, and help is long
        small = [] if any(word.startswith(("max_new_tokens=", "n=")) for word in words) else ["max_new_tokens=2"]
        if any(word.startswith(("max_new_tokens=", "n=")) and len(word.partition("=")[2]) > 2 for word in words):
            return  # a long text is no fault
        command_line("sample", [*small, f"runs={shop.run.parent}", *words])

    return st.lists(word, max_size=4), check


KINDS = {kind.__name__: kind for kind in (overrides, texts, tokenizers, damage, contents, configs, names, prompts)}


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [path, *(found for key, item in inner for found in paths(item, (*path, key)))]


def replace(root: Any, path: tuple[Any, ...], value: Any, removed: bool) -> None:
    *way, last = path
    for key in way:
        root = root[key]
    if removed:
        del root[last]
    else:
        root[last] = value


def plain_copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain_copy(item) for key, item in value.items()}
    return [plain_copy(item) for item in value] if isinstance(value, list) else value


def fuzz(kind: str, shop: Workshop, examples: int, same: bool) -> int:
    """Tries `examples` inputs, each time the `same` ones or others; returns how many it were."""
    strategy, check = KINDS[kind](shop)
    tried = 0

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=same, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    @given(strategy)
    def attempt(value: Any) -> None:
        nonlocal tried
        tried += 1
        check(value)

    attempt()
    return tried


def main(words: list[str]) -> int:
    given_ = dict(word.split("=", 1) for word in words if "=" in word)
    kinds = [word for word in words if "=" not in word] or list(KINDS)
    failed = 0
    assert set(kinds) <= set(KINDS) and set(COMMANDS) >= {"train", "sample"}, kinds
    with tempfile.TemporaryDirectory() as folder:
        shop = Workshop(Path(folder))
        for kind in kinds:
            began = time.perf_counter()
            try:
                tried = fuzz(kind, shop, int(given_.get("examples", 200)), same=False)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                failed += 1
                notes = "\n".join(getattr(error, "__notes__", []))
                print(f"{kind}: FAILED: {type(error).__name__}: {str(error)[:1500]}\n{notes}", flush=True)
                continue
            print(
                json.dumps({"kind": kind, "tried": tried, "seconds": round(time.perf_counter() - began, 1)}), flush=True
            )
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

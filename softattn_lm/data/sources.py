"""Where text comes from: files, the shipped corpus, and (hub.py) Hugging Face data sets.

A source gives documents in a fixed order. Files are concatenated untouched, each one a document; rows (jsonl, parquet,
hub) are joined by `separator`, each one a document.
"""

import hashlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from softattn_lm.data.paths import find_files
from softattn_lm.data.reading import holds_rows, read_documents, refuse_unreadable
from softattn_lm.errors import UserError

Piece = tuple[str, bool]  # text, and whether a document begins with it


class Source(ABC):
    """The settings every source has; see `softattn_lm.data.splitting` for what `split` means.

    val_fraction, test_fraction: of all characters, 0 <= each, together < 1. 0 means there is no such split.
    sampling: how training windows are drawn, see `softattn_lm.data.windows`.
    validation_sets: more texts (name -> file, folder or glob) that are evaluated beside "validation".
    """

    def __init__(
        self,
        val_fraction: float,
        test_fraction: float,
        split: Literal["contiguous", "document"],
        sampling: Literal["permuted", "random"],
        separator: str,
        validation_sets: dict[str, str] | None,
    ) -> None:
        for name, fraction in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            if not 0 <= fraction < 1:
                raise UserError(f"data.{name}={fraction} is not a fraction; use 0 <= data.{name} < 1")
        if val_fraction + test_fraction >= 1:
            raise UserError(
                f"data.val_fraction={val_fraction} and data.test_fraction={test_fraction} leave nothing to train on; "
                "together they must stay below 1"
            )
        if split not in ("contiguous", "document"):
            raise UserError(f"data.split={split} is not known; use data.split=contiguous or document")
        if sampling not in ("permuted", "random"):
            raise UserError(f"data.sampling={sampling} is not known; use data.sampling=permuted or random")
        for taken in ("train", "validation", "test"):
            if taken in (validation_sets or {}):
                raise UserError(f"data.validation_sets.{taken}: this name is taken; choose another one")
        for name, path in (validation_sets or {}).items():
            if not name.replace("-", "_").isidentifier():
                raise UserError(f"data.validation_sets: {name!r} is no name; use letters, digits, _ and -")
            if not isinstance(path, str):
                raise UserError(f"data.validation_sets.{name}={path} is no path; give a file, a folder or a glob")
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.split = split
        self.sampling = sampling
        self.separator = separator
        self.validation_sets = dict(validation_sets or {})

    @abstractmethod
    def describe(self) -> str:
        """One line for people."""

    @abstractmethod
    def identity(self) -> str | None:
        """A digest of the content that is cheaper to get than the text, or None. Never of a path or a time stamp."""

    @abstractmethod
    def parts(self) -> dict[str, Iterator[Piece]]:
        """{"text": everything, yet to be split}, or the splits by name where the source has its own."""

    @property
    @abstractmethod
    def joiner(self) -> str:
        """What stands between two documents."""


class TextFiles(Source):
    """`path`: a file, a folder or a glob of txt, jsonl, parquet, txt.gz or jsonl.gz files."""

    def __init__(
        self,
        path: str,
        text_column: str = "text",
        val_fraction: float = 0.1,
        test_fraction: float = 0.0,
        split: Literal["contiguous", "document"] = "contiguous",
        sampling: Literal["permuted", "random"] = "permuted",
        separator: str = "\n\n",
        validation_sets: dict[str, str] | None = None,
        setting: str = "data.path",
    ) -> None:
        super().__init__(val_fraction, test_fraction, split, sampling, separator, validation_sets)
        if not path:
            raise UserError(f"data=text_file needs {setting}=<file, folder or glob>")
        self.path = path
        self.text_column = text_column
        self.files = find_files(path, setting)
        self.rows = holds_rows(self.files[0])

    def describe(self) -> str:
        return self.path if len(self.files) == 1 else f"{self.path} ({len(self.files)} files)"

    def identity(self) -> str:
        return digest_files(self.files, f"{self.text_column} {self.joiner}" if self.rows else "text")

    def parts(self) -> dict[str, Iterator[Piece]]:
        return {"text": self._pieces()}

    def _pieces(self) -> Iterator[Piece]:
        for file in self.files:
            empty = True
            for piece in read_documents(file, self.text_column):
                empty = False
                yield piece
            if empty and len(self.files) > 1:
                warnings.warn(f"{file} is empty", stacklevel=2)

    @property
    def joiner(self) -> str:
        return self.separator if self.rows else ""


class ShippedText(TextFiles):
    """A corpus that comes with this project: data/<corpus> in a checkout, softattn_lm/corpora/<corpus> in a wheel."""

    def __init__(
        self,
        corpus: str = "austen",
        val_fraction: float = 0.03,
        test_fraction: float = 0.03,
        split: Literal["contiguous", "document"] = "contiguous",
        sampling: Literal["permuted", "random"] = "permuted",
        validation_sets: dict[str, str] | None = None,
    ) -> None:
        package = Path(__file__).resolve().parents[1]
        folders = [package / "corpora" / corpus, package.parent / "data" / corpus]
        folder = next((folder for folder in folders if folder.is_dir()), None)
        if folder is None:
            raise UserError(f"data.corpus={corpus} does not come with softattn_lm; use data=text_file")
        super().__init__(
            str(folder), "text", val_fraction, test_fraction, split, sampling, "", validation_sets, "data.corpus"
        )
        self.corpus = corpus

    def describe(self) -> str:
        return f"{self.corpus} ({len(self.files)} files)"


def digest_files(files: list[Path], settings: str) -> str:
    """sha256 over the bytes of the files in order, the way each is read, and `settings`. Names do not enter."""
    total = hashlib.sha256(settings.encode())
    for file in files:
        try:
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise refuse_unreadable(file, error) from None
        endings = (".parquet", ".jsonl.gz", ".jsonl", ".gz")
        way = next((end for end in endings if file.name.lower().endswith(end)), "text")
        total.update(f"\n{way} {content}".encode())
    return total.hexdigest()

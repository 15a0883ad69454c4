"""Hugging Face data sets: by name from the hub, or from a folder on disk, through `datasets`. No code of theirs is run.

A folder is one written by `save_to_disk`, or a data-set repository (parquet, jsonl, ...); it never touches the network.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from softattn_lm.data.paths import as_typed
from softattn_lm.data.reading import field
from softattn_lm.data.sources import Piece, Source, digest_files
from softattn_lm.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

ROWS = 1000  # read at a time


class Hub(Source):
    """`name`: a data set on the hub, or a folder. Each row of `text_column` is a document.

    train_split: one split, or several as "train+test"; it is divided by val_fraction and test_fraction unless
    validation_split or test_split name the data set's own. val_fraction=None is 0.01, or 0 with a validation_split.
    streaming: rows go straight into the token files instead of through a download of the whole data set.
    revision: a branch, tag or commit. characters: refuse the text if it has another length.
    """

    def __init__(
        self,
        name: str,
        config: str | None = None,
        text_column: str = "text",
        train_split: str = "train",
        validation_split: str | None = None,
        test_split: str | None = None,
        revision: str | None = None,
        streaming: bool = False,
        characters: int | None = None,
        val_fraction: float | None = None,
        test_fraction: float = 0.0,
        split: Literal["contiguous", "document"] = "document",
        sampling: Literal["permuted", "random"] = "permuted",
        separator: str = "\n\n",
        validation_sets: dict[str, str] | None = None,
    ) -> None:
        if val_fraction is None:
            val_fraction = 0.0 if validation_split else 0.01
        super().__init__(val_fraction, test_fraction, split, sampling, separator, validation_sets)
        if not name:
            raise UserError("data=hub needs data.name=<a data set on the hub, or a folder>")
        if validation_split and val_fraction:
            raise UserError(
                f"data.validation_split={validation_split} leaves data.val_fraction={val_fraction} nothing to do; "
                "use one of the two"
            )
        if test_split and test_fraction:
            raise UserError(
                f"data.test_split={test_split} leaves data.test_fraction={test_fraction} nothing to do; "
                "use one of the two"
            )
        self.name, self.config, self.text_column = name, config, text_column
        self.names = {"text": train_split, "validation": validation_split, "test": test_split}
        self.revision, self.streaming, self.characters = revision, streaming, characters
        self.folder = as_typed(name) if as_typed(name).is_dir() else None
        if self.folder is None and (name.startswith((".", "/", "~")) or name.count("/") > 1):
            raise UserError(f"data.name={name}: there is no such folder")

    def describe(self) -> str:
        return f"{self.name}{f' ({self.config})' if self.config else ''}, column {self.text_column}"

    @property
    def joiner(self) -> str:
        return self.separator

    def identity(self) -> str | None:
        """The files of a folder, or the commit of the hub's repository (None if the hub does not answer)."""
        settings = f"{self.config} {self.text_column} {self.names} {self.separator!r}"
        if self.folder is not None:
            files = sorted(file for file in self.folder.rglob("*") if file.is_file())
            return digest_files(files, settings)
        commit = self._commit()
        return commit and f"{self.name} {commit} {settings}"

    def _commit(self) -> str | None:
        from huggingface_hub import HfApi

        try:
            return HfApi().dataset_info(self.name, revision=self.revision, timeout=10).sha
        except hub_failures():
            return None  # whatever is wrong, loading will say it, or find the data set in the local cache

    def parts(self) -> dict[str, Iterator[Piece]]:
        return {part: self._rows(part, names) for part, names in self.names.items() if names}

    def _rows(self, part: str, names: str) -> Iterator[Piece]:
        length = documents = 0
        for name in names.split("+"):
            with refusals(self.name):
                rows = self._load(name.strip())
                self._check_column(rows)
                for number, text in enumerate(self._texts(rows), start=1):
                    yield field({self.text_column: text}, self.text_column, f"{self.name} {name} row {number}"), True
                    length += len(text)
                    documents += 1
        length += len(self.separator) * max(0, documents - 1)
        if part == "text" and self.characters is not None and length != self.characters:
            raise UserError(f"{self.name} has {length} characters, but data.characters={self.characters} was expected")

    def _texts(self, rows: "Dataset | IterableDataset") -> Iterator[Any]:
        for batch in rows.select_columns([self.text_column]).iter(batch_size=ROWS):
            yield from batch[self.text_column]

    def _check_column(self, rows: "Dataset | IterableDataset") -> None:
        """A stream may know its columns only from its first row; an empty one has none to check."""
        names = rows.column_names or list(next(iter(rows), {self.text_column: ""}))
        if self.text_column not in names:
            raise UserError(
                f"{self.name} has no column '{self.text_column}'; use data.text_column=<one of: {', '.join(names)}>"
            )

    def _load(self, split: str) -> "Dataset | IterableDataset":
        import datasets

        if self.folder is None:
            return datasets.load_dataset(
                self.name, self.config, split=split, revision=self.revision, streaming=self.streaming
            )
        if (self.folder / "dataset_dict.json").exists() or (self.folder / "state.json").exists():
            saved = datasets.load_from_disk(str(self.folder))
            known = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
            if split not in known:
                raise UserError(f"{self.name} has no split '{split}'; its splits are {', '.join(known)}")
            return known[split]
        if not any(file.suffix not in (".txt", ".md") for file in self.folder.rglob("*") if file.is_file()):
            raise UserError(f"data.name={self.name} holds text files only; use data=text_file data.path={self.name}")
        # Streaming, because the cache of `datasets` is keyed by path and time stamp and may return an older text.
        return datasets.load_dataset(str(self.folder), self.config, split=split, streaming=True)


def hub_failures() -> tuple[type[Exception], ...]:
    """What `datasets` and `huggingface_hub` raise for a wrong name, split or file, and for a missing network."""
    import datasets.exceptions

    # huggingface_hub lets the errors of its HTTP client through, and has changed that client twice.
    clients = [sys.modules[name] for name in ("httpx2", "httpx", "requests") if name in sys.modules]
    return (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, *(c.HTTPError for c in clients))


@contextmanager
def refusals(name: str) -> Iterator[None]:
    """Turns those into one line that names the data set."""
    try:
        yield
    except UserError:
        raise
    except hub_failures() as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(f"data.name={name} cannot be loaded: {lines[0] if lines else type(error).__name__}") from error

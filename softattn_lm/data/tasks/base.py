"""What a task is: sequences made of symbols, with targets at the places that are asked about and nowhere else.

Sequence j of a stream is a pure function of (seed, j): of words jW .. (j+1)W - 1 of the stream's random words. So a
resumed run, any number of devices and any order of asking see the same data, as with text (data/windows.py). Training
never sees a sequence twice; validation and test are fixed sets, the same for all runs and seeds.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from softattn_lm.data.token_files import Prepared
from softattn_lm.data.windows import PADDED, WORDS_PER_COUNT, stream_key
from softattn_lm.errors import UserError
from softattn_lm.tokenizer.symbols import SymbolTokenizer

TRAIN, VALIDATION, TEST = 11, 12, 13  # which draw a stream is for; windows.py has 1 to 3
FORMAT = 1  # of the sequences that the same settings and seed give
BLOCK = 512  # sequences made at once: what numpy costs per call is then nothing per batch


@dataclass(frozen=True)
class Sequences:
    """x, y (B, T) int64: symbols, and the answer at each place that is asked about, -100 elsewhere. gaps (B, T) int64:
    how many places before the one that asks its answer stands, 0 elsewhere. pairs (B,) int64: what is to be kept in
    mind in the sequence, in the task's own unit.
    """

    x: np.ndarray
    y: np.ndarray
    gaps: np.ndarray
    pairs: np.ndarray

    def __getitem__(self, rows: slice | np.ndarray) -> "Sequences":
        return Sequences(*(getattr(self, field.name)[rows] for field in fields(self)))

    @classmethod
    def empty(cls, count: int, length: int) -> "Sequences":
        """Nothing but symbol 0, and nothing asked."""
        zeros = np.zeros((count, length), dtype=np.int64)
        return cls(zeros, np.full_like(zeros, PADDED), zeros.copy(), np.zeros(count, dtype=np.int64))


def joined(parts: list[Sequences]) -> Sequences:
    return Sequences(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Sequences)))


class Task(ABC):
    """length: tokens of a sequence; None: as many as the model reads, and any other number is refused.

    vocab_size counts all symbols. validation_sequences, test_sequences: of the fixed sets.
    """

    name: str  # of its yaml

    def __init__(self, length: int | None, vocab_size: int, validation_sequences: int, test_sequences: int) -> None:
        for setting, value in (("validation_sequences", validation_sequences), ("test_sequences", test_sequences)):
            if value < 2:
                raise UserError(f"data.{setting}={value}: data.{setting} must be at least 2")
        self.length, self.vocab_size = length, vocab_size
        self.sizes = {"validation": validation_sequences, "test": test_sequences}

    @abstractmethod
    def groups(self) -> list[tuple[str, int]]:
        """Symbols in the order of their ids, see `SymbolTokenizer`; their numbers add up to vocab_size."""

    @abstractmethod
    def require_room(self, length: int) -> None:
        """Raises UserError if the settings ask for more than `length` tokens or the vocabulary hold."""

    @abstractmethod
    def words(self, length: int) -> int:
        """Random words that a sequence of `length` tokens takes."""

    @abstractmethod
    def make(self, words: np.ndarray, length: int) -> Sequences:
        """(B, words) uint64 -> B sequences, each made of its own row alone."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What decides, with a seed, every sequence but for its length."""

    def prepared(self, context: int) -> Prepared:
        """Its streams, for a model that reads `context` tokens. Raises UserError where they do not fit together."""
        if self.length not in (None, context):
            raise UserError(
                f"data.length={self.length} and model.context={context} differ, and a sequence of data={self.name} is "
                f"read at once; type model.context={self.length}"
            )
        self.require_room(context)
        assert sum(count for _, count in self.groups()) == self.vocab_size, self.groups()
        said = {"format": FORMAT, "task": self.name, "length": context, **self.settings(), **self.sizes}
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]
        splits: dict[str, Any] = {"train": Fresh(self, context)}
        splits |= {
            name: FixedSet(name, TaskStream(self, context, 0, draw), self.sizes[name])
            for name, draw in (("validation", VALIDATION), ("test", TEST))
        }
        return Prepared(None, SymbolTokenizer(self.groups()), digest, f"data={self.name}", splits)


class TaskStream:
    """Sequences 0, 1, 2, ... of one stream, made in blocks, of which the last is kept."""

    def __init__(self, task: Task, length: int, seed: int, draw: int = TRAIN) -> None:
        if seed < 0:
            raise UserError(f"seed={seed} is negative; use seed=0 or more")
        self.task, self.length = task, length
        self.key = stream_key(seed, draw)
        self.per_sequence = -(-task.words(length) // WORDS_PER_COUNT) * WORDS_PER_COUNT
        self._number = -1
        self._block: Sequences | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_number": -1, "_block": None}

    def batch(self, first: int, count: int) -> Sequences:
        """Sequences first .. first + count - 1."""
        numbers = range(first // BLOCK, (first + count - 1) // BLOCK + 1) if count else range(first // BLOCK, 0)
        parts = [
            self.block(number)[slice(max(0, first - number * BLOCK), first + count - number * BLOCK)]
            for number in numbers
        ]
        return parts[0] if len(parts) == 1 else joined(parts) if parts else Sequences.empty(0, self.length)

    def block(self, number: int) -> Sequences:
        """Sequences number · BLOCK and those behind it."""
        if self._block is None or number != self._number:
            start = number * BLOCK * self.per_sequence
            generator = np.random.Philox(counter=start // WORDS_PER_COUNT, key=self.key)
            words = generator.random_raw(BLOCK * self.per_sequence).reshape(BLOCK, self.per_sequence)
            self._number, self._block = number, self.task.make(words, self.length)
        return self._block


@dataclass
class Fresh:
    """The training data of a task: as many sequences as are asked for. `n_tokens` counts what is stored: nothing."""

    task: Task
    length: int
    name: str = "train"
    n_tokens: int = 0
    n_bytes: int = 0

    def stream(self, seed: int) -> TaskStream:
        return TaskStream(self.task, self.length, seed)


class FixedSet:
    """The first `count` sequences of a stream: what a task is validated and tested on."""

    n_bytes = 0  # no text stands behind the symbols

    def __init__(self, name: str, stream: TaskStream, count: int) -> None:
        self.name, self.stream, self.count = name, stream, count
        self.n_tokens = count * stream.length
        self._sequences: Sequences | None = None

    @property
    def sequences(self) -> Sequences:
        if self._sequences is None:
            self._sequences = self.stream.batch(0, self.count)
        return self._sequences

    @property
    def tokens(self) -> np.ndarray:
        """(n_tokens,) int64: what is read, one sequence after the other."""
        return self.sequences.x.reshape(-1)

    @property
    def documents(self) -> np.ndarray:
        """Each sequence is one."""
        return np.arange(self.count, dtype=np.int64) * self.stream.length


class TaskWindows:
    """x, y of a fixed set in the batches of `ValidationWindows`: batch i of rank r of R holds sequences
    (iR + r)B .. ; a rank that has run out gets a sequence in which nothing is asked.
    """

    def __init__(self, fixed: FixedSet, batch_size: int, rank: int = 0, ranks: int = 1) -> None:
        self.fixed, self.batch_size, self.rank, self.ranks = fixed, batch_size, rank, ranks

    def __len__(self) -> int:
        return -(-self.fixed.count // (self.batch_size * self.ranks))

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = (index * self.ranks + self.rank) * self.batch_size
        found = self.fixed.sequences[slice(first, first + self.batch_size)]
        if len(found.x) == 0:
            found = Sequences.empty(1, self.fixed.stream.length)
        return found.x, found.y

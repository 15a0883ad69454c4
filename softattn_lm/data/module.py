"""Lightning's view of the data: which rank gets which samples in which step. The only file here that knows Lightning.

Optimizer step i takes samples iB .. (i+1)B - 1 of the training stream, B = batch_size of the whole run. With R devices,
A accumulation steps and micro = B / (R·A), rank r gets in micro-batch m of the step

    iB + (m·R + r)·micro  ..  + micro - 1

so neither devices, accumulation, loader processes, validation nor having been resumed change what a step sees. The
trainer must have use_distributed_sampler=False: the division is done here.
"""

import signal
from collections.abc import Iterator
from typing import Any, Literal

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset, Sampler

from softattn_lm.data.tasks.base import FixedSet, Fresh, TaskStream, TaskWindows
from softattn_lm.data.token_files import Prepared, Split
from softattn_lm.data.windows import PADDED, TrainWindows, ValidationWindows, document_numbers
from softattn_lm.errors import UserError

VALIDATION_TOKENS = 2048  # enough to keep a CPU busy, and little beside the logits of training


def micro_batch_size(batch_size: int, devices: int, accumulate: int) -> int:
    """Sequences per device and micro-batch. Raises UserError if they do not divide the batch."""
    if batch_size < 1 or accumulate < 1 or batch_size % (devices * accumulate):
        parts = devices * max(1, accumulate)
        raise UserError(
            f"batch_size={batch_size} is not a multiple of {devices} device(s) × training.accumulate={accumulate}; "
            f"use batch_size={max(1, round(batch_size / parts)) * parts}"
        )
    return batch_size // (devices * accumulate)


class MicroBatches(Dataset[list[torch.Tensor]]):
    """Item g is micro-batch g of the whole run as one rank sees it: (micro, T + 1) int64, and with `documents` the
    number of the document that each token but the last belongs to, (micro, T)."""

    def __init__(
        self, split: Split, context: int, seed: int, sampling: Literal["permuted", "random"],
        batch_size: int, accumulate: int, rank: int, ranks: int, documents: bool = False,
    ) -> None:  # fmt: skip
        self.split, self.context, self.seed, self.sampling = split, context, seed, sampling
        self.batch_size, self.accumulate, self.rank, self.ranks = batch_size, accumulate, rank, ranks
        self.micro = micro_batch_size(batch_size, ranks, accumulate)
        self.documents = split.documents if documents else None
        self.windows = TrainWindows(split.tokens, context, seed, sampling)

    def first_sample(self, index: int) -> int:
        """The formula above."""
        step, m = divmod(index, self.accumulate)
        return step * self.batch_size + (m * self.ranks + self.rank) * self.micro

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        first = self.first_sample(index)
        found = [self.windows.batch(first, self.micro)]
        if self.documents is not None:
            found.append(document_numbers(self.documents, self.windows.places(first, self.micro)[:, :-1]))
        return [torch.from_numpy(array) for array in found]

    def __getstate__(self) -> dict[str, Any]:
        # A loader process maps the token file itself; a pickled memory map would be a copy of all tokens.
        return self.__dict__ | {"windows": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.windows = TrainWindows(self.split.tokens, self.context, self.seed, self.sampling)


class TaskBatches(Dataset[list[torch.Tensor]]):
    """Item g is micro-batch g of a task as one rank sees it: x, y (micro, T) int64, and by what its summed loss is to
    be divided, (): the answers of the whole optimizer step over the number of its micro-batches on all ranks. The mean
    over those is then the mean over answers, however they are spread.
    """

    def __init__(self, stream: TaskStream, batch_size: int, accumulate: int, rank: int, ranks: int) -> None:
        self.stream, self.batch_size, self.accumulate = stream, batch_size, accumulate
        self.rank, self.ranks = rank, ranks
        self.micro = micro_batch_size(batch_size, ranks, accumulate)

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        step, m = divmod(index, self.accumulate)
        whole = self.stream.batch(step * self.batch_size, self.batch_size)
        first = (m * self.ranks + self.rank) * self.micro
        own = whole[slice(first, first + self.micro)]
        share = (whole.y != PADDED).sum() / (self.accumulate * self.ranks)
        return [torch.from_numpy(own.x), torch.from_numpy(own.y), torch.tensor(share, dtype=torch.float32)]


class FromStep(Sampler[int]):
    """first, first + 1, ..., total - 1. Its length is `total`: Lightning counts the batches before a resume as well."""

    def __init__(self, first: int, total: int) -> None:
        self.first, self.total = first, total

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.total))

    def __len__(self) -> int:
        return self.total


class ValidationBatches(Dataset[list[torch.Tensor]]):
    """Item i: x, y of `ValidationWindows`, and with `documents` the document numbers of x."""

    def __init__(
        self, split: Split | FixedSet, context: int, batch_size: int, rank: int, ranks: int, documents: bool = False
    ) -> None:
        self.split, self.arguments = split, (context, batch_size, rank, ranks)
        self.documents = split.documents if documents else None
        self.length = len(self._windows())

    def _windows(self) -> ValidationWindows | TaskWindows:
        if isinstance(self.split, FixedSet):
            return TaskWindows(self.split, *self.arguments[1:])
        return ValidationWindows(self.split.tokens, *self.arguments)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        windows = self._windows()
        found = list(windows[index])
        if self.documents is not None:
            assert isinstance(windows, ValidationWindows)
            found.append(document_numbers(self.documents, windows.places(index)))
        return [torch.from_numpy(array) for array in found]


def _leave_signals_to_the_run(worker: int) -> None:
    """Ctrl-C reaches all processes of a terminal at once. The run finishes its step first, and needs its workers for
    that; they end when it does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


class TextDataModule(LightningDataModule):
    """One "epoch" is the whole run of `steps` optimizer steps; a resumed run begins at `first_step`.

    `val_batch_size` is per device; None: a micro-batch, or about VALIDATION_TOKENS if that is more. `validation_names`
    tells which loader of `val_dataloader` is which split. documents: batches also tell which document a token is of.
    """

    def __init__(
        self,
        prepared: Prepared,
        context: int,
        batch_size: int,
        steps: int,
        seed: int,
        sampling: Literal["permuted", "random"] = "permuted",
        accumulate: int = 1,
        num_workers: int = 0,
        val_batch_size: int | None = None,
        first_step: int = 0,
        documents: bool = False,
    ) -> None:
        super().__init__()
        self.prepared, self.context, self.batch_size = prepared, context, batch_size
        self.steps, self.seed, self.sampling = steps, seed, sampling
        self.accumulate, self.num_workers, self.first_step = accumulate, num_workers, first_step
        self.val_batch_size, self.documents = val_batch_size, documents
        splits = prepared.splits
        extra = [name for name in splits if name not in ("train", "validation", "test")]
        self.validation_names = ["validation"] * (splits["validation"].n_tokens > 0) + extra
        if isinstance(splits["train"], Fresh):
            if documents:
                raise UserError(f"mask=documents: a sequence of {prepared.source} is one document; type mask=causal")
            splits["train"].stream(seed)
            return
        TrainWindows(splits["train"].tokens, context, seed, sampling)  # refuses too short a text before any loader runs
        for name in self.validation_names:
            ValidationWindows(splits[name].tokens, context, 1)

    def _rank(self) -> tuple[int, int]:
        """(rank, ranks); alone without a trainer."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def train_dataloader(self) -> DataLoader[list[torch.Tensor]]:
        """[(micro, T + 1) int64] per item; of a task x, y and a share, see `TaskBatches`."""
        rank, ranks = self._rank()
        split = self.prepared.splits["train"]
        data: Dataset[list[torch.Tensor]]
        if isinstance(split, Fresh):
            data = TaskBatches(split.stream(self.seed), self.batch_size, self.accumulate, rank, ranks)
        else:
            data = MicroBatches(
                split, self.context, self.seed, self.sampling,
                self.batch_size, self.accumulate, rank, ranks, self.documents,
            )  # fmt: skip
        order = FromStep(self.first_step * self.accumulate, self.steps * self.accumulate)
        return self._loader(data, order)

    def val_dataloader(self) -> list[DataLoader[list[torch.Tensor]]]:
        """One loader per name in `validation_names`; (B, T) int64 x and y per item."""
        rank, ranks = self._rank()
        micro = micro_batch_size(self.batch_size, ranks, self.accumulate)
        batch_size = self.val_batch_size or max(micro, VALIDATION_TOKENS // self.context)
        loaders = []
        for name in self.validation_names:
            data = ValidationBatches(self.prepared.splits[name], self.context, batch_size, rank, ranks, self.documents)
            loaders.append(self._loader(data, FromStep(0, len(data))))
        return loaders

    def _loader(self, data: Dataset[Any], order: FromStep) -> DataLoader[Any]:
        # Items are whole batches already, gathered at once.
        return DataLoader(
            data, batch_size=None, sampler=order, num_workers=self.num_workers, persistent_workers=False,
            pin_memory=torch.cuda.is_available(), worker_init_fn=_leave_signals_to_the_run,
            # Every pass over a loader draws a seed; from torch's own generator it would disturb the training's draws.
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip

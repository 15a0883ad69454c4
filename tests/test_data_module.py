"""The data module: however a run is divided, each optimizer step sees the same samples."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from softattn_lm.data import Prepared, TextFiles, TrainWindows, prepare
from softattn_lm.data.module import MicroBatches, TextDataModule, ValidationBatches, micro_batch_size
from softattn_lm.errors import UserError
from softattn_lm.tokenizer import ByteTokenizer

CONTEXT, BATCH, STEPS, SEED = 8, 24, 5, 0


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.txt").write_text("".join(chr(32 + i * 7 % 90) for i in range(2000)), encoding="utf-8")
    (folder / "b.txt").write_text("another text for validation", encoding="utf-8")
    data = TextFiles(str(folder / "a.txt"), validation_sets={"other": str(folder / "b.txt")})
    return prepare(data, ByteTokenizer(), folder / "cache", progress=False)


def module(prepared: Prepared, **changes: Any) -> TextDataModule:
    return TextDataModule(prepared, **{"context": CONTEXT, "batch_size": BATCH, "steps": STEPS, "seed": SEED} | changes)


def expected(prepared: Prepared, sampling: Any = "permuted") -> torch.Tensor:
    """(STEPS, BATCH, T + 1): step i takes samples iB .. (i+1)B - 1."""
    windows = TrainWindows(prepared.splits["train"].tokens, CONTEXT, SEED, sampling)
    return torch.from_numpy(windows.batch(0, STEPS * BATCH)).view(STEPS, BATCH, CONTEXT + 1)


@pytest.mark.parametrize("sampling", ["permuted", "random"])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_sees_the_same_samples_in_the_same_order_for_all_divisions(
    prepared: Prepared, sampling: Any, accumulate: int, ranks: int
) -> None:
    split = prepared.splits["train"]
    data = [MicroBatches(split, CONTEXT, SEED, sampling, BATCH, accumulate, rank, ranks) for rank in range(ranks)]
    for step, samples in enumerate(expected(prepared, sampling)):
        # Micro-batch after micro-batch, rank after rank within each.
        micro = [data[rank][step * accumulate + m][0] for m in range(accumulate) for rank in range(ranks)]
        assert {len(part) for part in micro} == {BATCH // (ranks * accumulate)}
        assert torch.equal(torch.cat(micro), samples)


def test_the_formula_of_the_first_sample_worked_by_hand(prepared: Prepared) -> None:
    # B = 12, R = 2, A = 3, micro = 2: rank 1 begins micro-batch m = 2 of step 4 at 4·12 + (2·2 + 1)·2 = 58.
    data = MicroBatches(prepared.splits["train"], CONTEXT, SEED, "permuted", 12, 3, 1, 2)
    assert data.first_sample(4 * 3 + 2) == 58


@pytest.mark.parametrize("workers", [0, 2])
def test_the_stream_does_not_depend_on_loader_processes(prepared: Prepared, workers: int) -> None:
    loader = module(prepared, num_workers=workers, accumulate=2).train_dataloader()
    assert len(loader) == STEPS * 2
    items = [tokens for (tokens,) in loader]
    assert {tuple(item.shape) for item in items} == {(BATCH // 2, CONTEXT + 1)}
    assert items[0].dtype == torch.int64
    assert torch.equal(torch.cat(items), expected(prepared).flatten(0, 1))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_goes_on_where_the_steps_were_counted(prepared: Prepared, workers: int) -> None:
    loader = module(prepared, num_workers=workers, accumulate=3, first_step=2).train_dataloader()
    assert len(loader) == STEPS * 3  # Lightning compares with the count of the whole run
    assert torch.equal(torch.cat([tokens for (tokens,) in loader]), expected(prepared)[2:].flatten(0, 1))


def test_a_loader_process_that_inherits_nothing_is_sent_the_path_and_not_the_tokens(prepared: Prepared) -> None:
    data = MicroBatches(prepared.splits["train"], CONTEXT, SEED, "permuted", BATCH, 1, 0, 1)
    sent = pickle.dumps(data)
    assert len(sent) < 1500  # 1800 tokens are 3600 bytes
    assert torch.equal(pickle.loads(sent)[3][0], expected(prepared)[3])


def test_neither_training_nor_validation_loaders_touch_torchs_generator(prepared: Prepared) -> None:
    data = module(prepared)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for loader in (data.train_dataloader(), *data.val_dataloader()):
        assert len(list(loader)) == len(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_validation_comes_first_and_then_the_extra_sets(prepared: Prepared) -> None:
    data = module(prepared)
    assert data.validation_names == ["validation", "other"]
    for name, loader in zip(data.validation_names, data.val_dataloader(), strict=True):
        tokens = prepared.splits[name].tokens
        targets = torch.cat([y.flatten() for _, y in loader])
        assert targets[targets != -100].tolist() == tokens[1:].tolist()


def test_without_a_validation_text_there_is_no_loader_for_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc" * 100, encoding="utf-8")
    prepared = prepare(TextFiles(str(tmp_path / "a.txt"), val_fraction=0), ByteTokenizer(), tmp_path)
    data = module(prepared)
    assert (data.validation_names, data.val_dataloader()) == ([], [])


def test_ranks_share_the_validation_windows_without_overlap(prepared: Prepared) -> None:
    split = prepared.splits["validation"]
    parts = [ValidationBatches(split, CONTEXT, 4, rank, 3) for rank in range(3)]
    assert len({len(part) for part in parts}) == 1
    targets = torch.cat([part[i][1].flatten() for i in range(len(parts[0])) for part in parts])
    assert targets[targets != -100].tolist() == split.tokens[1:].tolist()


@pytest.mark.parametrize(
    ("batch_size", "devices", "accumulate", "better"), [(12, 5, 1, 10), (12, 2, 4, 16), (1, 2, 1, 2), (13, 1, 2, 12)]
)
def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(
    batch_size: int, devices: int, accumulate: int, better: int
) -> None:
    with pytest.raises(UserError, match=rf"batch_size={batch_size} is not a multiple of .*use batch_size={better}$"):
        micro_batch_size(batch_size, devices, accumulate)
    assert better % (devices * accumulate) == 0


def test_too_short_a_text_is_refused_before_any_loader_is_made(prepared: Prepared) -> None:
    with pytest.raises(UserError, match=r"has 1800 tokens, but model\.context=1800 needs at least 1801"):
        module(prepared, context=1800)


def test_with_documents_a_batch_tells_which_document_each_token_is_of(tmp_path: Path) -> None:
    for name, text in (("a", "a" * 50), ("b", "b" * 70), ("c", "c" * 90)):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    prepared = prepare(TextFiles(str(tmp_path / "*.txt"), val_fraction=0.2), ByteTokenizer(), tmp_path)
    data = TextDataModule(prepared, CONTEXT, BATCH, STEPS, SEED, documents=True)
    for tokens, documents in data.train_dataloader():
        assert torch.equal(documents, tokens[:, :-1] - ord("a") + 1)  # the letter says which file it is from
    (validation,) = data.val_dataloader()
    for x, y, documents in validation:
        assert documents.shape == x.shape == y.shape
        assert (documents[x == ord("c")] == documents.max()).all()

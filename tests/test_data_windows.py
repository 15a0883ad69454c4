"""Windows: the formulas, worked by hand, and the promise that sample j depends on (seed, j) alone."""

import time

import numpy as np
import pytest

from softattn_lm.data.windows import TrainWindows, validation_windows
from softattn_lm.errors import UserError


def tokens(n: int) -> np.ndarray:
    """Token i is i, so that a window shows where it stands."""
    return np.arange(n, dtype=np.uint16)


@pytest.mark.parametrize("sampling", ["permuted", "random"])
def test_a_window_is_context_plus_one_consecutive_tokens(sampling: str) -> None:
    batch = TrainWindows(tokens(1000), 8, 0, sampling).batch(0, 500)  # type: ignore[arg-type]
    assert batch.shape == (500, 9)
    assert batch.dtype == np.int64
    assert (batch == batch[:, :1] + np.arange(9)).all()
    assert batch.max() < 1000


@pytest.mark.parametrize(("n", "context"), [(1000, 8), (17, 8), (24, 8), (23, 8), (1000, 1), (100, 99), (100, 60)])
def test_an_epoch_of_the_permutation_visits_each_window_once(n: int, context: int) -> None:
    windows = TrainWindows(tokens(n), context, 3, "permuted")
    k = windows.per_epoch
    assert k == max(1, (n - context) // context)
    for epoch in range(4):
        starts = windows.batch(epoch * k, k)[:, 0]
        phase = windows.phase(epoch)
        assert sorted(starts) == [phase + context * i for i in range(k)]
        assert 0 <= phase < n - k * context < 2 * context


def test_the_phase_and_the_order_differ_from_epoch_to_epoch_and_seed_to_seed() -> None:
    first, second = (TrainWindows(tokens(5000), 16, seed) for seed in (0, 1))
    assert len({first.phase(epoch) for epoch in range(50)}) > 10
    assert {first.phase(epoch) for epoch in range(400)} == set(range(24))  # 5000 - 311·16
    assert first.order(0).tolist() != first.order(1).tolist()
    assert first.order(0).tolist() != second.order(0).tolist()
    assert first.order(0).tolist() != sorted(first.order(0).tolist())


def test_every_token_is_trained_on_within_a_few_epochs() -> None:
    windows = TrainWindows(tokens(333), 16, 0)
    seen = np.zeros(333, dtype=bool)
    seen[windows.batch(0, windows.per_epoch * 200)] = True
    assert seen.all()


@pytest.mark.parametrize("sampling", ["permuted", "random"])
def test_sample_j_depends_on_seed_and_j_alone(sampling: str) -> None:
    whole = TrainWindows(tokens(1000), 8, 5, sampling).batch(0, 400)  # type: ignore[arg-type]
    again = TrainWindows(tokens(1000), 8, 5, sampling)  # type: ignore[arg-type]
    for first, count in ((399, 1), (0, 1), (7, 13), (120, 260), (3, 0), (1, 6)):
        assert again.batch(first, count).tolist() == whole[first : first + count].tolist()
    other = TrainWindows(tokens(1000), 8, 6, sampling).batch(0, 400)  # type: ignore[arg-type]
    assert (other != whole).any(axis=1).mean() > 0.9


def test_the_stream_is_the_same_on_every_machine_and_version() -> None:
    # Written down once: a change here would change every published run.
    assert TrainWindows(tokens(1000), 8, 0, "permuted").batch(0, 6)[:, 0].tolist() == PERMUTED
    assert TrainWindows(tokens(1000), 8, 0, "random").batch(0, 6)[:, 0].tolist() == RANDOM


PERMUTED = [740, 244, 148, 36, 460, 204]
RANDOM = [940, 192, 255, 211, 478, 223]


def test_a_batch_larger_than_the_text_goes_on_into_the_next_epochs() -> None:
    windows = TrainWindows(tokens(20), 8, 0)
    assert windows.per_epoch == 1
    batch = windows.batch(0, 50)
    assert batch[:, 0].tolist() == [windows.phase(epoch) for epoch in range(50)]


def test_random_starts_are_uniform_over_all_that_fit() -> None:
    starts = TrainWindows(tokens(20), 8, 0, "random").batch(0, 24_000)[:, 0]
    counts = np.bincount(starts, minlength=12)
    assert len(counts) == 12  # 0 <= s < n - T = 12
    # 2000 expected each, standard deviation 43: six of them.
    assert (abs(counts - 2000) < 260).all()
    assert abs(np.corrcoef(starts[:-1], starts[1:])[0, 1]) < 0.03


@pytest.mark.parametrize("sampling", ["permuted", "random"])
def test_the_shortest_text_has_one_window_and_a_shorter_one_is_refused(sampling: str) -> None:
    assert TrainWindows(tokens(9), 8, 0, sampling).batch(0, 2).tolist() == [list(range(9))] * 2  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"has 8 tokens, but model\.context=8 needs at least 9; use model\.context=7"):
        TrainWindows(tokens(8), 8, 0, sampling)  # type: ignore[arg-type]


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(UserError, match="seed=-1"):
        TrainWindows(tokens(9), 8, -1)


@pytest.mark.parametrize("sampling", ["permuted", "random"])
def test_a_sample_costs_less_than_thirty_microseconds(sampling: str) -> None:
    windows = TrainWindows(np.zeros(1_000_000, dtype=np.uint16), 64, 0, sampling)  # type: ignore[arg-type]
    times = []
    for attempt in range(5):
        begin = time.perf_counter()
        for i in range(50):
            windows.batch((attempt * 50 + i) * 12, 12)
        times.append((time.perf_counter() - begin) / 600)
    assert min(times) < 30e-6


# --- validation


def test_validation_windows_are_those_of_the_docstring() -> None:
    [(x, y)] = validation_windows(tokens(11), 4, 8)
    assert x.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    assert y.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, -100, -100]]
    assert x.dtype == y.dtype == np.int64


@pytest.mark.parametrize("n", [2, 3, 8, 9, 10, 16, 17, 18, 100])
@pytest.mark.parametrize("batch_size", [1, 3, 50])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_validation_predicts_each_token_but_the_first_exactly_once(n: int, batch_size: int, ranks: int) -> None:
    per_rank = [list(validation_windows(tokens(n), 8, batch_size, rank, ranks)) for rank in range(ranks)]
    assert len({len(batches) for batches in per_rank}) == 1  # ranks step together
    batches = [batch for step in zip(*per_rank, strict=True) for batch in step]
    assert all(0 < len(x) <= batch_size and x.shape == y.shape for x, y in batches)
    targets = np.concatenate([y.ravel() for _, y in batches])
    inputs = np.concatenate([x.ravel() for x, _ in batches])
    kept = targets != -100
    assert targets[kept].tolist() == list(range(1, n))
    assert inputs[kept].tolist() == list(range(n - 1))


def test_the_number_of_validation_windows_is_that_of_tiny_shakespeare() -> None:
    # (111,540 - 1) / 64 = 1742.8
    windows = validation_windows(np.zeros(111_540, dtype=np.uint16), 64, 100)
    assert windows.n_windows == 1743
    assert len(windows) == 18
    assert sum(len(x) for x, _ in windows) == 1743


def test_a_validation_text_with_nothing_to_predict_is_refused() -> None:
    with pytest.raises(UserError, match="1 tokens has nothing to predict"):
        validation_windows(tokens(1), 8, 1)

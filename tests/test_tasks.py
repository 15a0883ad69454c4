"""Tasks: sequences worked by hand, what counts as an answer, and a stream that is a function of (seed, index)."""

import itertools
import json
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from softattn_lm.data import Prepared
from softattn_lm.data.module import TaskBatches, TextDataModule, ValidationBatches
from softattn_lm.data.tasks import Copy, FixedSet, Forget, Induction, NoisyRecall, Recall, Sequences, Task, TaskStream
from softattn_lm.data.tasks.draws import distinct, places_in_order, power_law_slots
from softattn_lm.data.windows import PADDED
from softattn_lm.errors import UserError
from softattn_lm.tokenizer import from_state

TASKS: dict[str, Task] = {
    "recall": Recall(4, vocab_size=64),
    "recall, several": Recall([1, 2, 5], vocab_size=64, power=1.0),
    "recall, random filler": Recall(4, vocab_size=512, filler="random"),
    "forget": Forget([3, 4], 2, vocab_size=64),
    "noisy_recall": NoisyRecall(4, 6, 5, vocab_size=64),
    "induction": Induction(vocab_size=40),
    "induction, pair": Induction("pair", vocab_size=7),
    "copy": Copy(vocab_size=9),
    "copy, delayed": Copy("plain", 5, vocab_size=9),
    "copy, selective": Copy("selective", 5, vocab_size=9),
}
LENGTH = 32


def sequences(name: str, count: int = 400, seed: int = 0) -> Sequences:
    return TaskStream(TASKS[name], LENGTH, seed).batch(0, count)


def words(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.Philox(seed).random_raw(shape)  # type: ignore[no-any-return]


def answered(name: str, x: list[int], place: int) -> int:
    """The right answer at `place`, found by reading the sequence as a person would. Returns where it stands."""
    kind = name.partition(",")[0]
    if kind in ("recall", "forget", "noisy_recall"):
        values = range(1 + TASKS[name].n_keys, 1 + TASKS[name].n_keys + TASKS[name].n_values)  # type: ignore[attr-defined]
        bound = [t for t in range(place) if x[t] == x[place] and x[t + 1] in values]
        return bound[0 if "filler" in name else -1] + 1
    if kind == "induction":
        return max(t for t in range(place) if x[t] == x[place]) + 1
    begin = x.index(1)
    return [t for t in range(begin) if x[t] != 0][place - begin]


@pytest.mark.parametrize("name", TASKS)
def test_each_answer_is_what_a_reader_finds_and_its_gap_is_how_far_back_it_stands(name: str) -> None:
    found = sequences(name)
    places = np.argwhere(found.y != PADDED)
    assert len(places) >= len(found.x)
    for row, place in places:
        x = found.x[row].tolist()
        where = answered(name, x, place)
        assert x[where] == found.y[row, place]
        assert place - where == found.gaps[row, place]
    assert (found.gaps[found.y == PADDED] == 0).all()


ANSWERS = {"induction": 15, "induction, pair": 1, "copy": 16, "copy, delayed": 5, "copy, selective": 5}


@pytest.mark.parametrize("name", TASKS)
def test_only_answers_carry_loss_one_for_each_pair_or_symbol(name: str) -> None:
    found = sequences(name)
    answers = (found.y != PADDED).sum(1)
    assert (answers == ANSWERS.get(name, found.pairs)).all()
    assert found.x.min() >= 0 and max(found.x.max(), found.y.max()) < TASKS[name].vocab_size
    assert found.x.shape == found.y.shape == found.gaps.shape == (400, LENGTH)


def test_a_recall_sequence_read_by_hand() -> None:
    found = TaskStream(Recall(3, vocab_size=16), 16, 0).batch(0, 1)
    own = Recall(3, vocab_size=16).prepared(16).tokenizer
    # Written down once: a change here would change every published run.
    assert own.decode(found.x[0]) == RECALL
    assert [(t, own.decode([v])) for t, v in enumerate(found.y[0]) if v != PADDED] == RECALL_ANSWERS


RECALL = "k3 v3 k6 v4 k4 v5 k3 _ k6 _ k4 _ _ _ _ _"
RECALL_ANSWERS = [(6, "v3"), (8, "v4"), (10, "v5")]


def test_keys_are_of_one_half_of_the_vocabulary_and_values_of_the_other() -> None:
    found = sequences("recall")
    pairs = found.x[:, :8]
    keys, values = pairs[:, 0::2], pairs[:, 1::2]
    assert set(keys.ravel()) == set(range(1, 32)) and set(values.ravel()) == set(range(32, 64))
    assert all(len(set(row)) == 4 for row in [*keys, *values])
    behind = found.x[:, 8:]
    assert (np.sort(np.where(behind == 0, 99, behind), 1)[:, :4] == np.sort(keys, 1)).all()  # each is asked about once
    assert ((behind != 0).sum(1) == 4).all()


def test_the_last_of_several_values_of_a_key_counts() -> None:
    found = sequences("forget")
    overwritten = 0
    for x, y in zip(found.x.tolist(), found.y.tolist(), strict=True):
        for place, answer in enumerate(y):
            if answer != PADDED:
                values = [x[t + 1] for t in range(place) if x[t] == x[place]]
                assert answer == values[-1] and len(set(values)) == len(values)
                overwritten += len(values) == 2
    assert overwritten == 2 * len(found.x)


def test_noise_has_symbols_of_its_own_and_never_parts_a_key_from_its_value() -> None:
    found = sequences("noisy_recall")
    noise = found.x >= 59
    assert set(found.x[noise]) == set(range(59, 64)) and (found.x != 0).all()
    assert (noise[:, :14].sum(1) == 6).all()
    starts = [tuple(t for t in range(14) if 1 <= row[t] < 29) for row in found.x]
    assert all(29 <= row[t + 1] < 59 for row, places in zip(found.x, starts, strict=True) for t in places)
    assert len(set(starts)) > 100


def test_each_number_of_pairs_is_as_likely_as_any_other() -> None:
    counts = Counter(sequences("recall, several", 6000).pairs.tolist())
    assert counts.keys() == {1, 2, 5}
    assert all(abs(n - 2000) < 4 * (6000 * 2 / 9) ** 0.5 for n in counts.values())


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_gaps_follow_the_power_law(power: float) -> None:
    n, slots = 20_000, 12
    found = TaskStream(Recall(1, vocab_size=16, power=power), 2 + 2 * slots, 3).batch(0, n)
    slot = ((found.y != PADDED).argmax(1) - 2) // 2
    expected = np.arange(1, slots + 1) ** (power - 1.0)
    expected /= expected.sum()
    seen = np.bincount(slot, minlength=slots) / n
    assert (np.abs(seen - expected) < 4.5 * np.sqrt(expected * (1 - expected) / n)).all()


def test_several_slots_are_drawn_one_after_the_other_without_return() -> None:
    drawn = power_law_slots(words(60_000, 3), 2, 0.5)
    p = np.array([1.0, 2**-0.5, 3**-0.5])
    p /= p.sum()
    for a, b in itertools.permutations(range(3), 2):
        expected = p[a] * p[b] / (1 - p[a])
        assert ((drawn == (a, b)).all(1)).mean() == pytest.approx(expected, abs=4.5 * (expected / 60_000) ** 0.5)


def test_different_numbers_are_drawn_in_every_order_alike() -> None:
    drawn = distinct(words(60_000, 4), 4)
    counts = Counter(map(tuple, drawn.tolist()))
    assert counts.keys() == set(itertools.permutations(range(4), 2))
    assert all(abs(n - 5000) < 4.5 * 5000**0.5 for n in counts.values())
    assert (np.sort(distinct(words(50, 16), 8), 1) == np.arange(8)).all()  # all there are
    places = Counter(map(tuple, places_in_order(words(30_000, 4), 2).tolist()))
    assert places.keys() == set(itertools.combinations(range(4), 2))
    assert all(abs(n - 5000) < 4.5 * 5000**0.5 for n in places.values())


@pytest.mark.parametrize("name", TASKS)
def test_sequence_j_depends_on_seed_and_j_alone(name: str) -> None:
    whole = TaskStream(TASKS[name], LENGTH, 5).batch(0, 1600)
    again = TaskStream(TASKS[name], LENGTH, 5)
    for first, count in ((1599, 1), (0, 1), (7, 13), (500, 600), (511, 2), (3, 0), (512, 512)):
        part = again.batch(first, count)
        assert np.array_equal(part.x, whole.x[first : first + count])
        assert np.array_equal(part.y, whole.y[first : first + count])
    other = TaskStream(TASKS[name], LENGTH, 6).batch(0, 1600)
    assert (other.x != whole.x).any(1).mean() > 0.99
    if name in ("recall", "forget", "noisy_recall", "induction"):
        assert len({row.tobytes() for row in whole.x}) == 1600  # nothing comes again


def test_validation_and_test_are_fixed_sets_of_their_own() -> None:
    prepared, again = (Recall(4, vocab_size=64).prepared(LENGTH) for _ in range(2))
    sets = {name: fixed(prepared, name).sequences.x for name in ("validation", "test")}
    assert [len(rows) for rows in sets.values()] == [500, 1000]
    assert np.array_equal(sets["test"], fixed(again, "test").sequences.x)
    fresh = TaskStream(Recall(4, vocab_size=64), LENGTH, 0).batch(0, 1000).x
    rows = [row.tobytes() for part in (*sets.values(), fresh) for row in part]
    assert len(set(rows)) == len(rows)
    assert prepared.fingerprint == again.fingerprint != Recall(5, vocab_size=64).prepared(LENGTH).fingerprint


def fixed(prepared: Prepared, name: str) -> FixedSet:
    found = prepared.splits[name]
    assert isinstance(found, FixedSet)
    return found


# -- how a step is divided --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_sees_the_same_sequences_however_it_is_divided_and_weighs_answers_alike(
    accumulate: int, ranks: int
) -> None:
    task = TASKS["recall, several"]
    data = [TaskBatches(TaskStream(task, LENGTH, 0), 24, accumulate, rank, ranks) for rank in range(ranks)]
    whole = TaskStream(task, LENGTH, 0).batch(0, 72)
    nats = np.random.default_rng(0).random((72, LENGTH))  # a loss at each place
    for step in range(3):
        parts = [data[rank][step * accumulate + m] for m in range(accumulate) for rank in range(ranks)]
        assert torch.equal(torch.cat([x for x, _, _ in parts]), torch.from_numpy(whole.x[24 * step : 24 * step + 24]))
        asked = torch.cat([y for _, y, _ in parts]).numpy() != PADDED
        here = nats[24 * step : 24 * step + 24]
        micro = 24 // len(parts)
        losses = [
            (here * asked)[micro * i : micro * i + micro].sum() / share.item() for i, (*_, share) in enumerate(parts)
        ]
        assert np.mean(losses) == pytest.approx(here[asked].mean(), rel=1e-6)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_where_steps_were_counted_with_any_number_of_processes(workers: int) -> None:
    module = TextDataModule(
        Recall(4, vocab_size=64).prepared(LENGTH), LENGTH, 12, 5, 0, accumulate=2, first_step=3, num_workers=workers
    )
    items = list(module.train_dataloader())
    expected = TaskStream(Recall(4, vocab_size=64), LENGTH, 0).batch(36, 24)
    assert np.array_equal(torch.cat([x for x, _, _ in items]), expected.x)
    assert {share.item() for *_, share in items} == {24.0}
    assert module.validation_names == ["validation"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_share_a_fixed_set_and_all_take_equally_many_batches(ranks: int) -> None:
    prepared = Recall(4, vocab_size=64, validation_sequences=50).prepared(LENGTH)
    data = [ValidationBatches(prepared.splits["validation"], LENGTH, 8, rank, ranks) for rank in range(ranks)]
    assert len({len(part) for part in data}) == 1
    batches = [data[rank][index] for index in range(len(data[0])) for rank in range(ranks)]
    x, y = (torch.cat([batch[i] for batch in batches]).numpy() for i in range(2))
    real = (y != PADDED).any(1)
    assert np.array_equal(x[real], fixed(prepared, "validation").sequences.x) and real.sum() == 50
    with pytest.raises(IndexError):
        data[0][len(data[0])]


def test_a_stream_pickles_without_the_block_it_holds() -> None:
    stream = TaskStream(TASKS["recall"], LENGTH, 0)
    expected = stream.batch(700, 5).x
    assert len(pickle.dumps(stream)) < 3000
    assert np.array_equal(pickle.loads(pickle.dumps(stream)).batch(700, 5).x, expected)


# -- what is refused, and what is said --------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, int, str]] = {
    "another length": (lambda: Recall(length=64), 32, "data.length=64 and model.context=32 differ.*model.context=64"),
    "too many pairs": (lambda: Recall(9), 32, "9 pairs takes 36 tokens.*model.context=32; type model.context=36"),
    "few symbols": (lambda: Recall(8, vocab_size=16), 64, "7 keys and 8 values.*type data.vocab_size=18 or more"),
    "no pairs": (lambda: Recall(0), 32, "data.n_pairs=0"),
    "no power": (lambda: Recall(power=0.0), 32, "data.power must be above 0"),
    "one to validate": (lambda: Recall(validation_sequences=1), 32, "data.validation_sequences must be at least 2"),
    "many updates": (lambda: Forget([2, 3], 3), 32, "data.updates=3: 1 to 2 keys.*type data.updates=2"),
    "room for updates": (lambda: Forget(4, 4), 23, "takes 24 tokens"),
    "no noise": (lambda: NoisyRecall(noise=0), 32, "data.noise must be at least 1"),
    "repeat": (lambda: Induction(vocab_size=8), 32, "type data.vocab_size=16 or more"),
    "short": (lambda: Induction(), 3, "needs 4 tokens"),
    "selective": (lambda: Copy("selective"), 32, "type data.n_symbols=16"),
    "long copy": (lambda: Copy("plain", 17), 32, "type model.context=34"),
    "nothing to copy": (lambda: Copy(vocab_size=3), 32, "type data.vocab_size=4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_fit_are_refused_with_what_to_type(case: str) -> None:
    make, context, says = REFUSED[case]
    with pytest.raises(UserError, match=says):
        make().prepared(context)


def test_what_is_just_possible_is_made() -> None:
    Recall(8, vocab_size=18).prepared(32)
    Forget(4, 4, vocab_size=18).prepared(24)
    Induction(vocab_size=16).prepared(32)
    Copy("plain", 16).prepared(32)


def test_symbols_have_names_that_read_back() -> None:
    tokenizer = NoisyRecall(4, 6, 5, vocab_size=64).prepared(LENGTH).tokenizer
    assert tokenizer.decode([0, 1, 28, 29, 58, 59, 63]) == "_ k0 k27 v0 v29 n0 n4"
    assert tokenizer.encode("_ k0 k27\n v0 v29 n0 n4").tolist() == [0, 1, 28, 29, 58, 59, 63]
    again = from_state(json.loads(json.dumps(tokenizer.state())))
    assert again.decode(range(64)) == tokenizer.decode(range(64)) and again.vocab_size == 64
    stream = again.stream()
    assert "".join(stream.push(i) for i in (1, 29)) + stream.flush() == " k0 v0"
    for text, says in (("k0 hello", "hello is no symbol"), (" ", "an empty text"), ("k28", "k0 to k27, v0 to v29")):
        with pytest.raises(UserError, match=says):
            tokenizer.encode(text)
    for groups in ([["k", 0]], [["k", 1 << 40]], [], [[1, 2]]):
        with pytest.raises(UserError, match="damaged"):
            from_state({"kind": "symbols", "groups": groups})

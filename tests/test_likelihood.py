"""Nats, errors and bits against sums written out, and against how they spread over repeated texts."""

import math

import pytest
import torch

from softattn_lm.evaluation.likelihood import IGNORED, Likelihood


def logits_and_targets(windows: int, context: int, vocabulary: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(windows, context, vocabulary, generator=generator)
    return logits, torch.randint(vocabulary, (windows, context), generator=generator)


def test_the_mean_is_over_predicted_tokens_and_not_over_batches():
    logits, targets = logits_and_targets(5, 4, 7)
    targets[4, 1:] = IGNORED
    expected = [
        -logits[b, t].double().log_softmax(-1)[targets[b, t]].item()
        for b in range(5)
        for t in range(4)
        if targets[b, t] != IGNORED
    ]
    for size in (1, 2, 5):
        likelihood = Likelihood()
        for x, y in zip(logits.split(size), targets.split(size), strict=True):
            likelihood.add(x, y)
        result = likelihood.result()
        assert result.nats_per_token == pytest.approx(sum(expected) / 17, rel=1e-6)
        assert (result.tokens, result.windows) == (17, 5)


def test_bits_per_byte_and_perplexity_are_other_units_of_the_same_number():
    likelihood = Likelihood()
    likelihood.add(torch.zeros(2, 3, 8), torch.ones(2, 3, dtype=torch.int64))
    result = likelihood.result(bytes_per_token=1.5)
    assert result.nats_per_token == pytest.approx(math.log(8))
    assert result.perplexity == pytest.approx(8)
    assert result.bits_per_byte == pytest.approx(3 / 1.5)
    assert likelihood.result().bits_per_byte is None


def test_loss_by_position_leaves_out_what_is_not_predicted():
    logits, targets = torch.zeros(3, 4, 2), torch.zeros(3, 4, dtype=torch.int64)
    logits[:, 2, 0] = math.log(3.0)  # probability 3/4 of the right one at the third place
    targets[2, 2:] = IGNORED
    likelihood = Likelihood()
    likelihood.add(logits, targets)
    result = likelihood.result()
    half, quarter = math.log(2), math.log(4 / 3)
    assert result.by_position == pytest.approx([half, half, quarter, half])
    assert result.stretches() == pytest.approx(
        {"first": half, "quarter 1": half, "quarter 2": half, "quarter 3": quarter, "quarter 4": half, "last": half}
    )


def window_losses(losses: torch.Tensor) -> Likelihood:
    """A Likelihood that has seen windows of one token with the given nats."""
    likelihood = Likelihood()
    p = torch.exp(-losses)
    logits = torch.stack((p, 1 - p), -1).log()[:, None, :]  # (N, 1, 2)
    likelihood.add(logits, torch.zeros(len(losses), 1, dtype=torch.int64))
    return likelihood


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_the_standard_error_is_how_the_mean_really_spreads_over_texts(correlation):
    # Independent windows, and a text whose neighbouring windows resemble each other: there, an error that assumed
    # independence would be half of the truth.
    noise = torch.randn(900, 200, generator=torch.Generator().manual_seed(0))  # 200 texts of 900 windows
    level = [noise[0]]
    for i in range(1, 900):
        level.append(correlation * level[-1] + math.sqrt(1 - correlation**2) * noise[i])
    results = [window_losses((2.0 + 0.2 * text).clamp(min=0.5)).result() for text in torch.stack(level).T]
    means, errors = [r.nats_per_token for r in results], [r.standard_error for r in results]
    spread = torch.tensor(means).std().item()
    assert spread * 0.8 < sum(errors) / len(errors) < spread * 1.2


def test_one_window_has_no_standard_error():
    assert math.isnan(window_losses(torch.tensor([1.0])).result().standard_error)


@pytest.mark.parametrize("windows", [10, 41])
def test_ranks_that_take_batches_in_turn_get_what_one_process_gets(windows):
    logits, targets = logits_and_targets(windows, 4, 7)
    whole = Likelihood()
    whole.add(logits, targets)
    ranks = [Likelihood(), Likelihood()]
    for batch in range(-(-windows // 6) * 2):  # of three windows, as many for each rank
        x, y = logits[3 * batch : 3 * batch + 3], targets[3 * batch : 3 * batch + 3]
        if not len(x):  # out of text, keeping step
            x, y = torch.zeros(1, 4, 7), torch.full((1, 4), IGNORED)
        ranks[batch % 2].add(x, y, first=3 * batch)
    # A reduction needs both: first each says how many windows it has, then what they are worth.
    counts: list[torch.Tensor] = []
    for rank in ranks:
        with pytest.raises(StopIteration):
            rank.result(reduce=lambda values: next(iter(())) if counts.append(values) is None else values)
    parts: list[torch.Tensor] = []
    total = counts[0] + counts[1]
    ranks[0].result(reduce=lambda values: total if len(values) == 1 else parts.append(values) or values)
    result = ranks[1].result(reduce=lambda values: total if len(values) == 1 else values + parts[0])
    expected = whole.result()
    assert result.nats_per_token == pytest.approx(expected.nats_per_token, rel=1e-12)
    assert result.standard_error == pytest.approx(expected.standard_error, rel=1e-12)
    assert (result.tokens, result.windows) == (4 * windows, windows)
    assert result.by_position == pytest.approx(expected.by_position)

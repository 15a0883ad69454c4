"""n-grams, the scale for a table of losses: by hand, as a distribution, and on the windows a model is measured on."""

import numpy as np
import pytest

from softattn_lm.evaluation.ngram import NGrams, ngram_losses

A, B, C = 0, 1, 2
TEXT = np.array([A, B, A, B, A, C, A, A])


def test_a_bigram_worked_by_hand() -> None:
    # Bigrams AB 2, BA 2, AC 1, CA 1, AA 1: n1 = 3, n2 = 2, D = 3/7. After A: 4 times, 3 different.
    # Below, how many different tokens precede: A 3, B 1, C 1 (5 in all), of which one is 1 twice and none is 2: D = 1.
    lower = {A: (3 - 1) / 5 + 3 / 5 / 3, B: 0 + 3 / 5 / 3, C: 0 + 3 / 5 / 3}
    d = 3 / 7
    after_a = {
        A: (1 - d) / 4 + d * 3 / 4 * lower[A],
        B: (2 - d) / 4 + d * 3 / 4 * lower[B],
        C: (1 - d) / 4 + d * 3 / 4 * lower[C],
    }
    counted = NGrams(TEXT, 3, 2)
    for token, expected in after_a.items():
        assert counted.probabilities(np.array([A, token]), 2)[1] == pytest.approx(expected, rel=1e-12)
    # B is followed by A alone, twice; C by A, once.
    assert counted.probabilities(np.array([B, C]), 2)[1] == pytest.approx(d / 2 * lower[C], rel=1e-12)
    # Order 1 alone counts occurrences: A 5, B 2, C 1; n1 = n2 = 1, D = 1/3, three different of 8.
    single = NGrams(TEXT, 3, 1).probabilities(np.array([A, B, C]), 1)
    assert single == pytest.approx([(n - 1 / 3) / 8 + 1 / 3 * 3 / 8 / 3 for n in (5, 2, 1)], rel=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("before", [[], [0], [1, 2, 3], [4, 4, 4, 4], [6, 6]])
def test_probabilities_of_what_may_follow_add_up_to_one(order: int, before: list[int]) -> None:
    text = np.random.default_rng(0).integers(0, 6, 500)  # 6 never occurs
    counted = NGrams(text, 7, 5)
    each = [counted.probabilities(np.array([*before, token]), order)[-1] for token in range(7)]
    assert sum(each) == pytest.approx(1.0, rel=1e-12) and min(each) > 0


def test_a_text_that_its_last_two_tokens_decide_needs_three_to_be_predicted() -> None:
    text = [0, 1]
    for _ in range(3000):
        text.append((text[-1] + text[-2]) % 5)
    losses = ngram_losses(np.array(text[:2500]), np.array(text[2500:]), 5, context=50, order=4)
    assert losses[3] < 0.1 < 1.0 < losses[2]
    assert list(losses) == [1, 2, 3, 4]


def test_nothing_is_known_of_what_stands_before_a_window() -> None:
    generator = np.random.default_rng(1)
    train, held_back = (generator.integers(0, 4, n) for n in (3000, 41))
    counted = NGrams(train, 4, 3)
    by_hand = []
    for window in range(10):  # of 4 tokens; each predicts the next, from those before it in the window
        begin = 4 * window
        for place in range(begin + 1, begin + 5):
            known = held_back[begin : place + 1]
            by_hand.append(-np.log(counted.probabilities(known, min(3, len(known)))[-1]))
    assert ngram_losses(train, held_back, 4, context=4, order=3)[3] == pytest.approx(np.mean(by_hand), rel=1e-12)


def test_an_order_that_the_text_cannot_fill_is_refused() -> None:
    with pytest.raises(ValueError, match="order 9"):
        NGrams(TEXT, 3, 9)

"""The statistics of an ablation against numbers worked out by hand, and against what simulation says of their error."""

import math

import numpy as np
import pytest
from scipy import stats

from softattn_lm.ablation.rates import Choice, choose, together
from softattn_lm.ablation.statistics import (
    Part,
    bootstrap_interval,
    correlation,
    detectable,
    holm,
    level_of_look,
    log_rank_p,
    paired_interval,
    pairs_needed,
    sign_flip_p,
    sign_p,
    signs_needed,
    success_interval,
    text_part,
    unpaired_interval,
)
from softattn_lm.ablation.verdict import compare
from tests import real_baselines
from tests.null_sweeps import family_wise, over_looks, tuned, unpaired_splits, with_text

THREE = np.array([1.0, 2.0, 3.0])  # mean 2, variance 1, t = 2 sqrt(3)


def within(share: float, expected: float, trials: int) -> bool:
    """Whether a simulated share is what `trials` draws at `expected` can give (99.99 % of the time)."""
    return stats.binomtest(round(share * trials), trials, expected).pvalue > 1e-4


def test_the_paired_t_interval_is_the_one_worked_out_by_hand() -> None:
    found = paired_interval(THREE, 0.95)
    assert found.mean == 2 and found.df == 2
    assert found.half == pytest.approx(4.302652729696 * math.sqrt(1 / 3), rel=1e-9)
    assert found.p == pytest.approx(1 - math.sqrt(12) / math.sqrt(14), rel=1e-9)  # the t distribution of 2 df is closed
    with pytest.raises(ValueError, match="2 paired seeds or more, and there are 1"):
        paired_interval(THREE[:1], 0.95)


def test_another_part_adds_its_variance_and_its_degrees_of_freedom() -> None:
    found = paired_interval(THREE, 0.95, [Part(2.0, 2)])
    df = (7 / 3) ** 2 / ((1 / 3) ** 2 / 2 + 2.0**2 / 2)
    assert found.df == pytest.approx(df) and found.half == pytest.approx(stats.t.ppf(0.975, df) * math.sqrt(7 / 3))
    assert found.p == pytest.approx(2 * stats.t.sf(2 / math.sqrt(7 / 3), df))


def test_another_part_never_makes_the_interval_narrower_than_that_of_the_seeds() -> None:
    alone, found = paired_interval(THREE, 0.95), paired_interval(THREE, 0.95, [Part(1 / 3, 2)])
    summed = 2.776445105198 * math.sqrt(2 / 3)  # 4 degrees of freedom: (2/3)^2 / (2 (1/3)^2 / 2)
    assert summed < alone.half == found.half and found.p == alone.p


def test_null_sweeps_whose_text_moves_all_seeds_alike_are_wrong_no_more_often() -> None:
    reported, summed = with_text(500, 0.1, seeds=3)
    assert reported < 0.07 and summed > 0.09  # python tests/null_sweeps.py: 3.5 % and 15 %


def test_holm_multiplies_the_smallest_p_by_all_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


def test_sign_flips_need_eight_pairs_and_the_bootstrap_twenty() -> None:
    assert sign_flip_p(np.ones(7)) is None and sign_flip_p(np.arange(1.0, 9)) == pytest.approx(2 / 256)
    many = np.random.default_rng(0).normal(1, 0.1, size=20)
    assert bootstrap_interval(many[:19], 0.95) is None
    low, high = bootstrap_interval(many, 0.95) or (0, 0)
    assert low < many.mean() < high and high - low == pytest.approx(2 * 1.96 * many.std() / math.sqrt(20), rel=0.25)


def test_signs_alone_decide_where_a_mean_has_no_meaning() -> None:
    assert sign_p([math.inf] * 5 + [-1]) == pytest.approx(2 * 7 / 64)
    assert sign_p([0.0, 0.0]) == 1
    for alpha in (0.05, 0.0625, 0.01):
        needed = signs_needed(alpha)
        assert sign_p([1.0] * needed) < alpha <= sign_p([1.0] * (needed - 1))


def test_success_intervals_and_log_rank_are_those_of_the_books() -> None:
    assert success_interval(0, 8, 0.95) == pytest.approx((0, 1 - 0.025 ** (1 / 8)))
    assert success_interval(8, 8, 0.95) == pytest.approx((0.025 ** (1 / 8), 1))
    # O - E = 2 - (1/2 + 1/3), variance 1/4 + 2/9
    z = (2 - 5 / 6) / math.sqrt(1 / 4 + 2 / 9)
    assert log_rank_p([1, 2], [3, 4], 10) == pytest.approx(2 * stats.norm.sf(z))
    assert log_rank_p([None, None], [None], 10) == 1 and log_rank_p([5, 5], [5, 5], 10) == 1
    assert log_rank_p([10, 20, 10, 20], [None] * 4, 100) < 0.02


def test_power_is_that_of_the_non_central_t_and_of_simulation() -> None:
    n, alpha, sd = 6, 0.02, 0.3
    effect = detectable(sd, n, alpha)
    critical, away = stats.t.ppf(1 - alpha / 2, n - 1), effect / sd * math.sqrt(n)
    assert stats.nct.sf(critical, n - 1, away) + stats.nct.cdf(-critical, n - 1, away) == pytest.approx(0.8, abs=1e-6)
    generator = np.random.default_rng(0)
    drawn = generator.normal(effect, sd, size=(3000, n))
    hits = sum(not (i := paired_interval(d, 1 - alpha)).low <= 0 <= i.high for d in drawn)
    assert within(hits / 3000, 0.8, 3000)
    needed = pairs_needed(sd, effect, alpha)
    assert needed == n
    assert pairs_needed(sd, effect / 2, alpha) == next(
        k for k in range(2, 99) if detectable(sd, k, alpha) <= effect / 2
    )


def test_no_number_of_seeds_makes_up_for_a_text_that_is_too_short() -> None:
    assert pairs_needed(0.01, 0.01, 0.05, fixed=(0.01 / 2.9) ** 2) is not None  # z(0.975) + z(0.8) = 2.80
    assert pairs_needed(0.01, 0.01, 0.05, fixed=(0.01 / 2.7) ** 2) is None


def test_neighbouring_windows_that_are_alike_count_as_fewer() -> None:
    generator = np.random.default_rng(0)
    steps = generator.normal(size=4000)
    alike = np.convolve(steps, np.ones(8) / math.sqrt(8), mode="valid")[:3600]  # variance 1, alike over 8 windows
    alone = np.mean([text_part(generator.normal(size=3600)).variance * 3600 for _ in range(10)])
    assert alone == pytest.approx(1, rel=0.2)
    assert text_part(alike).variance * 3600 > 4
    with pytest.raises(ValueError, match="too few"):
        text_part(np.zeros(3), block=2)


def test_null_sweeps_are_wrong_about_as_often_as_the_table_says() -> None:
    share = family_wise(4000)
    assert 0.03 - 0.008 < share < 0.055  # python tests/null_sweeps.py: 20,000 sweeps, 3.8 %
    assert share <= 0.05


def test_looking_again_after_every_added_seed_spends_no_more_than_was_stated() -> None:
    assert sum(level_of_look(look) for look in range(1, 60)) <= 0.05 + 1e-12
    corrected, naive = over_looks(800), over_looks(800, corrected=False)
    assert corrected <= 0.05 < 0.10 < naive
    with pytest.raises(ValueError, match="counted from 1"):
        level_of_look(0)


def test_a_chosen_learning_rate_keeps_the_level_only_with_its_uncertainty() -> None:
    with_it, without = tuned(300, curvature=0.003, sd=0.02)
    assert with_it <= 0.05 + 0.025 and without > 0.08 and without > 2 * with_it


def test_unpaired_splits_of_one_arm_are_told_apart_as_rarely_as_they_should() -> None:
    losses = 2 + 0.01 * np.random.default_rng(5).normal(size=40)
    assert within(unpaired_splits(losses, 800), 0.05, 800)
    found = unpaired_interval(np.array([1.0, 2, 3]), np.array([2.0, 4, 6]), 0.95)
    assert found.mean == 2 and found.df == pytest.approx((1 / 3 + 4 / 3) ** 2 / ((1 / 3) ** 2 / 2 + (4 / 3) ** 2 / 2))


def test_what_is_said_of_real_baselines_counts_the_splits_that_differ() -> None:
    losses = 2 + 0.01 * np.random.default_rng(1).normal(size=40)
    share = unpaired_splits(losses, real_baselines.SPLITS)
    low, high = success_interval(round(share * real_baselines.SPLITS), real_baselines.SPLITS, 0.95)
    said = real_baselines.said(losses)
    assert said.startswith("40 baselines: 2.00") and f"{share:.2%} differ ({low:.2%} to {high:.2%}" in said


def test_the_rate_is_the_vertex_of_the_parabola_and_an_edge_is_named() -> None:
    def bowl(best: float) -> dict[float, dict[int, float]]:
        return {2.0**k: {s: 0.1 * s + 0.01 * (k - best) ** 2 for s in range(3)} for k in range(-2, 3)}

    found = choose(bowl(0.3))
    assert found.lr == pytest.approx(2**0.3) and found.edge is None and found.excess == pytest.approx(0, abs=1e-12)
    assert choose(bowl(5)).edge == "high" and choose(bowl(-5)).edge == "low"
    lost = bowl(0.3)
    lost[1.0][1] = math.inf
    assert choose(lost).lr != 1.0
    with pytest.raises(ValueError, match="same tuning seeds"):
        choose(bowl(0) | {8.0: {7: 1.0}})
    with pytest.raises(ValueError, match="diverged"):
        choose({1.0: {0: math.inf}, 2.0: {0: math.inf}})


def test_rates_that_all_look_alike_are_the_least_certain() -> None:
    flat = {2.0**k: {s: float(v) for s, v in enumerate(row)} for k, row in
            zip(range(5), [[1.0, 1.2], [1.2, 1.1], [1.3, 1.2], [1.1, 1.3], [1.1, 1.15]], strict=True)}  # fmt: skip
    assert choose(flat).excess > 0.01
    both = together(Choice(1, 0.01, 4), Choice(1, 0.01, 4))
    assert both.variance == pytest.approx(6e-4) and both.df == pytest.approx(8)
    assert together(Choice(1, 0.0, math.inf), Choice(1, 0.0, math.inf)) == Part(0.0, math.inf)


BASE = {0: 2.0, 1: 2.02, 2: 1.99, 3: 2.01, 4: 2.03}


def moved(by: float, noise: float = 0.0005) -> dict[int, float]:
    return {seed: loss + by + noise * (-1) ** seed for seed, loss in BASE.items()}


def test_each_of_the_verdicts_comes_from_the_interval_and_the_smallest_effect() -> None:
    arms = {"base": BASE, "up": moved(0.03), "down": moved(-0.03), "same": moved(0.001), "noisy": moved(0.005, 0.02)}
    found = {c.arm: c for c in compare(arms | {"twin": dict(BASE)}, "base", 0.01)}
    words = {arm: c.verdict for arm, c in found.items()}
    assert words == {
        "up": "worse", "down": "better", "same": "equivalent", "noisy": "undetermined", "twin": "identical"
    }  # fmt: skip
    assert {c.alpha for c in found.values()} == {level_of_look(1) / 5}
    noisy = found["noisy"]
    sd = float(np.std([arms["noisy"][s] - BASE[s] for s in BASE], ddof=1))
    assert noisy.more_seeds == (pairs_needed(sd, 0.01, level_of_look(2) / 5) or 0) - 5
    assert noisy.detectable == pytest.approx(detectable(sd, 5, level_of_look(1) / 5))
    assert found["up"].correlation == pytest.approx(
        correlation(np.array([*BASE.values()]), np.array([*arms["up"].values()]))
    )


def test_a_look_at_more_seeds_widens_the_interval() -> None:
    arms = {"base": BASE, "arm": moved(0.03)}
    (first,), (second,) = compare(arms, "base", 0.01), compare(arms, "base", 0.01, look=2)
    assert first.interval is not None and second.interval is not None
    assert second.interval.half > first.interval.half and second.interval.level == pytest.approx(0.995)


def test_pairing_that_bought_nothing_is_said() -> None:
    against = {seed: 4.0 - loss + 0.001 * seed for seed, loss in BASE.items()}
    (found,) = compare({"base": BASE, "arm": against}, "base", 0.01)
    assert found.correlation is not None and found.correlation < 0
    assert "pairing bought nothing" in found.notes[0]
    (paired,) = compare({"base": BASE, "arm": moved(0.01)}, "base", 0.01)
    assert paired.notes == ()


def test_a_diverged_run_is_the_worst_and_forbids_an_interval() -> None:
    lost = moved(-0.1) | {4: math.nan}
    (found,) = compare({"base": BASE, "arm": lost}, "base", 0.01)
    assert found.interval is None and found.diverged == 1 and found.p == pytest.approx(sign_p([-1, -1, -1, -1, 1]))
    assert found.verdict == "undetermined" and found.more_seeds == signs_needed(level_of_look(2)) - 5
    many = {seed: 2.0 + 0.001 * seed for seed in range(8)}
    (all_lost,) = compare({"base": many, "arm": dict.fromkeys(many, math.inf)}, "base", 0.01)
    assert all_lost.verdict == "worse" and all_lost.diverged == 8
    (both,) = compare({"base": dict.fromkeys(many, math.inf), "arm": dict.fromkeys(many, math.nan)}, "base", 0.01)
    assert both.verdict == "undetermined" and both.p == 1


def test_seeds_that_change_nothing_give_no_interval() -> None:
    (found,) = compare({"base": dict.fromkeys(BASE, 2.0), "arm": dict.fromkeys(BASE, 2.1)}, "base", 0.01)
    assert found.verdict == "undetermined" and found.interval is None and "the seeds changed nothing" in found.notes[0]


def test_fewer_than_two_shared_seeds_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="arm arm shares 1 seeds with base"):
        compare({"base": BASE, "arm": {0: 1.0, 9: 1.0}}, "base", 0.01)


def test_the_test_text_and_the_rates_are_part_of_the_interval() -> None:
    generator = np.random.default_rng(1)
    windows = {arm: {s: generator.normal(2, 0.1, size=100) for s in BASE} for arm in ("base", "arm")}
    losses = {arm: {s: float(w.mean()) for s, w in of.items()} for arm, of in windows.items()}
    alone, whole = (compare(losses, "base", 0.01, windows=w, rates=r)[0] for w, r in
                    ((None, None), (windows, {"arm": Part(1e-4, 9)})))  # fmt: skip
    assert alone.interval is not None and whole.interval is not None
    assert (alone.text, alone.rates) == (0, 0) and 0 < whole.text < 1 and 0 < whole.rates < 1
    seeds = float(np.var(whole.differences, ddof=1)) / 5
    text = whole.text / (1 - whole.text) * (seeds + 1e-4)
    assert whole.rates == pytest.approx(1e-4 / (seeds + text + 1e-4))
    assert whole.interval.half > alone.interval.half

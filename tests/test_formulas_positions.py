"""Each position by hand: angles, waves, slopes, tables."""

import math

import pytest
import torch

from softattn_lm.attention.visibility import Visibility
from softattn_lm.errors import UserError
from softattn_lm.position.alibi import ALiBi, alibi_slopes
from softattn_lm.position.learned import Learned
from softattn_lm.position.none import NoPosition
from softattn_lm.position.rotary import Rotary
from softattn_lm.position.sinusoidal import Sinusoidal


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- rotary ------------------------------------------------------------------------------------------------------------


def test_rotary_by_hand():
    # Head width 4, base 100: pairs (0, 2) and (1, 3) with frequencies 1 and 1/10.
    rotation = Rotary(head_dim=4, context=8, base=100.0).rotation(range(2, 3))
    x = torch.tensor([1.0, 3.0, 0.0, 1.0]).reshape(1, 1, 1, 4)
    c, s = math.cos(0.2), math.sin(0.2)
    expected = torch.tensor([math.cos(2.0), 3 * c - s, math.sin(2.0), 3 * s + c])
    torch.testing.assert_close(rotation(x).flatten(), expected)


@pytest.mark.parametrize("shift", [1, 1000, 100_000])
def test_rotated_scores_depend_on_the_distance_only(shift):
    rotary = Rotary(head_dim=64, context=32)
    q, k = normal(1, 1, 16, 64), normal(1, 1, 16, 64, seed=1)
    here, there = rotary.rotation(range(16)), rotary.rotation(range(shift, shift + 16))
    torch.testing.assert_close(here(q) @ here(k).mT, there(q) @ there(k).mT, atol=1e-4, rtol=0)


def test_angles_far_into_a_text_are_right_to_the_last_bit_of_float32():
    # In float32, angles at position 100,000 are off by up to 4e-3; Python's own floats have 53 bits.
    place, base, width = 100_003, 10000.0, 64
    got = Rotary(head_dim=width, context=8, base=base).rotation(range(place, place + 1))
    angles = [place * base ** (-2 * m / width) for m in range(width // 2)]
    torch.testing.assert_close(got.cos[0], torch.tensor([math.cos(a) for a in angles]), atol=2e-7, rtol=0)
    torch.testing.assert_close(got.sin[0], torch.tensor([math.sin(a) for a in angles]), atol=2e-7, rtol=0)


def test_rotation_keeps_lengths_and_a_fraction_leaves_the_rest_alone():
    rotation = Rotary(head_dim=8, context=32, fraction=0.5).rotation(range(3, 8))
    x = normal(2, 3, 5, 8)
    torch.testing.assert_close(rotation(x).norm(dim=-1), x.norm(dim=-1))
    assert rotation(x)[..., 4:].equal(x[..., 4:])
    assert ((rotation(x) - x)[..., :4].norm(dim=-1) > 0.03 * x[..., :4].norm(dim=-1)).all()


def test_rotary_angles_beyond_the_table_continue_it():
    short, long = Rotary(head_dim=16, context=4), Rotary(head_dim=16, context=64)
    assert short.rotation(range(10, 30)).cos.equal(long.rotation(range(10, 30)).cos)


@pytest.mark.parametrize("context", [4, 64])
def test_places_given_one_by_one_turn_as_a_range_does(context):
    rotary, x = Rotary(head_dim=8, context=context), normal(2, 3, 5, 8)
    places = torch.tensor([[0, 1, 2, 0, 1], [7, 8, 9, 10, 11]])
    got = rotary.rotation(places)(x)
    for row, runs in enumerate([[range(3), range(2)], [range(7, 12)]]):
        parts = x[row].split([len(run) for run in runs], dim=1)
        expected = [rotary.rotation(run)(part) for run, part in zip(runs, parts, strict=True)]
        assert got[row].equal(torch.cat(expected, dim=1))


@pytest.mark.parametrize(("head_dim", "fraction"), [(5, 1.0), (6, 0.5), (8, 1.5), (8, 0.0)])
def test_a_share_of_a_head_that_makes_no_pairs_is_refused(head_dim, fraction):
    with pytest.raises(UserError, match=f"fraction {fraction} of a head of {head_dim} is"):
        Rotary(head_dim=head_dim, context=4, fraction=fraction)


# -- biases ------------------------------------------------------------------------------------------------------------


def test_alibi_slopes_of_eight_heads_are_halves():
    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert alibi_slopes(1) == [1 / 256]
    assert alibi_slopes(16)[:3] == pytest.approx([2**-0.5, 1 / 2, 2**-1.5], rel=1e-15)


def test_alibi_slopes_of_six_heads_are_those_of_four_and_every_second_of_eight():
    assert alibi_slopes(6) == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]
    # Of twelve: those of eight, then four of sixteen.
    assert alibi_slopes(12)[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5], rel=1e-15)


def test_alibi_takes_slope_times_distance_from_scores():
    bias = ALiBi(n_head=2).bias(Visibility(3)).tile()  # (H, T, S), slopes 1/16 and 1/256
    distance = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [2.0, 1.0, 0.0]])  # the future is hidden, not biased
    assert bias.equal(torch.stack((-distance / 16, -distance / 256)))


def test_alibi_counts_from_the_text_and_not_from_the_cache():
    # 2 sinks, then tokens 7 and 8 of a text of which 2 … 6 were dropped; the queries are 9 and 10.
    seen = Visibility(2, past=4, window=3, sinks=2, start=9)
    bias = ALiBi(n_head=1).bias(seen)  # slope 1/256
    expected = [[9, 8, 2, 1, 0, 0], [10, 9, 3, 2, 1, 0]]
    assert (bias.tile() * -256).int().tolist() == [expected]
    assert bias.tile(slice(1, 2), slice(1, 4)).equal(bias.tile()[:, 1:2, 1:4])


def test_neighbours_far_into_a_text_keep_their_difference():
    # slope · j alone, 2⁻⁸ · 10⁷ in float32, could not tell two neighbours apart.
    bias = ALiBi(n_head=1).bias(Visibility(3, past=5, start=10_000_000)).tile()
    assert (bias[0, 2] * -256).tolist() == [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]


# -- added to the input ------------------------------------------------------------------------------------------------


def test_sinusoidal_waves_by_hand():
    # Width 4, base 100: frequencies 1 and 1/10; sines, then cosines.
    waves = Sinusoidal(d_model=4, base=100.0).embed(range(2, 4))
    rows = [[math.sin(i), math.sin(i / 10), math.cos(i), math.cos(i / 10)] for i in (2, 3)]
    torch.testing.assert_close(waves, torch.tensor(rows))
    packed = Sinusoidal(d_model=4, base=100.0).embed(torch.tensor([[2, 3], [3, 2]]))
    assert packed.equal(torch.stack((waves, waves.flip(0))))


def test_an_odd_width_has_no_pairs_of_waves():
    with pytest.raises(UserError, match="d_model=5 is odd"):
        Sinusoidal(d_model=5)


@pytest.mark.parametrize("base", [0.0, -1.0, math.inf, math.nan])
def test_a_base_without_real_powers_is_refused_by_name(base):
    for make in (lambda: Sinusoidal(d_model=4, base=base), lambda: Rotary(head_dim=4, context=4, base=base)):
        with pytest.raises(UserError, match=f"position.base={base} "):
            make()


def test_a_learned_table_refuses_to_wrap_around():
    table = Learned(context=4, d_model=2)
    with torch.no_grad():
        table.table.copy_(normal(4, 2))
    assert table.embed(range(1, 4)).equal(table.table[1:])
    assert table.embed(torch.tensor([[0, 1, 0]]))[0].equal(table.table[[0, 1, 0]])
    with pytest.raises(UserError, match="knows 4 positions and was asked for 5"):
        table.embed(range(4, 5))


def test_no_position_adds_nothing_anywhere():
    nothing = NoPosition()
    assert nothing.embed(range(3)) is None and nothing.rotation(range(3)) is None
    assert nothing.bias(Visibility(3)) is None

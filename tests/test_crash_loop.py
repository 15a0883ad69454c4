"""The short form of tests/crash_loop.py."""

import pytest

from tests.crash_loop import crash_loop, equal


@pytest.mark.slow
def test_a_run_killed_at_four_random_instants_is_in_the_end_the_run_that_nobody_killed(tmp_path):
    met = crash_loop(tmp_path, kills=4, seed=1, say=lambda line: None)
    assert met["kills"] == 4


def test_the_comparison_sees_one_bit():
    import torch

    one = torch.ones(2)
    assert equal({"a": [one, 1]}, {"a": [one.clone(), 1]})
    assert not equal({"a": [one, 1]}, {"a": [torch.nextafter(one, 2 * one), 1]})
    assert not equal({"a": 1}, {"b": 1}) and not equal([1], [1, 2])

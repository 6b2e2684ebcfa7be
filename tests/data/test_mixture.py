"""Mixtures have the weights' shares, and every source's elements come in order, each once."""

from collections import Counter

import pytest

from jaxpar.data.mixture import integer_shares, locate


@pytest.mark.parametrize("shares", [(1,), (1, 1), (7, 3), (5, 1, 2, 9), (1, 1000)])
def test_shares_are_exact(shares):
    period = sum(shares)
    picks = [locate(k, shares) for k in range(3 * period)]
    counts = [0] * len(shares)
    for k, (source, element) in enumerate(picks, start=1):
        assert element == counts[source]
        counts[source] += 1
        assert all(abs(counts[i] - k * share / period) <= len(shares) for i, share in enumerate(shares))
        if k % period == 0:
            assert counts == [share * k // period for share in shares]


def test_far_elements_cost_no_walk():
    shares = integer_shares([0.123456, 2.5, 1e-3])
    start = 10**15
    observed = Counter(locate(k, shares)[0] for k in range(start, start + 20_000))
    for source, share in enumerate(shares):
        assert observed[source] / 20_000 == pytest.approx(share / sum(shares), abs=3 / 20_000)


def test_weights_are_taken_as_written():
    assert integer_shares([0.7, 0.3]) == (7, 3)
    assert integer_shares([2, 4]) == (1, 2)
    assert integer_shares([1e-05, 1.0]) == (1, 100_000)
    with pytest.raises(ValueError, match=r"data\.sources\[1\]\.weight=inf must be a finite number"):
        integer_shares([1.0, float("inf")])

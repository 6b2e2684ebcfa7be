"""Mixtures of sources: which source gives the k-th sequence, for any k, without a random draw."""

import math
from collections.abc import Sequence
from fractions import Fraction

__all__ = ["integer_shares", "locate"]


def integer_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in the same proportions, exact for the decimals as written.

    >>> integer_shares([0.7, 0.3])
    (7, 3)

    Raises:
      ValueError: a weight is not finite.
    """
    for index, weight in enumerate(weights):
        if not math.isfinite(weight):
            raise ValueError(f"data.sources[{index}].weight={weight} must be a finite number")
    fractions = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    shares = [int(fraction * scale) for fraction in fractions]
    divisor = math.gcd(*shares)
    return tuple(share // divisor for share in shares)


def locate(index: int, shares: Sequence[int]) -> tuple[int, int]:
    """Return the source of element `index` of a mixture, and which of that source's elements it is.

    Sources are taken off one at a time. Of the first k elements, rest(k) = floor(k · R / (p + R)) belong to the sources
    after the one with share p, where R is the sum of their shares. Element k is a later source's if
    rest(k + 1) > rest(k); it is then their element rest(k). Otherwise it is element k - rest(k) of this source.
    A source has come up k · p / sum(shares) times among the first k, to within the number of sources, and exactly so
    at multiples of sum(shares).

    >>> [locate(k, [2, 1]) for k in range(4)]
    [(0, 0), (0, 1), (1, 0), (0, 2)]
    """
    remaining = sum(shares)
    for source, share in enumerate(shares):
        later = remaining - share
        rest = index * later // remaining
        if (index + 1) * later // remaining == rest:
            return source, index - rest
        index, remaining = rest, later
    raise AssertionError("the last source takes every element that is left")

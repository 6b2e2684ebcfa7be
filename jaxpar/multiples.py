"""Legal values near an illegal one, for messages."""

__all__ = ["nearest_multiples"]


def nearest_multiples(value: int, factor: int) -> str:
    """The multiples of `factor` just below and above `value`, which is none; 0 is left out.

    >>> nearest_multiples(10, 4), nearest_multiples(3, 4)
    ('8, 12', '4')
    """
    below = value - value % factor
    return ", ".join(str(number) for number in (below, below + factor) if number)

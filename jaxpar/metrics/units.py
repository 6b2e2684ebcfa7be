"""Numbers with their units, for people."""

__all__ = ["with_unit"]


def with_unit(num_bytes: float) -> str:
    """Bytes in the largest unit that leaves a number of at least 1.

    >>> with_unit(100), with_unit(3 * 2**20)
    ('100 B', '3.0 MiB')
    """
    value = num_bytes
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} GiB"

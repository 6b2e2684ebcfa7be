"""What an array of the state is in every layout, and how a layout departs from that.

A layout may pad the vocabulary, and a pipeline lays the layers of a stack in the order of its stages, with rows that
have no layer where stages differ in size. Digests and whatever reads a checkpoint go by what all layouts share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpar.parallel.pipeline.partition import EMPTY

__all__ = ["Extent", "as_slice"]


@dataclass(frozen=True)
class Extent:
    """`shape`: of the array in every layout, without padding; its first dim counts layers in the model's order, if it
    is a stack of them.

    `rows`: the layer that each row of the array (an entry along its first dim) has in one layout, or EMPTY; nothing
    where row i has entry i, which goes for every array that is no stack.

    Raises:
      ValueError: the rows are not all layers, each once.
    """

    shape: tuple[int, ...]
    rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.rows and sorted(row for row in self.rows if row != EMPTY) != list(range(*self.shape[:1])):
            raise ValueError(f"rows {self.rows} do not have each layer of an array {self.shape} once")

    @property
    def laid_out(self) -> tuple[int, ...]:
        """The shape with a place for every row, still without padding.

        >>> Extent((3, 5), rows=(0, 1, 2, EMPTY)).laid_out
        (4, 5)
        """
        return (len(self.rows), *self.shape[1:]) if self.rows else self.shape

    def padding(self, shape: Sequence[int]) -> tuple[int, ...]:
        """How much an array of this shape, as it lies, is padded along each dim."""
        return tuple(size - own for size, own in zip(shape, self.laid_out, strict=True))

    def rows_of(self, layers: np.ndarray) -> np.ndarray:
        """The rows that have these layers.

        >>> Extent((3, 5), rows=(1, EMPTY, 0, 2)).rows_of(np.array([0, 1, 2])).tolist()
        [2, 0, 3]
        """
        return np.asarray([self.rows.index(layer) for layer in layers] if self.rows else layers, np.int64)


def as_slice(places: np.ndarray) -> slice | np.ndarray:
    """Places along a dim, as a slice if they follow on each other, which TensorStore reads in half the time.

    >>> as_slice(np.array([2, 3, 4])), as_slice(np.array([2, 4])), as_slice(np.array([], int))
    (slice(2, 5, None), array([2, 4]), slice(0, 0, None))
    """
    first = int(places[0]) if places.size else 0
    return slice(first, first + places.size) if (np.diff(places) == 1).all() else places

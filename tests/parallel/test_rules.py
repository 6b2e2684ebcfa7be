"""The resolver: layouts with their reasons, and every refusal."""

import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.parallel.rules import resolve

TABLE = {
    "vocab": ("tensor",), "heads": ("tensor",), "embed": ("fsdp",), "batch": ("data", "fsdp"), "layers": (),
    "twice": ("tensor", "tensor"),
}  # fmt: skip
MESH = {"data": 2, "fsdp": 2, "tensor": 4, "context": 1}


@pytest.mark.parametrize(
    ("shape", "axes", "spec", "local_shape", "reason"),
    [
        ((8, 6), ("vocab", "embed"), P("tensor", "fsdp"), (2, 3), "vocab → tensor, embed → fsdp"),
        ((3, 6, 7), ("layers", "embed", None), P(None, "fsdp"), (3, 3, 7), "embed → fsdp"),
        ((8, 5), ("batch", None), P(("data", "fsdp")), (2, 5), "batch → data+fsdp"),
        ((3, 2), ("layers", None), P(), (3, 2), "replicated: no rule splits layers"),
        ((), (), P(), (), "replicated: no rule splits a scalar"),
    ],
)
def test_layouts_say_why(shape: tuple, axes: tuple, spec: P, local_shape: tuple, reason: str) -> None:
    resolved = resolve("a/path", shape, axes, TABLE, MESH)
    assert (resolved.spec, resolved.local_shape, resolved.reason) == (spec, local_shape, reason)


def test_an_axis_of_size_1_is_left_out_and_named_as_the_reason() -> None:
    resolved = resolve("a/path", (7, 6), ("vocab", "embed"), TABLE, MESH | {"tensor": 1, "fsdp": 1})
    assert resolved.spec == P()
    assert resolved.reason == "replicated: fsdp, tensor of size 1"


@pytest.mark.parametrize(
    ("shape", "axes", "message"),
    [
        ((8,), ("vocab", "embed"), r"2 logical axes \('vocab', 'embed'\) for 1 dims \(8,\)"),
        (
            (8, 4),
            ("vocab", "embd"),
            "unknown logical axis 'embd'; the rules know batch, embed, heads, layers, twice, vocab",
        ),
        ((8, 4), ("tensor", None), "unknown logical axis 'tensor'; .*"),
        ((8, 4), ("vocab", "heads"), "mesh axis 'tensor' is used twice, by logical axes 'vocab' and 'heads' of .*"),
        ((8, 4), ("batch", "embed"), "mesh axis 'fsdp' is used twice, by logical axes 'batch' and 'embed' of .*"),
        ((16,), ("twice",), "mesh axis 'tensor' is used twice, by logical axes 'twice' and 'twice' of .*"),
        ((10,), ("vocab",), "dim 'vocab' of size 10 does not divide over tensor = 4; nearest legal sizes: 8, 12"),
        ((3,), ("batch",), "dim 'batch' of size 3 does not divide over data × fsdp = 4; nearest legal sizes: 4"),
    ],
)  # fmt: skip
def test_what_cannot_be_laid_out_is_refused(shape: tuple, axes: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=f"^a/path: {message}$"):
        resolve("a/path", shape, axes, TABLE, MESH)

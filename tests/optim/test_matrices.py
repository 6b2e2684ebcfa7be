"""How parameters are seen as matrices, and logical axes of an optimizer's state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config.optimizers import SM3, Adafactor, AdamW, AdamW8bit
from jaxpar.optim import make_optimizer, state_axes
from jaxpar.optim.matrices import from_matrix, matrix_view, to_matrix


@pytest.mark.parametrize(
    ("path", "axes", "shape", "matrix_shape", "names"),
    [
        ("query", ("embed", "heads", "head_dim"), (2, 3, 4), (2, 12), ("embed", "heads")),
        ("output", ("heads", "head_dim", "embed"), (3, 4, 2), (12, 2), ("heads", "embed")),
        ("up", ("expert", "embed", "mlp"), (3, 2, 5), (15, 2), ("expert", "embed")),
        ("wide", ("expert", "embed", "heads", "head_dim"), (3, 2, 5, 4), (60, 2), ("expert", "embed")),
        ("down", ("mlp", "embed"), (5, 2), (5, 2), ("mlp", "embed")),
        ("table", ("vocab", "embed"), (7, 2), (7, 2), ("vocab", "embed")),
        ("own", ("in", "out", None), (2, 3, 4), (2, 12), ("in", "out")),
    ],
)
def test_embed_is_one_side_of_a_matrix(path: str, axes: tuple, shape: tuple, matrix_shape: tuple, names: tuple) -> None:
    view = matrix_view(path, axes)
    assert view is not None
    assert (view.row_axis, view.column_axis) == names
    array = jnp.arange(np.prod(shape)).reshape(shape)
    matrix = to_matrix(array, view)
    assert matrix.shape == matrix_shape
    np.testing.assert_array_equal(from_matrix(matrix, view, shape), array)
    embed = axes.index("embed") if "embed" in axes else 0
    # Along the other side, embed stands still: each row (or column) is what has one index of embed.
    side = matrix if matrix_shape[0] == shape[embed] and embed == 0 else matrix.T
    np.testing.assert_array_equal(side, jnp.moveaxis(array, embed, 0).reshape(shape[embed], -1))


@pytest.mark.parametrize(
    ("path", "axes"), [("norm/scale", ("norm",)), ("query_bias", ("heads", "head_dim")), ("mlp/bias", ("embed", "mlp"))]
)
def test_vectors_and_biases_are_no_matrices(path: str, axes: tuple) -> None:
    assert matrix_view(path, axes) is None


# Dims of equal size: names cannot be guessed from shapes.
AXES = {
    "blocks/output": ("layers", "heads", "head_dim", "embed"),
    "blocks/query": ("layers", "embed", "heads", "head_dim"),
    "blocks/query_bias": ("layers", "heads", "head_dim"),
    "square": ("mlp", "embed"),
}
SHAPES = {"blocks/output": (4, 4, 4, 16), "blocks/query": (4, 16, 4, 4), "blocks/query_bias": (4, 4, 4),
          "square": (16, 16)}  # fmt: skip
MIRRORED = [AXES["blocks/output"], AXES["blocks/query"], AXES["blocks/query_bias"], AXES["square"]]


@pytest.mark.parametrize(
    ("config", "roles", "expected"),
    [
        (AdamW(), ["first", "second", "master"], [[axes] * 3 for axes in MIRRORED]),
        (
            AdamW8bit(min_size=64, block_size=3),
            ["first_codes", "first_scales", "second_codes", "second_scales", "master"],
            [[axes] * 5 for axes in MIRRORED[:2]] + [MIRRORED[2:3] * 3] + [[MIRRORED[3]] * 5],
        ),
        (
            SM3(),
            ["first", "rows", "columns", "master"],
            [
                [MIRRORED[0], ("layers", "heads"), ("layers", "embed"), MIRRORED[0]],
                [MIRRORED[1], ("layers", "embed"), ("layers", "heads"), MIRRORED[1]],
                MIRRORED[2:3] * 3,
                [MIRRORED[3], ("mlp",), ("embed",), MIRRORED[3]],
            ],
        ),
        (
            Adafactor(min_dim_size_to_factor=4),
            ["rows", "columns", "master"],
            [
                [("layers", "heads"), ("layers", "embed"), MIRRORED[0]],
                [("layers", "embed"), ("layers", "heads"), MIRRORED[1]],
                MIRRORED[2:3] * 2,
                [("mlp",), ("embed",), MIRRORED[3]],
            ],
        ),
    ],
    ids=["adamw", "adamw8bit", "sm3", "adafactor"],
)
def test_every_array_of_the_state_has_names(config, roles: list, expected: list) -> None:
    params = {"blocks": {path[7:]: jax.ShapeDtypeStruct(SHAPES[path], jnp.bfloat16) for path in list(AXES)[:3]}}
    params["square"] = jax.ShapeDtypeStruct(SHAPES["square"], jnp.bfloat16)
    optimizer = make_optimizer(config, lambda count: 0.1, AXES, seed=0, master_weights=True)
    abstract = jax.eval_shape(optimizer.init, params)
    axes = state_axes(abstract, params, AXES)
    assert axes["count"] == ()
    found = [*axes["arrays"]["blocks"].values(), axes["arrays"]["square"]]
    for path, kept, names in zip(AXES, found, expected, strict=True):
        vector = {3: ["first", "second", "master"], 2: ["second", "master"]}[len(names)] if "bias" in path else roles
        assert kept == dict(zip(vector, names, strict=True)), path
    jax.tree.map(lambda leaf, names: leaf.shape[len(names) :] == () or pytest.fail(str(leaf)), abstract, axes)

"""Which parameters decay, what is refused, and how layers are mapped."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config.optimizers import SGD, SM3, Adafactor, AdamW, AdamW8bit, Muon
from jaxpar.config.schema import ConstantSchedule, CosineSchedule
from jaxpar.optim import AT_ONCE, PROPERTIES, check_optimizer, make_optimizer, role_axes
from jaxpar.optim.build import decays
from jaxpar.optim.properties import state_arrays

AXES = {
    "blocks/attention/query": ("layers", "embed", "heads", "head_dim"),
    "blocks/attention/query_bias": ("layers", "heads", "head_dim"),
    "blocks/norm/scale": ("layers", "vector"),
    "embedding/table": ("vocab", "embed"),
    "final_norm/scale": ("vector",),
}


@pytest.mark.parametrize(
    ("no_decay", "decaying"),
    [
        ((), {"blocks/attention/query", "embedding/table"}),
        (("embedding/*",), {"blocks/attention/query"}),
        (("*/query", "final_norm/scale"), {"embedding/table"}),
    ],
)
def test_matrices_decay_and_biases_norms_and_named_parameters_do_not(no_decay: tuple, decaying: set) -> None:
    assert {path for path, axes in AXES.items() if decays(path, axes, no_decay)} == decaying


@pytest.mark.parametrize("kind", PROPERTIES, ids=lambda kind: kind.__name__)
def test_a_pattern_that_matches_nothing_is_refused(kind: Any) -> None:
    message = r"^optimizer.no_decay: 'embed/\*' matches no parameter; there are: blocks/attention/query, "
    config = kind(no_decay=("embed/*",))
    with pytest.raises(ValueError, match=message):
        make_optimizer(config, lambda count: 0.1, AXES, seed=0)
    with pytest.raises(ValueError, match=message):
        check_optimizer(config, ConstantSchedule(), AXES)


def test_layer_decay_needs_layers() -> None:
    with pytest.raises(ValueError, match=r"^optimizer.layer_decay=0.9: the model has no layers, .*layer_decay=1.0$"):
        check_optimizer(AdamW(layer_decay=0.9), CosineSchedule(), {"table": ("vocab", "embed")})


def test_relative_steps_need_a_constant_schedule() -> None:
    check_optimizer(Adafactor(relative_step=True), ConstantSchedule(warmup_steps=10), AXES)
    check_optimizer(Adafactor(), CosineSchedule(), AXES)
    message = (
        r'^optimizer.relative_step=true sets the learning rate of each step, which schedule.name="cosine" would set '
        r'too; set schedule.name="constant" \(its warmup may stay\), or optimizer.relative_step=false$'
    )
    with pytest.raises(ValueError, match=message):
        check_optimizer(Adafactor(relative_step=True), CosineSchedule(), AXES)


@pytest.mark.parametrize("kind", PROPERTIES, ids=lambda kind: kind.__name__)
def test_without_a_gradient_nothing_moves(kind: Any) -> None:
    """Rows of an embedding whose tokens have not come yet; 0/0 is 0."""
    optimizer = make_optimizer(kind(weight_decay=0.0), lambda count: 0.1, {"table": ("embed", "mlp")}, seed=0)
    start = {"table": jnp.ones((128, 128))}
    gradient = {"table": jnp.zeros((128, 128))}
    params, state = jax.jit(optimizer.apply)(gradient, optimizer.init(start), start)
    np.testing.assert_array_equal(params["table"], start["table"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


STACKED = {"blocks/up": ("layers", "embed", "mlp"), "table": ("vocab", "embed")}


@pytest.mark.parametrize(
    "config",
    [AdamW(moments="bfloat16", layer_decay=0.5), AdamW8bit(min_size=8, block_size=4), Muon(),
     Adafactor(min_dim_size_to_factor=4)],
    ids=lambda config: config.name,
)  # fmt: skip
def test_layers_may_be_mapped_one_at_a_time(config: Any) -> None:
    random = np.random.default_rng(0)
    params, grads = (
        {"blocks": {"up": jnp.asarray(random.normal(size=(3, 4, 6)), dtype)},
         "table": jnp.asarray(random.normal(size=(5, 4)), dtype)}
        for dtype in (jnp.bfloat16, jnp.float32)
    )  # fmt: skip
    ends, calls = [], []

    def one_at_a_time(update: Any, shared: Any, layers: jax.Array, *stacked: Any) -> Any:
        """A loop over layers, as one that moves each layer's state would be."""
        calls.append((layers.shape, jax.tree.map(jnp.shape, stacked[2])))
        return jax.lax.scan(lambda _, layer: (None, update(shared, *layer)), None, (layers, *stacked))[1]

    for options in ({}, {"map_updates": AT_ONCE._replace(layers=one_at_a_time)}):
        optimizer = make_optimizer(config, lambda count: 0.1, STACKED, seed=0, rounding="stochastic", **options)
        new, state = params, optimizer.init(params)
        assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(state["arrays"]["blocks"]))
        for _ in range(2):
            new, state = jax.jit(optimizer.apply)(grads, state, new)
        ends.append(jax.device_get((new, state)))
    assert calls == [((3,), {"blocks/up": (3, 4, 6)})]
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=1e-5, atol=1e-5)


def test_stacks_of_different_depth_have_layers_of_their_own() -> None:
    """Each stack's last layer counts as the last one; a table comes before the deepest stack."""
    axes = {"decoder/up": ("layers", "embed"), "encoder/up": ("layers", "embed"), "head": ("embed", "vocab"),
            "positions": ("positions", "embed"), "table": ("vocab", "embed")}  # fmt: skip
    shapes = {"decoder": {"up": (2, 4)}, "encoder": {"up": (3, 4)}, "head": (4, 5), "positions": (6, 4),
              "table": (5, 4)}  # fmt: skip
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda shape: isinstance(shape, tuple))
    config = SGD(momentum=0.0, weight_decay=0.0, layer_decay=0.5)
    optimizer = make_optimizer(config, lambda count: 1.0, axes, seed=0)
    new, _ = optimizer.apply(jax.tree.map(lambda leaf: leaf - 1.0, params), optimizer.init(params), params)
    np.testing.assert_allclose(new["decoder"]["up"][:, 0], [0.25, 0.5])
    np.testing.assert_allclose(new["encoder"]["up"][:, 0], [0.125, 0.25, 0.5])
    np.testing.assert_allclose([new[name][0, 0] for name in ("head", "positions", "table")], [1.0, 0.0625, 0.0625])


def test_the_rate_is_that_after_the_updates_already_made() -> None:
    optimizer = make_optimizer(SGD(momentum=0.0), lambda count: 10.0**-count, {"w": ("norm",)}, seed=0)
    params, state = {"w": jnp.zeros(1)}, optimizer.init({"w": jnp.zeros(1)})
    for count, expected in enumerate((1.0, 1.1, 1.11)):
        assert state["count"] == count
        params, state = optimizer.apply({"w": -jnp.ones(1)}, state, params)
        np.testing.assert_allclose(params["w"], expected, rtol=1e-6)


@pytest.mark.parametrize("config", [Muon(), Adafactor(), SM3(), AdamW8bit(min_size=1)], ids=lambda config: config.name)
def test_every_expert_is_a_matrix_of_its_own(config: Any) -> None:
    """Steps of a stack of experts are those of each alone, and so is the state."""
    axes = ("embed", "mlp")
    random = np.random.default_rng(0)
    weights, gradients = random.normal(size=(2, 2, 3, 130, 140)).astype(np.float32)

    def stepped(axes: tuple, weights: np.ndarray, gradients: np.ndarray) -> tuple[Any, Any]:
        optimizer = make_optimizer(config, lambda count: 0.1, {"up": axes}, seed=0)
        state = optimizer.init({"up": jnp.asarray(weights)})
        params, state = optimizer.apply({"up": jnp.asarray(gradients)}, state, {"up": jnp.asarray(weights)})
        return params["up"], state["arrays"]["up"]

    found, kept = stepped(("layers", "experts", *axes), weights, gradients)
    for layer in range(2):
        for expert in range(3):
            alone, own = stepped(axes, weights[layer, expert], gradients[layer, expert])
            np.testing.assert_allclose(found[layer, expert], alone, atol=2e-5)
            for role, array in own.items():
                np.testing.assert_allclose(np.asarray(kept[role][layer, expert], np.float32), array, atol=1e-4)
    shapes = {role: array.shape for role, array in kept.items()}
    kept_axes = ("layers", "experts", *axes)
    assert shapes == {
        role: array.shape for role, array in state_arrays(config, "up", kept_axes, (2, 3, 130, 140)).items()
    }
    for role, shape in shapes.items():
        assert role_axes(role, "up", kept_axes)[:2] == ("layers", "experts")
        assert len(role_axes(role, "up", kept_axes)) == len(shape)


def test_a_bias_moves_by_the_sign_of_its_load_whatever_the_learning_rate() -> None:
    axes = {"balance_bias": ("layers", "router")}
    optimizer = make_optimizer(AdamW(), lambda count: 123.0, axes, seed=0, balance_rates={"balance_bias": 0.25})
    bias = {"balance_bias": jnp.ones((1, 3))}
    state = optimizer.init(bias)
    assert not jax.tree.leaves(state["arrays"])
    moved, _ = optimizer.apply({"balance_bias": jnp.array([[0.3, 0.0, -1e-4]])}, state, bias)
    np.testing.assert_allclose(moved["balance_bias"], [[0.75, 1.0, 1.25]])

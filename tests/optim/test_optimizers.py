"""Each optimizer against its paper's equations in NumPy (float64, a layer at a time), and split over a mesh against one
device."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from jaxpar.config.optimizers import SGD, SM3, Adafactor, AdamW, AdamW8bit, Lion, Muon, OptimizerConfig
from jaxpar.optim import learning_rates, make_optimizer, state_axes
from jaxpar.parallel.collectives import parse_collectives
from jaxpar.parallel.rules import resolve

NUM_STEPS = 4
SIZES = {
    "layers": 2, "vocab": 16, "embed": 8, "heads": 4, "kv_heads": 4, "head_dim": 4, "mlp": 12, "norm": 8,
}  # fmt: skip
AXES = {
    "blocks/attention/output": ("layers", "heads", "head_dim", "embed"),
    "blocks/attention/query": ("layers", "embed", "heads", "head_dim"),
    "blocks/attention/query_bias": ("layers", "heads", "head_dim"),
    "blocks/mlp/down": ("layers", "mlp", "embed"),
    "blocks/norm/scale": ("layers", "norm"),
    "embedding/table": ("vocab", "embed"),
    "head": ("embed", "vocab"),
    "norm/scale": ("norm",),
}
SHAPES = {path: tuple(SIZES[axis] for axis in axes) for path, axes in AXES.items()}
NUM_ROWS = {
    "blocks/attention/output": 16, "blocks/attention/query": 8, "blocks/mlp/down": 12, "embedding/table": 16, "head": 8,
}  # fmt: skip
# Everything that can be split is: rows and columns of every matrix lie on different devices.
SPLIT = {
    "layers": (), "vocab": ("tensor",), "embed": ("fsdp",), "heads": ("tensor",), "kv_heads": ("tensor",),
    "head_dim": (), "mlp": ("tensor",), "norm": (),
}  # fmt: skip
WHOLE = SPLIT | {"embed": ()}
TABLES = {"ZeRO-3": (SPLIT, SPLIT), "ZeRO-1": (WHOLE, SPLIT)}

CASES: dict[str, OptimizerConfig] = {
    "adamw": AdamW(beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.2, no_decay=("embedding/*",), layer_decay=0.7),
    "adamw bfloat16 stochastic": AdamW(moments="bfloat16"),
    "adamw bfloat16 nearest": AdamW(moments="bfloat16", moment_rounding="nearest"),
    "adamw8bit": AdamW8bit(block_size=6, min_size=64),
    "sgd": SGD(momentum=0.0),
    "sgd momentum": SGD(weight_decay=0.1),
    "sgd nesterov": SGD(nesterov=True),
    "adafactor": Adafactor(min_dim_size_to_factor=4, weight_decay=0.1, clipping_threshold=0.8),
    "adafactor T5": Adafactor(min_dim_size_to_factor=8, momentum=0.9, relative_step=True, learning_rate=0.6),
    "adafactor whole": Adafactor(min_dim_size_to_factor=9, parameter_scale=False),
    "sm3 I": SM3(variant="I", momentum=0.0),
    "sm3 II": SM3(weight_decay=0.1),
    "lion": Lion(),
    "muon": Muon(ns_steps=5),
    "muon without nesterov": Muon(ns_steps=3, nesterov=False, weight_decay=0.0, layer_decay=0.5),
}


def schedule(count: Any) -> Any:
    return 0.1 * (3.0 - 0.5 * count)


class Run(NamedTuple):
    """Parameters and state by path at the end, the state's arrays before that as jax arrays, and the jitted update."""

    params: dict[str, np.ndarray]
    state: dict[str, dict[str, np.ndarray]]
    on_devices: Any
    apply: Callable


def tree(values: dict[str, Any]) -> dict:
    nested: dict = {}
    for path, value in values.items():
        *parents, name = path.split("/")
        functools.reduce(lambda node, parent: node.setdefault(parent, {}), parents, nested)[name] = value
    return nested


def by_path(nested: dict) -> dict[str, Any]:
    found = {}
    for path in AXES:
        found[path] = functools.reduce(lambda node, key: node[key], path.split("/"), nested)
    return found


@functools.cache
def start() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {path: random.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()}


@functools.cache
def gradients(step: int) -> dict[str, np.ndarray]:
    """Normal, of another scale in each layer, so that statistics which mix layers would be wrong by far."""
    random = np.random.default_rng(step + 1)
    found = {}
    for path, shape in SHAPES.items():
        scales = np.reshape([1.0, 100.0], (2,) + (1,) * (len(shape) - 1)) if path.startswith("blocks") else 1.0
        found[path] = (random.normal(size=shape) * scales).astype(np.float32)
    return found


def place(mesh: Any, table: dict, leaf: Any, axes: tuple) -> NamedSharding:
    """The layout by the table; a dim that does not divide stays whole."""
    sizes = [math.prod(mesh.shape[axis] for axis in table[name]) for name in axes]
    axes = tuple(name if dim % size == 0 else None for name, dim, size in zip(axes, leaf.shape, sizes, strict=True))
    return NamedSharding(mesh, resolve("state", leaf.shape, axes, table, mesh.shape).spec)


@functools.cache
def run(name: str, layout: str = "one device") -> Run:
    optimizer = make_optimizer(CASES[name], schedule, AXES, seed=3)
    params = tree({path: jnp.asarray(value) for path, value in start().items()})
    if layout == "one device":
        init, apply = jax.jit(optimizer.init), jax.jit(optimizer.apply)
    else:
        mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
        abstract = jax.eval_shape(optimizer.init, params)
        axes = state_axes(abstract, params, AXES)
        of_params, of_state = (functools.partial(place, mesh, table) for table in TABLES[layout])
        param_shardings = jax.tree.map(of_params, params, tree(AXES))
        state_shardings = jax.tree.map(of_state, abstract, axes)
        init = jax.jit(optimizer.init, out_shardings=state_shardings)
        apply = jax.jit(
            optimizer.apply,
            in_shardings=(param_shardings, state_shardings, param_shardings),
            out_shardings=(param_shardings, state_shardings),
        )
        params = jax.device_put(params, param_shardings)
    state = init(params)
    for step in range(NUM_STEPS):
        params, state = apply(tree(gradients(step)), state, params)
    assert state["count"] == NUM_STEPS
    return Run(by_path(jax.device_get(params)), by_path(jax.device_get(state["arrays"])), (params, state), apply)


def assert_close(name: str, found: np.ndarray, wanted: np.ndarray, message: str) -> None:
    """At float32's precision, but for Muon: Newton-Schulz multiplies small singular values, and their errors."""
    relative, absolute = (1e-4, 1e-4) if name.startswith("muon") else (1e-5, 1e-6)
    wanted = np.asarray(wanted, np.float64)
    atol = absolute * np.abs(wanted).max()
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=relative, atol=atol, err_msg=message)


# The papers' equations. Each function gives the step of one layer's parameter, without the rate's sign, and keeps its
# state in `kept`. `t` counts from 1.


def adam_step(config: Any, kept: dict, g: np.ndarray, t: int, rate: float, prefix: str = "") -> np.ndarray:
    beta1, beta2 = getattr(config, f"{prefix}beta1"), getattr(config, f"{prefix}beta2")
    m = kept["first"] = beta1 * kept.get("first", 0.0) + (1 - beta1) * g
    v = kept["second"] = beta2 * kept.get("second", 0.0) + (1 - beta2) * g**2
    return rate * m / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + getattr(config, f"{prefix}epsilon"))


def adamw_step(config: Any, path: str, kept: dict, g: np.ndarray, w: np.ndarray, t: int, rate: float) -> np.ndarray:
    step = adam_step(config, kept, g, t, rate)
    if config.moments == "bfloat16":
        kept |= {role: np.float64(np.float32(m).astype(ml_dtypes.bfloat16)) for role, m in kept.items()}
    return step


def dynamic_codes(signed: bool) -> np.ndarray:
    """Dettmers 2022, figure 2: exponent zeros, an indicator bit, and a fraction that fills the byte."""
    bits = 7 if signed else 8
    values = [0.0, 1.0]
    for zeros in range(7):
        edges = np.linspace(0.1, 1.0, 2 ** (bits - 1 - zeros) + 1)
        values += list((edges[1:] + edges[:-1]) / 2 / 10**zeros)
    return np.array(sorted(values + ([-value for value in values[2:]] if signed else [])))


def through_8_bits(x: np.ndarray, block: int, signed: bool) -> np.ndarray:
    codes, out = dynamic_codes(signed), np.zeros_like(x)
    for index in np.ndindex(x.shape[:-1]):
        for first in range(0, x.shape[-1], block):
            part = x[index][first : first + block]
            scale = np.abs(part).max()
            nearest = codes[np.abs(part[:, None] / scale - codes[None, :]).argmin(1)] * scale
            if not signed:
                nearest = np.where((part > 0) & (nearest == 0), codes[1] * scale, nearest)
            out[index][first : first + block] = nearest
    return out


def adamw8bit_step(config: Any, path: str, kept: dict, g: np.ndarray, w: np.ndarray, t: int, rate: float) -> np.ndarray:
    step = adam_step(config, kept, g, t, rate)
    if g.size >= config.min_size:
        for role, signed in (("first", True), ("second", False)):
            kept[role] = through_8_bits(kept[role], config.block_size, signed)
    return step


def sgd_step(config: Any, path: str, kept: dict, g: np.ndarray, w: np.ndarray, t: int, rate: float) -> np.ndarray:
    if not config.momentum:
        return rate * g
    m = kept["first"] = config.momentum * kept.get("first", 0.0) + g
    return rate * (g + config.momentum * m if config.nesterov else m)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt((x**2).mean()))


def adafactor_step(config: Any, path: str, kept: dict, g: np.ndarray, w: np.ndarray, t: int, rate: float) -> np.ndarray:
    rate = min(rate, 1 / math.sqrt(t)) if config.relative_step else rate
    beta, squares = 1 - t**-config.decay_exponent, g**2 + config.epsilon
    matrix = squares.reshape(NUM_ROWS[path], -1) if path in NUM_ROWS else np.zeros((0, 0))
    if min(matrix.shape) >= config.min_dim_size_to_factor:
        rows = kept["rows"] = beta * kept.get("rows", 0.0) + (1 - beta) * matrix.mean(1)
        columns = kept["columns"] = beta * kept.get("columns", 0.0) + (1 - beta) * matrix.mean(0)
        second = (np.outer(rows, columns) / rows.mean()).reshape(g.shape)
    else:
        second = kept["second"] = beta * kept.get("second", 0.0) + (1 - beta) * squares
    update = g / np.sqrt(second)
    update /= max(1.0, rms(update) / config.clipping_threshold)
    update *= rate * (max(config.min_parameter_scale, rms(w)) if config.parameter_scale else 1.0)
    if config.momentum:
        update = kept["first"] = config.momentum * kept.get("first", 0.0) + (1 - config.momentum) * update
    return update


def sm3_step(config: Any, path: str, kept: dict, g: np.ndarray, w: np.ndarray, t: int, rate: float) -> np.ndarray:
    if path in NUM_ROWS:
        matrix = g.reshape(NUM_ROWS[path], -1)
        mu_rows, mu_columns = kept.get("rows", np.zeros(len(matrix))), kept.get("columns", np.zeros(matrix.shape[1]))
        nu = np.zeros_like(matrix)
        if config.variant == "I":
            mu_rows, mu_columns = mu_rows + (matrix**2).max(1), mu_columns + (matrix**2).max(0)
            for i, j in np.ndindex(matrix.shape):
                nu[i, j] = min(mu_rows[i], mu_columns[j])
        else:
            for i, j in np.ndindex(matrix.shape):
                nu[i, j] = min(mu_rows[i], mu_columns[j]) + matrix[i, j] ** 2
            mu_rows, mu_columns = nu.max(1), nu.max(0)
        kept |= {"rows": mu_rows, "columns": mu_columns}
        nu = nu.reshape(g.shape)
    else:
        nu = kept["second"] = kept.get("second", 0.0) + g**2
    direction = g / np.sqrt(nu)
    if config.momentum:
        direction = config.momentum * kept.get("first", 0.0) + (1 - config.momentum) * direction
        kept["first"] = direction
    return rate * direction


def lion_step(config: Any, path: str, kept: dict, g: np.ndarray, w: np.ndarray, t: int, rate: float) -> np.ndarray:
    m = kept.get("first", np.zeros_like(g))
    kept["first"] = config.beta2 * m + (1 - config.beta2) * g
    return rate * np.sign(config.beta1 * m + (1 - config.beta1) * g)


def newton_schulz(matrix: np.ndarray, num_steps: int) -> np.ndarray:
    x = matrix / np.linalg.norm(matrix)
    for _ in range(num_steps):
        squared = x @ x.T
        x = 3.4445 * x + (-4.7750 * squared + 2.0315 * squared @ squared) @ x
    return x


def muon_step(config: Any, path: str, kept: dict, g: np.ndarray, w: np.ndarray, t: int, rate: float) -> np.ndarray:
    if not path.startswith("blocks") or path not in NUM_ROWS:
        return adam_step(config, kept, g, t, rate, "adam_")
    m = kept["first"] = config.momentum * kept.get("first", 0.0) + (1 - config.momentum) * g
    ahead = config.momentum * m + (1 - config.momentum) * g if config.nesterov else m
    matrix = ahead.reshape(NUM_ROWS[path], -1)
    return rate * 0.2 * math.sqrt(max(matrix.shape)) * newton_schulz(matrix, config.ns_steps).reshape(g.shape)


STEPS = {
    "adamw": adamw_step, "adamw8bit": adamw8bit_step, "sgd": sgd_step, "adafactor": adafactor_step, "sm3": sm3_step,
    "lion": lion_step, "muon": muon_step,
}  # fmt: skip


def in_numpy(config: OptimizerConfig, path: str, layer: int | None) -> tuple[np.ndarray, dict]:
    """One layer's parameter and state after all steps, with weight decay and layer decay."""
    decay = config.weight_decay if path in NUM_ROWS and not (path == "embedding/table" and config.no_decay) else 0.0
    power = {"embedding/table": 3}.get(path, 0) if layer is None else 2 - layer
    part = ... if layer is None else layer
    w, kept = start()[path][part].astype(np.float64), {}
    for count in range(NUM_STEPS):
        g, rate = gradients(count)[path][part].astype(np.float64), schedule(count)
        step = STEPS[config.name](config, path, kept, g, w, count + 1, rate)
        used = min(rate, 1 / math.sqrt(count + 1)) if getattr(config, "relative_step", False) else rate
        w = w - config.layer_decay**power * (step + used * decay * w)
    return w, kept


@pytest.mark.parametrize("name", [name for name in CASES if "stochastic" not in name])
def test_steps_are_the_papers(name: str) -> None:
    found = run(name)
    for path in AXES:
        for layer in (0, 1) if path.startswith("blocks") else (None,):
            part = ... if layer is None else layer
            params, kept = in_numpy(CASES[name], path, layer)
            assert_close(name, found.params[path][part], params, f"{path} {layer}")
            for role, array in found.state[path].items():
                if "_" not in role:
                    assert_close("", array[part], kept[role], f"{path} {layer} {role}")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, "ZeRO-3") for name in CASES),
        *((kind, "ZeRO-1") for kind in ("adamw", "adamw8bit", "adafactor", "muon")),
    ],
)
def test_steps_on_a_mesh_are_those_of_one_device(name: str, layout: str) -> None:
    """Codes, and moments that are rounded at random, too: their bits are drawn for the logical shape."""
    one, many = run(name), run(name, layout)
    for path in AXES:
        assert_close(name, many.params[path], one.params[path], path)
        assert many.state[path].keys() == one.state[path].keys()
        for role, array in one.state[path].items():
            assert_close("", many.state[path][role], array, f"{path} {role}")


@pytest.mark.parametrize("name", ["adamw", "adamw bfloat16 stochastic", "sgd momentum", "lion"])
def test_steps_of_single_elements_need_no_communication(name: str) -> None:
    params, state = run(name, "ZeRO-3").on_devices
    program = run(name, "ZeRO-3").apply.lower(params, state, params).compile()
    assert not parse_collectives(program.as_text(), {"fsdp": 2, "tensor": 4})


@pytest.mark.parametrize("name", CASES)
def test_layers_do_not_mix(name: str) -> None:
    """Layer 0's step is bitwise the same whatever the gradients of layer 1 and of other parameters are."""
    params, state = run(name).on_devices
    steps = []
    for factor in (1.0, -1000.0):
        grads = {path: np.copy(value) for path, value in gradients(0).items()}
        for path in AXES:
            grads[path][1 if path.startswith("blocks") else ...] *= factor
        new_params, new_state = run(name).apply(tree(grads), state, params)
        steps.append((by_path(jax.device_get(new_params)), by_path(jax.device_get(new_state["arrays"]))))
    (params_before, state_before), (params_after, state_after) = steps
    for path in filter(lambda path: path.startswith("blocks"), AXES):
        np.testing.assert_array_equal(params_before[path][0], params_after[path][0])
        assert not np.array_equal(params_before[path][1], params_after[path][1])
        for role, array in state_before[path].items():
            np.testing.assert_array_equal(array[0], state_after[path][role][0])


def test_factored_statistics_are_those_of_the_whole_matrix_when_rows_and_columns_are_split() -> None:
    """A trap of sharded trainers: means over a device's own rows and columns."""
    _, state = run("adafactor", "ZeRO-3").on_devices
    query = state["arrays"]["blocks"]["attention"]["query"]
    assert query["rows"].sharding.spec == jax.P(None, "fsdp")
    assert query["columns"].sharding.spec == jax.P(None, "tensor")
    rows = columns = 0.0
    for t in range(1, NUM_STEPS + 1):
        squares = np.square(gradients(t - 1)["blocks/attention/query"], dtype=np.float64).reshape(2, 8, 16)
        beta = 1 - t**-0.8
        rows, columns = (
            beta * old + (1 - beta) * new for old, new in ((rows, squares.mean(2)), (columns, squares.mean(1)))
        )
    np.testing.assert_allclose(query["rows"], rows, rtol=1e-5)
    np.testing.assert_allclose(query["columns"], columns, rtol=1e-5)


def test_muons_steps_are_orthogonal_when_the_matrix_is_split() -> None:
    params, state = run("muon", "ZeRO-3").on_devices
    assert params["blocks"]["mlp"]["down"].sharding.spec == jax.P(None, "tensor", "fsdp")
    new, _ = run("muon", "ZeRO-3").apply(tree(gradients(0)), state, params)
    step = np.asarray(params["blocks"]["mlp"]["down"]) * (1 - 0.1 * schedule(NUM_STEPS)) - new["blocks"]["mlp"]["down"]
    for layer in (0, 1):
        singular_values = np.linalg.svd(step[layer], compute_uv=False) / (0.2 * math.sqrt(12) * schedule(NUM_STEPS))
        assert singular_values.min() > 0.6
        assert singular_values.max() < 1.3


def test_relative_steps_are_the_least_of_the_rate_and_the_inverse_root() -> None:
    rates = learning_rates(CASES["adafactor T5"], lambda count: 0.6)
    np.testing.assert_allclose([rates(count) for count in (0, 1, 3, 99)], [0.6, 0.6, 0.5, 0.1], rtol=1e-6)
    assert learning_rates(CASES["adafactor"], schedule) is schedule

"""The executor against plain differentiation of the same small model, which has an auxiliary loss in every layer."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpar.parallel.pipeline.catalogue import build_schedule, forward_schedule
from jaxpar.parallel.pipeline.executor import PipelineFunctions, pipeline_gradients, pipeline_sums
from jaxpar.parallel.pipeline.layer_loop import layer_loop
from jaxpar.parallel.pipeline.partition import in_rows, make_partition
from jaxpar.parallel.pipeline.routing import route
from jaxpar.parallel.pipeline.tick_loops import loops

NUM_LAYERS, WIDTH, NUM_MICROBATCHES, ROWS, LENGTH, VOCABULARY = 8, 8, 8, 2, 4, 11
WEIGHT, AUXILIARY_WEIGHT = 0.01, 1e-4


def layer(weights: Any, x: jax.Array, number: jax.Array) -> jax.Array:
    """Differs from layer to layer also by its number, so that a permuted one shows."""
    return x + jnp.tanh(x @ weights["kernel"] + weights["bias"][None, None]) * (1 + 0.1 * number)


def embed(shared: Any, item: Any) -> jax.Array:
    return jax.nn.one_hot(item["tokens"], VOCABULARY) @ shared["table"]


def head(shared: Any, x: jax.Array, item: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The table is used again, so that its gradient comes from two ranks."""
    logits = (x * shared["scale"][None, None]) @ shared["table"].T
    target = jnp.where(jax.nn.one_hot(item["targets"], VOCABULARY) > 0, logits, 0.0).sum(-1)
    loss = jnp.where(item["mask"], jax.nn.logsumexp(logits, -1) - target, 0.0).sum()
    return loss, {"loss": loss, "tokens": item["mask"].sum().astype(jnp.float32)}


def auxiliary_of(x: jax.Array, number: jax.Array) -> jax.Array:
    return jnp.square(x).sum() * (number + 1)


@cache
def model() -> tuple[Any, Any, Any]:
    """Weights of the layers, the others, and microbatches with unequal masks."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    stacked = {
        "kernel": 0.3 * jax.random.normal(next(keys), (NUM_LAYERS, WIDTH, WIDTH)),
        "bias": 0.3 * jax.random.normal(next(keys), (NUM_LAYERS, WIDTH)),
    }
    shared = {"table": jax.random.normal(next(keys), (VOCABULARY, WIDTH)), "scale": 1.1 * jnp.ones(WIDTH)}
    shape = (NUM_MICROBATCHES, ROWS, LENGTH)
    items = {
        "tokens": jax.random.randint(next(keys), shape, 0, VOCABULARY),
        "targets": jax.random.randint(next(keys), shape, 0, VOCABULARY),
        "mask": jax.random.uniform(next(keys), shape) < jnp.linspace(0.1, 0.9, NUM_MICROBATCHES)[:, None, None],
    }
    return stacked, shared, items


@cache
def expected() -> tuple[Any, Any, float, float]:
    """Gradients of stacked and shared weights, loss, auxiliary loss."""
    stacked, shared, items = model()

    def total(stacked: Any, shared: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        loss = auxiliary = jnp.zeros(())
        for microbatch in range(NUM_MICROBATCHES):
            item = jax.tree.map(lambda a, i=microbatch: a[i], items)
            x = embed(shared, item)
            for number in range(NUM_LAYERS):
                x = layer(jax.tree.map(lambda a, i=number: a[i], stacked), x, jnp.float32(number))
                auxiliary += auxiliary_of(x, jnp.float32(number))
            loss += head(shared, x, item)[0]
        return WEIGHT * loss + AUXILIARY_WEIGHT * auxiliary, (loss, auxiliary)

    gradients, (loss, auxiliary) = jax.jit(jax.grad(total, (0, 1), has_aux=True))(stacked, shared)
    return *gradients, float(loss), float(auxiliary)


def functions(partition: Any, is_split: bool) -> PipelineFunctions:
    starts = jnp.asarray(partition.starts)
    counts = jnp.asarray(partition.counts)

    def turn(stage: Any, carry: Any, item: Any) -> Any:
        place, weights = item
        number = (starts[stage] + place).astype(jnp.float32)
        x = layer(weights, carry[0], number)
        is_there = place < counts[stage]
        return jnp.where(is_there, x, carry[0]), carry[1] + jnp.where(is_there, auxiliary_of(x, number), 0.0)

    def layers(weights: Any, x: jax.Array, item: Any, stage: jax.Array) -> Any:
        carry, places = (x, jnp.zeros(())), jnp.arange(partition.rows_per_chunk)
        return layer_loop(turn, carry, places, weights, stage, split=is_split, unroll=False)

    return PipelineFunctions(embed, layers, head)


def on_mesh(program: Any, stacked: Any, shared: Any, items: Any) -> Any:
    """The program on 4 ranks of 2 devices that share the batch."""
    mesh = jax.make_mesh((4, 2), ("pipe", "data"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        stacked = jax.device_put(stacked, NamedSharding(mesh, PartitionSpec("pipe")))
        items = jax.device_put(items, NamedSharding(mesh, PartitionSpec(None, "data")))
        return jax.device_get(jax.jit(program)(stacked, shared, items))


CASES = {
    "aligned, sent while the next tick computes": ("1f1b_aligned", 2, (2, 2, 2, 2)),
    "aligned, a table of many runs": ("naive", 1, (2, 2, 2, 2)),
    "aligned, two chunks": ("interleaved_aligned", 1, (1,) * 8),
    "each rank its own, uneven": ("1f1b", 1, (1, 3, 2, 2)),
    "each rank its own, two chunks": ("interleaved", 1, (1,) * 8),
    "split backward, uneven": ("zb_h1", 1, (3, 2, 2, 1)),
    "split backward, chunks that run back": ("zb_v", 2, (1,) * 8),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_and_sums_are_those_of_the_whole_model(case: tuple[str, int, tuple[int, ...]]) -> None:
    name, hop, layers_per_stage = case
    schedule = build_schedule(name, 4, NUM_MICROBATCHES, len(layers_per_stage) // 4, hop=hop)
    partition = make_partition(schedule.geometry, layers_per_stage)
    program = partial(
        pipeline_gradients, functions(partition, schedule.geometry.split), route(schedule),
        weight=jnp.float32(WEIGHT), auxiliary_weights=jnp.float32(AUXILIARY_WEIGHT),
    )  # fmt: skip
    stacked, shared, items = model()
    found = on_mesh(program, jax.tree.map(lambda a: in_rows(a, partition.rows), stacked), shared, items)
    want_stacked, want_shared, loss, auxiliary = expected()
    for path, want in want_stacked.items():
        in_order = np.stack([found.stacked[path][partition.rows.index(number)] for number in range(NUM_LAYERS)])
        np.testing.assert_allclose(in_order, want, rtol=1e-5, atol=1e-6 * np.abs(want).max(), err_msg=path)
        empty = np.asarray(partition.rows) < 0
        assert not np.abs(found.stacked[path][empty]).any(), "a row without a layer has no gradient"
    for path, want in want_shared.items():
        np.testing.assert_allclose(found.shared[path], want, rtol=1e-5, atol=1e-6 * np.abs(want).max(), err_msg=path)
    np.testing.assert_allclose(found.sums["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(found.auxiliary, auxiliary, rtol=1e-5)
    assert found.sums["tokens"] == items["mask"].sum()


@pytest.mark.parametrize(("name", "num_chunks", "number"), [("1f1b", 1, 8), ("zb_v", 2, 2)])
def test_forwards_alone_give_the_same_sums(name: str, num_chunks: int, number: int) -> None:
    geometry = build_schedule(name, 4, 8, num_chunks).geometry
    partition = make_partition(geometry, (8 // (4 * num_chunks),) * (4 * num_chunks))
    program = partial(pipeline_sums, functions(partition, False), route(forward_schedule(geometry, number)))
    stacked, shared, items = model()
    merged = jax.tree.map(lambda a: a.reshape(number, -1, *a.shape[2:]), items)
    found = on_mesh(program, jax.tree.map(lambda a: in_rows(a, partition.rows), stacked), shared, merged)
    np.testing.assert_allclose(found["loss"], expected()[2], rtol=1e-5)
    assert found["tokens"] == items["mask"].sum()


def test_layers_that_change_the_shape_are_refused() -> None:
    schedule = build_schedule("gpipe", 4, 8)
    stacked, shared, items = model()
    wide = PipelineFunctions(embed, lambda w, x, item, stage: (x[..., :4], jnp.zeros(())), head)
    program = partial(
        pipeline_gradients, wide, route(schedule), weight=jnp.float32(1), auxiliary_weights=jnp.float32(0)
    )
    with pytest.raises(
        ValueError, match=r"embed gives float32\[2, 4, 8\], its layers float32\[2, 4, 4\]; what travels"
    ):
        on_mesh(program, stacked, shared, items)


@pytest.mark.parametrize("name", ["gpipe", "1f1b_aligned", "interleaved_aligned", "1f1b", "zb_h2"])
def test_the_compiled_program_does_not_grow_with_the_number_of_microbatches(name: str) -> None:
    chunks = 2 if name == "interleaved_aligned" else 1
    few, many = (len(loops(route(build_schedule(name, 4, number, chunks)))) for number in (8, 64))
    assert few == many <= 3

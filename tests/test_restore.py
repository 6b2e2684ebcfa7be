"""Layers are restored to the rows that have them now, from those that had them when they were saved."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpar.checkpoint import Checkpoints
from jaxpar.checkpoint_store import CheckpointStore, DamagedCheckpointError, Notes, Retention
from jaxpar.extent import Extent
from jaxpar.state import TrainState

NUM_LAYERS, VOCAB_SIZE = 6, 11
# Ranks that share the rows, rows, and places for the vocabulary.
LAYOUTS: dict[str, tuple[int, tuple[int, ...], int]] = {
    "unpipelined": (1, (), 12),
    "2 stages": (2, (0, 1, 2, 3, 4, 5), 11),
    "2 ranks of 3 chunks": (2, (0, 2, 4, 1, 3, 5), 16),
    "a vee": (2, (0, 1, -1, 5, -1, -1, 2, -1, -1, 3, 4, -1), 12),
    "4 uneven stages": (4, (0, -1, 1, 2, 3, -1, 4, 5), 14),
}
STEPS = {name: step for step, name in enumerate(LAYOUTS, start=1)}
RNG = np.random.default_rng(0)
BLOCKS = {
    "weight": RNG.normal(size=(NUM_LAYERS, 4, 6)).astype(np.float32),
    "norm": RNG.normal(size=(NUM_LAYERS, 6)).astype(jnp.bfloat16),
    "codes": RNG.integers(1, 255, size=(NUM_LAYERS, 4, 6)).astype(np.uint8),
}
TABLE = RNG.normal(size=(VOCAB_SIZE, 4)).astype(np.float32)


def _in_rows(layers: np.ndarray, rows: tuple[int, ...]) -> np.ndarray:
    """What a run has in rows without a layer is not what is restored to them."""
    return np.stack([layers[row] if row >= 0 else np.full_like(layers[0], 7) for row in rows]) if rows else layers


def _state(name: str) -> tuple[TrainState, dict[str, Extent]]:
    """Arrays split over pipe and tensor as the layout says, and over fsdp in between."""
    num_ranks, rows, size = LAYOUTS[name]
    devices = np.array(jax.devices(), dtype=object).reshape(num_ranks, -1, 2)
    mesh = Mesh(devices, ("pipe", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

    def place(array: Any, *axes: str | None) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    axes = {"weight": ("pipe", "fsdp" if num_ranks > 1 else None, "tensor"), "norm": ("pipe",), "codes": ("pipe", None)}
    params = {key: place(_in_rows(layers, rows), *axes[key]) for key, layers in BLOCKS.items()}
    table = np.pad(TABLE, ((0, size - VOCAB_SIZE), (0, 0)))
    state = TrainState(
        step=place(jnp.int32(STEPS[name])), params=params, optimizer={"table": place(table, None, "tensor")}
    )
    extents = {path: Extent(array.shape) for path, array in state.by_path().items()}
    extents |= {f"params/{key}": Extent(layers.shape, rows) for key, layers in BLOCKS.items()}
    return state, extents | {"optimizer/table": Extent(TABLE.shape)}


def _abstract(state: TrainState) -> TrainState:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def _notes(step: int) -> Notes:
    return Notes(
        step=step, config="", tokenizer="", data="", padded_vocab_size=12, num_updates=step, next_sequence=0, loss=None,
        saved_at="", events="", arrays={},
    )  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """One state as each of the layouts saves it."""
    checkpoints = Checkpoints(
        CheckpointStore(str(tmp_path_factory.mktemp("saved"))), Retention(len(LAYOUTS)), timeout_seconds=60
    )
    for name in LAYOUTS:
        state, extents = _state(name)
        checkpoints.save(state, _notes(STEPS[name]), extents)
        checkpoints.finish()
    return checkpoints


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_layers_are_found_wherever_they_lie(saved: Checkpoints, source: str, target: str) -> None:
    like, extents = _state(target)
    restored = saved.restore(saved.notes(STEPS[source]), _abstract(like), extents)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, like)
    rows = LAYOUTS[target][1] or tuple(range(NUM_LAYERS))
    for key, layers in BLOCKS.items():
        found = np.asarray(restored.params[key])
        assert found.dtype == layers.dtype
        for row, layer in enumerate(rows):
            expected = layers[layer] if layer >= 0 else np.zeros_like(layers[0])
            np.testing.assert_array_equal(found[row], expected, err_msg=f"{key}, row {row}")
    table = np.asarray(restored.optimizer["table"])
    np.testing.assert_array_equal(table[:VOCAB_SIZE], TABLE)
    assert not table[VOCAB_SIZE:].any()


def test_layers_in_other_rows_than_the_notes_say_are_damage(saved: Checkpoints) -> None:
    """Of two layers that have changed places every array is named."""
    state, extents = _state("2 ranks of 3 chunks")
    swapped = {
        path: Extent(extent.shape, (0, 4, 2, 1, 3, 5) if extent.rows else ()) for path, extent in extents.items()
    }
    notes = saved.notes(STEPS["2 ranks of 3 chunks"])
    changed = {path: replace(array, extent=swapped[path]) for path, array in notes.arrays.items()}
    with pytest.raises(DamagedCheckpointError, match=r"not what was saved: params/codes, params/norm, params/weight$"):
        saved.restore(replace(notes, arrays=changed), _abstract(state), extents)


def test_padding_that_has_changed_shows_where_it_is_as_wide_as_it_was(saved: Checkpoints) -> None:
    notes = saved.notes(STEPS["unpipelined"])
    changed = replace(notes.arrays["optimizer/table"], padding="0" * 16)
    notes = replace(notes, arrays={**notes.arrays, "optimizer/table": changed})
    state, extents = _state("a vee")
    with pytest.raises(DamagedCheckpointError, match=r"not what was saved: optimizer/table$"):
        saved.restore(notes, _abstract(state), extents)
    wider, extents = _state("4 uneven stages")
    saved.restore(notes, _abstract(wider), extents)


def test_stacks_of_another_depth_are_another_state(saved: Checkpoints) -> None:
    state, extents = _state("4 uneven stages")
    fewer = Extent((NUM_LAYERS - 1, 6), (0, -1, 1, 2, 3, -1, 4, -1))
    with pytest.raises(ValueError, match=r"params/norm: saved bfloat16\[6, 6\], now bfloat16\[5, 6\]"):
        saved.restore(saved.notes(STEPS["a vee"]), _abstract(state), extents | {"params/norm": fewer})


def test_a_process_reads_what_its_devices_hold(saved: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is read once, for those devices of a process that hold it, and of no other row anything."""
    import jaxpar.restore as restore

    read = []

    class Stored:
        """An array on storage that notes what is read of it."""

        def __init__(self, array: Any) -> None:
            self.shape, self._array = array.shape, array

        def __getitem__(self, place: tuple[Any, ...]) -> Any:
            found = self._array[place]
            read.append((np.arange(self.shape[0])[place[0]].tolist(), found.shape))
            return found

    state, extents = _state("4 uneven stages")
    leaf = state.params["weight"]
    own = {device: leaf.sharding.devices_indices_map(leaf.shape)[device] for device in jax.devices()[2:4]}
    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", lambda self, shape: own)
    then = saved.notes(STEPS["a vee"]).arrays["params/weight"].extent
    stored = saved.store.open_arrays(STEPS["a vee"], ["params/weight"])["params/weight"]
    restore._requested(Stored(stored), then, leaf, extents["params/weight"])  # type: ignore[arg-type]
    # The second rank has layers 1 and 2, in rows 1 and 6 of the vee; its two devices split the last dim.
    assert read == [([1, 6], (2, 4, 3))] * 2
    read.clear()
    restore._requested(Stored(stored), Extent(stored.shape), leaf, Extent(leaf.shape))  # type: ignore[arg-type]
    assert read == [([2, 3], (2, 4, 3))] * 2

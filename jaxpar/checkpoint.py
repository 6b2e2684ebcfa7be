"""Saves and restores the state of training with Orbax; a restored array goes straight to where the plan wants it."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from orbax.checkpoint import v1 as ocp

from jaxpar.state import TrainState

__all__ = ["Checkpoints"]


class Checkpoints:
    """The checkpoints of one run, in `directory`/<step>; the newest `keep` stay. Saving goes on while training does."""

    def __init__(self, directory: Path, *, keep: int):
        self._checkpointer = ocp.training.Checkpointer(
            directory.absolute(),
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )
        self._saved_step = self.newest_step

    @property
    def newest_step(self) -> int | None:
        """The step of the newest finished checkpoint."""
        newest = self._checkpointer.latest
        return None if newest is None else newest.step

    def save(self, step: int, state: TrainState, config_toml: str) -> None:
        """Starts to save the state after `step` updates, with the resolved configuration; waits for an earlier save."""
        if step == self._saved_step:
            return
        self._checkpointer.wait()
        self._checkpointer.save_checkpointables_async(
            step, {"state": _as_dict(state)}, force=True, custom_metadata={"config": config_toml}
        )
        self._saved_step = step

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state saved after `step` updates, with the shapes, formats and shardings of `abstract`."""
        loaded = self._checkpointer.load_checkpointables(step, {"state": _as_dict(abstract)})
        return TrainState(**loaded["state"])

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._checkpointer.wait()
        self._checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _as_dict(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "params": state.params, "optimizer": state.optimizer}

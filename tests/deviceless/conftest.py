"""Programs compiled for eight H100s that are not here: `make test-deviceless` installs the compiler that this needs.

The XLA of JAX's CUDA plugin compiles from a description of the GPU alone, without one and without a CUDA toolkit.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from jaxpar.config import parse_config
from jaxpar.inspect import compile_step
from jaxpar.parallel.collectives import parse_collectives
from jaxpar.plan import Plan, make_plan

VOCAB_SIZE = 2048
MODEL = {
    "name": "transformer", "num_layers": 4, "embed_dim": 512, "num_heads": 8, "head_dim": 64, "mlp_dim": 1024,
    "gated": False, "tied": False,
}  # fmt: skip


class Step:
    """A compiled step: `plan`, `text`, its collectives over one mesh axis, and its `memory` in bytes."""

    def __init__(self, plan: Plan, compiled: jax.stages.Compiled):
        self.plan = plan
        self.text = compiled.as_text() or ""
        self.memory = compiled.memory_analysis()

    def collectives(self, axis: str) -> dict[str, list[tuple[int, int]]]:
        """Kind → executions in a step and bytes of each collective over `axis` alone."""
        found: dict[str, list[tuple[int, int]]] = {}
        for collective in parse_collectives(self.text, self.plan.mesh.shape):
            if collective.axes == (axis,):
                assert collective.trip_count_known
                found.setdefault(collective.kind, []).append((collective.count, collective.payload_bytes))
        return found


@pytest.fixture(scope="session")
def gpus() -> list[jax.Device]:
    """Eight H100s of one host."""
    target = (Path(__file__).with_name("h100_target_config.txtpb")).read_text()
    return list(
        topologies.get_topology_desc(platform="cuda", topology_name="", target_config=target, topology="1x1x8").devices
    )


@pytest.fixture(scope="session")
def step(gpus: list[jax.Device]) -> Callable[..., Step]:
    """`step(options=..., parallel={...}, ...)`: the compiled step of a small Llama in bfloat16, with sections changed
    and options for the compiler."""

    def compiled(options: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Step:
        table = {
            "model": MODEL,
            "data": {"sequence_length": 256, "tokenizer": {"name": "bytes"}},
            "train": {"batch_size": 16},
            "precision": {"compute": "bfloat16"},
            "kernels": {"attention": "reference"},
        }
        table = table | {name: table.get(name, {}) | section for name, section in sections.items()}
        plan = make_plan(parse_config(table), gpus, VOCAB_SIZE)
        # The other tests' flags keep barriers, which the GPU's compiler does not know at the end.
        return Step(plan, compile_step(plan, {"xla_disable_hlo_passes": ""} | (options or {})))

    return compiled

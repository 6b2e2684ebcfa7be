"""Executions of real plans, by mesh."""

from collections.abc import Callable
from functools import cache

import jax
import pytest

from jaxpar.config import parse_config
from jaxpar.parallel.constrain import Execution
from jaxpar.plan import make_plan

ExecutionOn = Callable[..., Execution]


@pytest.fixture(scope="session")
def execution_on() -> ExecutionOn:
    """`execution_on(data=2, tensor=4, sequence_parallel=True)`: how a plan for that mesh executes."""

    @cache
    def on(*, data: int = 1, fsdp: int = 1, tensor: int = 1, sequence_parallel: bool = False) -> Execution:
        parallel = {"data": data, "fsdp": fsdp, "tensor": tensor, "sequence_parallel": sequence_parallel}
        model = {"name": "transformer", "num_heads": 2 * tensor, "embed_dim": 16 * tensor, "mlp_dim": 2 * tensor}
        table = {"model": model, "parallel": parallel, "data": {"sequence_length": 2 * tensor}}
        config = parse_config(table | {"train": {"batch_size": data * fsdp}})
        return make_plan(config, jax.devices()[: data * fsdp * tensor], 16).execution

    return on

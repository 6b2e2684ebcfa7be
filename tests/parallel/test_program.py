"""How often instructions run, and the memory table."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.parallel.program import executions, memory_table


def counts(text: str, opcode: str) -> list[int]:
    return [run.count for run in executions(text) if run.instruction.opcode == opcode]


def test_a_loop_runs_its_body_so_often_and_its_condition_once_more() -> None:
    text = """
%body (p: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  ROOT %sine = f32[] sine(%p)
}

%condition (q: f32[]) -> pred[] {
  %q = f32[] parameter(0)
  %cosine = f32[] cosine(%q)
  ROOT %compare = pred[] compare(%cosine, %q), direction=LT
}

ENTRY %main (x: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %while = f32[] while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"7"}}
}
"""
    assert counts(text, "sine") == [7]
    assert counts(text, "cosine") == [8]


def test_calls_of_one_computation_add_up_and_other_halves_of_asynchronous_pairs_do_not_count() -> None:
    text = """
%shared (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %sine = f32[8]{0} sine(%p)
}

%unused (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %tanh = f32[8]{0} tanh(%q)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %shared = f32[8]{0} call(%x), to_apply=%shared
  %fusion = f32[8]{0} fusion(%shared), kind=kLoop, calls=%shared, control-predecessors={%shared}
  %start = ((f32[8]{0}), f32[8]{0}, s32[]) async-start(%fusion), calls=%shared
  %update = ((f32[8]{0}), f32[8]{0}, s32[]) async-update(%start), calls=%shared
  ROOT %done = f32[8]{0} async-done(%update), calls=%shared
}
"""
    assert counts(text, "sine") == [3]
    assert counts(text, "tanh") == []


def test_reads_real_text_with_literals_of_every_kind() -> None:
    table = np.arange(6, dtype=np.float32).reshape(2, 3)

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope('odd "(" name'):
            return x @ table, jnp.isnan(x) | jnp.array([[True, False]])

    text = jax.jit(f).lower(jax.ShapeDtypeStruct((4, 2), jnp.float32)).compile().as_text()
    assert text is not None
    assert any(run.instruction.opcode == "constant" for run in executions(text))


def test_refuses_what_is_not_a_compiled_program() -> None:
    lowered = jax.jit(jnp.tanh).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).as_text()
    with pytest.raises(ValueError, match=r"no ENTRY computation; pass compiled\.as_text\(\)"):
        list(executions(lowered))
    with pytest.raises(ValueError, match="not an instruction of a compiled program: what is this"):
        list(executions("ENTRY %main (x: f32[]) -> f32[] {\n  what is this\n}\n"))


def test_memory_table_of_a_donating_program() -> None:
    def f(x: jax.Array, y: jax.Array, unused: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x + y, y * 2

    struct = jax.ShapeDtypeStruct((32, 8), jnp.float32)
    table = memory_table(jax.jit(f, donate_argnums=0).lower(struct, struct, struct).compile())
    outputs = table.pop("output_bytes")
    temporaries = table.pop("temp_bytes")
    assert table == {"argument_bytes": 2 * 1024, "alias_bytes": 1024, "generated_code_bytes": 0}
    assert 2 * 1024 <= outputs <= 2 * 1024 + 64  # and a table of pointers
    assert temporaries < 1024


def test_memory_table_shows_the_peak_off_cpu_and_what_lies_on_the_host() -> None:
    zero = {
        f"{place}{name}_size_in_bytes": 0
        for place in ("", "host_")
        for name in ("argument", "output", "temp", "alias", "generated_code")
    }
    analysis = SimpleNamespace(
        **zero | {"argument_size_in_bytes": 7, "host_argument_size_in_bytes": 5}, peak_memory_in_bytes=11
    )
    sharding = SimpleNamespace(device_set=[SimpleNamespace(platform="gpu")])
    compiled: Any = SimpleNamespace(
        memory_analysis=lambda: analysis, input_shardings=((sharding,), {}), output_shardings=sharding
    )
    assert memory_table(compiled) == {
        "argument_bytes": 7,
        "output_bytes": 0,
        "temp_bytes": 0,
        "alias_bytes": 0,
        "generated_code_bytes": 0,
        "host_argument_bytes": 5,
        "peak_bytes": 11,
    }


def test_memory_table_needs_an_analysis() -> None:
    compiled: Any = SimpleNamespace(memory_analysis=lambda: None)
    with pytest.raises(ValueError, match="this backend has no memory analysis of compiled programs"):
        memory_table(compiled)

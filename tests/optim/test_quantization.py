"""8-bit codes: what the paper says of their values, rounding to the nearest, and blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpar.optim.quantization import code_values, dequantized, num_blocks, quantized, zero_code
from jaxpar.parallel.collectives import parse_collectives


@pytest.mark.parametrize("signed", [True, False])
def test_256_values_rise_to_one_and_zero_is_among_them(signed: bool) -> None:
    values = code_values(signed=signed)
    assert values.dtype == np.float32
    assert len(values) == 256
    assert (np.diff(values) > 0).all()
    assert values[-1] == 1.0
    assert values[zero_code(signed=signed)] == 0.0
    if signed:
        np.testing.assert_array_equal(values[:127], -values[128:255][::-1])
        assert zero_code(signed=True) == 127
    else:
        assert zero_code(signed=False) == 0


@pytest.mark.parametrize(("signed", "bits"), [(True, 6), (False, 7)])
def test_a_decade_less_halves_the_values_in_it(signed: bool, bits: int) -> None:
    values = code_values(signed=signed)
    for decade in range(7):
        inside = values[(values > 0.1 * 10.0**-decade) & (values < 10.0**-decade)]
        assert len(inside) == 2 ** (bits - decade)
    assert values[values > 0].min() > 1e-7


@pytest.mark.parametrize("signed", [True, False])
def test_relative_errors_grow_with_the_decades(signed: bool) -> None:
    """Half of a part of the decade, 0.45·10^-e / 2^(b−e), against the value at the decade's lower end, 0.1·10^-e."""
    bits = 6 if signed else 7
    for decade in range(6):
        x = np.geomspace(0.1001 * 10.0**-decade, 0.999 * 10.0**-decade, 500).astype(np.float32)
        block = jnp.asarray(np.append(x, 1.0))
        back = np.asarray(dequantized(*quantized(block, 512, signed=signed), 512, signed=signed))[:-1]
        assert (np.abs(back - x) / x).max() <= 4.5 * 2.0 ** -(bits - decade)


@pytest.mark.parametrize("signed", [True, False])
def test_each_element_takes_the_nearest_value_of_its_block(signed: bool) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(3, 21)).astype(np.float32) * 10.0 ** random.uniform(-5, 3, size=(3, 21)).astype(np.float32)
    x = x if signed else np.abs(x)
    codes, scales = quantized(jnp.asarray(x), 8, signed=signed)
    assert (codes.shape, codes.dtype) == ((3, 21), jnp.uint8)
    assert (scales.shape, scales.dtype) == ((3, 3), jnp.float32)
    values = code_values(signed=signed).astype(np.float64)
    for row, column in np.ndindex(x.shape):
        block = x[row, column // 8 * 8 : column // 8 * 8 + 8]
        assert scales[row, column // 8] == np.abs(block).max()
        nearest = np.abs(values - np.float64(x[row, column]) / np.abs(block).max()).argmin()
        if not signed:
            nearest = max(nearest, 1)
        assert codes[row, column] == nearest
    back = dequantized(codes, scales, 8, signed=signed)
    np.testing.assert_allclose(back, values[codes] * np.repeat(scales, 8, axis=1)[:, :21], rtol=1e-6)


def test_a_block_of_zeros_stays_zero() -> None:
    for signed in (True, False):
        codes, scales = quantized(jnp.zeros(5), 4, signed=signed)
        np.testing.assert_array_equal(dequantized(codes, scales, 4, signed=signed), np.zeros(5))
        assert set(np.unique(codes)) == {zero_code(signed=signed)}


def test_a_second_moment_does_not_become_zero() -> None:
    """Adam would divide by its root."""
    x = jnp.array([1.0, 1e-12, 0.0])
    back = np.asarray(dequantized(*quantized(x, 3, signed=False), 3, signed=False))
    assert 0 < back[1] < 1e-6
    assert back[2] == 0.0


def test_a_last_block_may_be_shorter() -> None:
    assert [num_blocks(size, 256) for size in (1, 256, 257)] == [1, 1, 2]


def test_blocks_that_lie_on_one_device_need_no_communication() -> None:
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    x = jax.device_put(jax.random.normal(jax.random.key(0), (4, 32)), split)

    def there_and_back(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        codes, scales = quantized(x, 4, signed=True)
        return codes, scales, dequantized(codes, scales, 4, signed=True)

    program = jax.jit(there_and_back, out_shardings=split)
    assert not parse_collectives(program.lower(x).compile().as_text(), mesh.shape)
    for found, expected in zip(program(x), there_and_back(jax.device_get(x)), strict=True):
        np.testing.assert_array_equal(found, expected)

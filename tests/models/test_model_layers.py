"""The parts of a layer against numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.models import RopeScaling, TransformerConfig
from jaxpar.models.layers import Norm, dropout, rotary_angles, rotate


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norms_are_their_formulas_in_float32(kind: str, offset: bool, dtype: str) -> None:
    config = TransformerConfig(norm=kind, norm_unit_offset=offset, norm_epsilon=0.5, embed_dim=8)
    with nnx.use_eager_sharding(False):
        norm = Norm(config, 8, "vector")
    random = np.random.default_rng(0)
    x = (100.0 + random.normal(size=(2, 3, 8))).astype(dtype)  # a mean in bfloat16 would lose the difference
    exact = x.astype(np.float64) - (x.astype(np.float64).mean(-1, keepdims=True) if kind == "layernorm" else 0.0)
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + 0.5)
    tolerance = 2**-8 if dtype == "bfloat16" else 3e-5
    assert norm(jnp.asarray(x)).dtype == dtype
    np.testing.assert_allclose(np.asarray(norm(jnp.asarray(x)), np.float64), exact, rtol=tolerance, atol=tolerance)
    scale, bias = random.normal(size=8), random.normal(size=8)
    norm.scale[...] = jnp.asarray(scale, jnp.float32)
    if norm.bias is not None:
        norm.bias[...] = jnp.asarray(bias, jnp.float32)
    expected = (scale + offset) * exact + (bias if kind == "layernorm" else 0.0)
    got = np.asarray(norm(jnp.asarray(x)), np.float64)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=2 * tolerance)


def _published_llama_3_1_rule(frequencies: np.ndarray, factor: float, low: float, high: float, old: int) -> np.ndarray:
    """`apply_scaling` of Llama 3.1's reference code, as published with the model."""
    new = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < old / high:
            new.append(frequency)
        elif wavelength > old / low:
            new.append(frequency / factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            new.append((1 - smooth) * frequency / factor + smooth * frequency)
    return np.array(new)


@pytest.mark.parametrize("scaling", [None, RopeScaling(factor=8.0), RopeScaling(factor=32.0, low_frequency_factor=2.0)])
def test_rotary_frequencies_are_the_published_ones(scaling: RopeScaling | None) -> None:
    theta, width, positions = 500_000.0, 128, np.array([[0, 1, 7, 100]])
    frequencies = 1.0 / theta ** (np.arange(0, width, 2) / width)
    if scaling is not None:
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        plain = frequencies
        frequencies = _published_llama_3_1_rule(frequencies, scaling.factor, low, high, scaling.original_length)
        changed = plain / frequencies
        assert {1.0, scaling.factor} < set(changed.round(6)), "all three branches must be taken"
    cosines, sines = rotary_angles(jnp.asarray(positions), width, theta, scaling)
    angles = positions[..., None] * frequencies
    np.testing.assert_allclose(cosines, np.cos(angles), atol=3e-5)
    np.testing.assert_allclose(sines, np.sin(angles), atol=3e-5)
    # Relative, so that the slow waves, whose angles are tiny, count too.
    np.testing.assert_allclose(sines[:, 1], np.sin(frequencies)[None], rtol=1e-5)


def test_rotation_turns_pairs_and_scores_depend_on_distance_only() -> None:
    random = np.random.default_rng(0)
    q, k = random.normal(size=(2, 8)).astype(np.float32)
    heads = jnp.asarray(np.broadcast_to(np.stack([q, k])[None, None, :, None], (1, 10, 2, 1, 8)))
    turned = np.asarray(rotate(heads, *rotary_angles(jnp.arange(10)[None], 8, 100.0, None)))[0, :, :, 0]
    angle = 3 * 100.0 ** (-np.arange(0, 8, 2) / 8)
    by_hand = (q[:4] + 1j * q[4:]) * np.exp(1j * angle)  # halves, not neighbours, are a pair
    np.testing.assert_allclose(turned[3, 0], np.concatenate([by_hand.real, by_hand.imag]), rtol=1e-5, atol=1e-6)
    scores = turned[:, 0] @ turned[:, 1].T
    np.testing.assert_allclose(np.diagonal(scores, -2), scores[2, 0], rtol=1e-5)
    assert abs(scores[2, 0] - scores[0, 2]) > 1e-2


def test_dropout_zeroes_its_share_scales_the_rest_and_is_off_without_a_key() -> None:
    x, keys_B = jnp.ones((64, 64)), jax.random.split(jax.random.key(0), 64)
    assert dropout(x, 0.25, None) is x
    assert dropout(x, 0.0, keys_B) is x
    y = np.asarray(dropout(x, 0.25, keys_B))
    np.testing.assert_array_equal(dropout(x[8:24], 0.25, keys_B[8:24]), y[8:24])
    assert set(np.unique(y)) == {np.float32(0.0), np.float32(1 / 0.75)}
    assert (y == 0).mean() == pytest.approx(0.25, abs=0.03)
    assert dropout(x.astype(jnp.bfloat16), 0.25, keys_B).dtype == jnp.bfloat16

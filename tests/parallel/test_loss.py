"""Cross-entropy against a float64 formula on all logits: values, gradients, padding, chunks, meshes, memory."""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.parallel.loss import FactoredLogits, LossSettings, cross_entropy

B, T, D, VOCAB = 8, 8, 8, 13
EVERYTHING = {"z_loss": 0.1, "label_smoothing": 0.2}


class Case(NamedTuple):
    hidden: np.ndarray
    kernel: np.ndarray
    targets: np.ndarray
    mask: np.ndarray


def make_case(padded: int = 16, scale: float = 1.0) -> Case:
    """Random inputs; the padding's columns hold garbage that must not matter, masks differ much between sequences."""
    random = np.random.default_rng(0)
    kernel = random.normal(size=(D, padded)).astype(np.float32)
    kernel[:, VOCAB:] = 1e3
    mask = random.random((B, T)) < np.linspace(0.0, 1.0, B)[:, None]
    hidden = scale * random.normal(size=(B, T, D)).astype(np.float32)
    return Case(hidden.astype(np.float32), kernel, random.integers(0, VOCAB, (B, T)).astype(np.int32), mask)


def expected(
    case: Case, softcap: float | None = None, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> tuple[Any, ...]:
    """Loss, negative log-likelihood, and the loss's gradients, by the textbook in float64."""
    hidden, kernel = case.hidden.astype(np.float64), case.kernel.astype(np.float64)
    raw = hidden @ kernel[:, :VOCAB]
    z = raw if softcap is None else softcap * np.tanh(raw / softcap)
    largest = z.max(-1, keepdims=True)
    lse = largest + np.log(np.exp(z - largest).sum(-1, keepdims=True))
    one_hot = np.eye(VOCAB)[case.targets]
    wanted = (1 - label_smoothing) * one_hot + label_smoothing / VOCAB
    count = case.mask[..., None]
    nll = (count * (lse - (one_hot * z).sum(-1, keepdims=True))).sum()
    loss = (count * (lse - (wanted * z).sum(-1, keepdims=True) + z_loss * lse**2)).sum()
    dz = count * ((1 + 2 * z_loss * lse) * np.exp(z - lse) - wanted)
    dz *= 1.0 if softcap is None else 1 - np.tanh(raw / softcap) ** 2
    dkernel = np.zeros_like(kernel)
    dkernel[:, :VOCAB] = np.einsum("btd,btv->dv", hidden, dz)
    return loss, nll, dz @ kernel[:, :VOCAB].T, dkernel


def factored(settings: LossSettings, softcap: float | None = None) -> Callable:
    """((3 · loss, negative log-likelihood), gradients of hidden states and kernel): 3 stands for a later scaling."""

    def loss(hidden: jax.Array, kernel: jax.Array, targets: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums = cross_entropy(FactoredLogits(hidden, kernel, VOCAB, softcap), targets, mask, settings)
        return 3.0 * sums.loss, sums.negative_log_likelihood

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def check(found: Any, reference: tuple[Any, ...], tolerance: float = 2e-6) -> None:
    """Compares with the reference relative to the largest entry; the padding's gradient must be exactly 0."""
    (loss, nll), (dhidden, dkernel) = jax.device_get(found)
    for got, want in zip((loss / 3.0, nll, dhidden / 3.0, dkernel / 3.0), reference, strict=True):
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=tolerance * np.abs(want).max())
    assert not dkernel[:, VOCAB:].any()


@pytest.mark.parametrize(
    ("softcap", "terms", "chunk_tokens"),
    [
        (None, {}, 0),
        (2.0, {}, 7),
        (None, {"z_loss": 0.1}, 16),
        (None, {"label_smoothing": 0.2}, 16),
        (2.0, EVERYTHING, 0),
        (2.0, EVERYTHING, 16),
        (2.0, EVERYTHING, 7),
        (2.0, EVERYTHING, 1000),
    ],
)
def test_every_term_in_every_chunking_is_the_formula(softcap: float | None, terms: dict, chunk_tokens: int) -> None:
    case = make_case()
    found = factored(LossSettings(chunk_tokens=chunk_tokens, **terms), softcap)(*case)
    check(found, expected(case, softcap, **terms))


def test_logits_that_a_model_multiplies_out_itself_give_the_same() -> None:
    case = make_case()

    def loss(hidden: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = FactoredLogits(hidden, kernel, VOCAB, 2.0).logits()
        assert logits.shape == (B, T, VOCAB)
        sums = cross_entropy(logits, jnp.asarray(case.targets), jnp.asarray(case.mask), LossSettings(**EVERYTHING))
        return 3.0 * sums.loss, sums.negative_log_likelihood

    found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(case.hidden, case.kernel)
    check(found, expected(case, 2.0, **EVERYTHING))


@pytest.mark.parametrize(
    ("mesh", "padded"),
    [
        ({"data": 8}, 13),
        ({"data": 2, "fsdp": 4}, 13),
        ({"tensor": 8}, 16),
        ({"tensor": 8, "sequence_parallel": True}, 16),
        ({"tensor": 3}, 15),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 14),
        ({"data": 2, "fsdp": 2, "tensor": 2, "sequence_parallel": True}, 14),
    ],
    ids=str,
)
def test_meshes_give_the_formula_and_lay_gradients_out_like_their_arrays(execution_on, mesh: dict, padded: int) -> None:
    case, execution = make_case(padded), execution_on(**mesh)
    with execution.active():
        found = factored(LossSettings(chunk_tokens=3, **EVERYTHING), 2.0)(*case)
    check(found, expected(case, 2.0, **EVERYTHING))
    used = {axis: axis if mesh.get(axis, 1) > 1 else None for axis in ("fsdp", "tensor")}
    assert found[1][1].sharding.is_equivalent_to(jax.NamedSharding(execution.mesh, P(used["fsdp"], used["tensor"])), 2)
    length = T // mesh["tensor"] if mesh.get("sequence_parallel") else T
    shards = mesh.get("data", 1) * mesh.get("fsdp", 1)
    assert found[1][0].sharding.shard_shape((B, T, D)) == (B // shards, length, D)


def test_a_split_vocabulary_neither_adds_log_t_nor_loses_the_target(execution_on) -> None:
    case = make_case()
    with execution_on(tensor=8).active():
        run = factored(LossSettings())
        (equal, _), _ = run(np.zeros_like(case.hidden), *case[1:])
        identity = np.zeros((D, 16), np.float32)
        identity[:, :D] = np.eye(D)
        targets = case.targets % D
        (certain, _), _ = run(100 * np.eye(D, dtype=np.float32)[targets], identity, targets, case.mask)
    assert equal / 3.0 == pytest.approx(case.mask.sum() * math.log(VOCAB), rel=1e-6)
    assert abs(certain) < 1e-6


def test_large_logits_stay_finite_and_right() -> None:
    case = make_case(scale=1e4)
    found = factored(LossSettings(label_smoothing=0.1, chunk_tokens=16))(*case)
    check(found, expected(case, label_smoothing=0.1), tolerance=1e-5)


def test_no_valid_token_gives_no_loss_and_no_gradient() -> None:
    case = make_case()._replace(mask=np.zeros((B, T), np.bool_))
    (loss, nll), gradients = factored(LossSettings(chunk_tokens=16, **EVERYTHING), 2.0)(*case)
    assert loss == nll == 0.0
    assert not any(np.asarray(gradient).any() for gradient in gradients)


def test_sums_of_bfloat16_products_are_float32() -> None:
    case = make_case()
    low = case._replace(hidden=case.hidden.astype(jnp.bfloat16), kernel=case.kernel.astype(jnp.bfloat16))
    reference = expected(low)
    (loss, _), gradients = factored(LossSettings(chunk_tokens=16))(*low)
    assert loss.dtype == jnp.float32
    assert loss / 3.0 == pytest.approx(reference[0], rel=1e-6)  # a bfloat16 sum would be off by 4e-3
    for got, want in zip(gradients, reference[2:], strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float64) / 3.0, want, rtol=0, atol=0.01 * np.abs(want).max())


@pytest.mark.parametrize("tensor", [1, 2])
def test_no_array_of_all_logits_exists_in_either_pass(execution_on, tensor: int) -> None:
    tokens, columns, chunk = 96, 128, 16
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((4, 24, D), jnp.float32), ((D, columns), jnp.float32), ((4, 24), jnp.int32), ((4, 24), jnp.bool_)
        )
    ]  # fmt: skip

    def largest(chunk_tokens: int) -> int:
        with execution_on(tensor=tensor).active():
            text = factored(LossSettings(chunk_tokens=chunk_tokens)).lower(*arguments).compile().as_text()
        return max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"[a-z]+\d+\[([\d,]+)\]", text))

    assert largest(0) == tokens * columns // tensor
    assert largest(chunk) == max(chunk * columns // tensor, tokens * D, D * columns)

"""What a plan decides from the configuration and the devices alone: tables, vocabulary, attention, products.

Each function returns its choice, and the notes that a user should know of.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxpar.backend import has_float8_products
from jaxpar.config.schema import Config
from jaxpar.parallel.attention import choose
from jaxpar.parallel.mesh import BATCH_AXES
from jaxpar.parallel.rules import ShardingRules
from jaxpar.parallel.sequence_order import ZIGZAG_METHODS

__all__ = ["VOCAB_MULTIPLE", "attention_of", "products_of", "rules_of", "vocabulary_of"]

VOCAB_MULTIPLE = 128
"""What the vocabulary is padded to, unless the model says otherwise: one number, so that meshes pad alike."""


def rules_of(config: Config, sizes: Mapping[str, int]) -> tuple[ShardingRules, list[str]]:
    """The sharding tables for a mesh of `sizes`."""
    notes = []
    tensor = ("tensor",)
    kv_heads: tuple[str, ...] = tensor
    num_kv_heads = getattr(config.model, "kv_heads", None)
    if num_kv_heads is not None and num_kv_heads % sizes["tensor"]:
        kv_heads = ()
        notes.append(
            f"model.num_kv_heads={num_kv_heads} does not divide by parallel.tensor={sizes['tensor']}: "
            "every tensor device stores all key/value heads and uses its own"
        )
    sharing_heads: tuple[str, ...] = tensor
    if config.parallel.context_method == "ulysses" and sizes["context"] > 1:
        sharing_heads = ("tensor", "context")
        shards = sizes["tensor"] * sizes["context"]
        if num_kv_heads is not None and num_kv_heads % shards:
            repeats = math.lcm(num_kv_heads, shards) // num_kv_heads
            notes.append(
                f'parallel.context_method="ulysses" needs heads for context={sizes["context"]} × tensor='
                f"{sizes['tensor']} devices: each of model.num_kv_heads={num_kv_heads} is computed {repeats} times; it "
                "is stored once"
            )
    residual = ("context", "tensor") if config.parallel.sequence_parallel else ("context",)
    if config.parallel.sequence_parallel and sizes["tensor"] == 1:
        notes.append("parallel.sequence_parallel=true changes nothing: tensor, over which it splits, has one device")
    layers = ("pipe",) if sizes["pipe"] > 1 else ()
    weights = {
        "layers": layers, "vocab": tensor, "positions": (), "heads": tensor, "kv_heads": kv_heads, "head_dim": (),
        "mlp": tensor, "norm": (), "vector": (), "experts": ("expert",), "router": (),
    }  # fmt: skip
    # ZeRO: stage 1 splits the optimizer's state, 2 gradients too, 3 parameters too.
    whole, split = weights | {"embed": ()}, weights | {"embed": ("fsdp",)}
    optimizer, gradients, params = (split if config.parallel.zero_stage >= stage else whole for stage in (1, 2, 3))
    used = weights | {
        "embed": (), "batch": BATCH_AXES, "sequence": ("context",), "residual_sequence": residual,
        "attention_heads": sharing_heads,
        "expert_batch": tuple(axis for axis in BATCH_AXES if axis != "expert"),
    }  # fmt: skip
    return ShardingRules(params=params, activations=used, optimizer=optimizer, gradients=gradients), notes


def vocabulary_of(config: Config, tokenizer_size: int) -> tuple[int, list[str]]:
    """Entries of the vocabulary: the model's, or the tokenizer's. Raises ValueError if the model's is too small."""
    declared = getattr(config.model, "vocab_size", 0)
    if not declared or declared == tokenizer_size:
        return tokenizer_size, []
    if declared < tokenizer_size:
        raise ValueError(
            f"model.vocab_size={declared} is smaller than the tokenizer's {tokenizer_size} entries; "
            f"set it to 0 (takes the tokenizer's) or to {tokenizer_size} or more"
        )
    return declared, [f"model.vocab_size={declared}: the tokenizer uses the first {tokenizer_size} entries"]


def attention_of(config: Config, sizes: Mapping[str, int], platform: str) -> tuple[str, str]:
    """The implementation of attention, and why it is this one."""
    model, method = config.model, config.parallel.context_method
    shared = f"parallel.context_method={method} over context={sizes['context']}"
    if sizes["context"] > 1 and method in ZIGZAG_METHODS:
        return "blockwise", f"attention: {shared}, in tiles; each device has two chunks of a sequence, for equal work"
    kernel, reason = choose(
        config.kernels.attention,
        platform={"cuda": "gpu", "rocm": "gpu"}.get(platform, platform),
        sequence_length=config.data.sequence_length,
        head_dim=getattr(model, "head_width", 0),
        dtype=jnp.dtype(config.precision.compute),
        has_segments=config.data.document_boundaries == "respect",
        window=next((window for window in getattr(model, "windows", ()) if window), None),
        softcap=getattr(model, "attention_softcap", 0.0) or None,
    )
    by_heads = f", {shared}" if sizes["context"] > 1 else ""
    return kernel, f"attention: {kernel} ({reason}){by_heads}"


def products_of(config: Config, device: jax.Device) -> tuple[str, list[str]]:
    """The format of products with weights. Raises ValueError for one that the device has not."""
    precision = config.precision
    if precision.products == "compute":
        if precision.emulate_float8:
            raise ValueError(
                f"precision.emulate_float8=true has nothing to emulate with precision.products={precision.products!r}; "
                "set precision.products='float8', or precision.emulate_float8=false"
            )
        return "compute", []
    formats = "layers' matrix products: float8 (e4m3, gradients e5m2)"
    if has_float8_products(device):
        return "float8", [f"{formats}, which {device.device_kind} multiplies natively"]
    if precision.emulate_float8:
        how = f"operands are rounded to float8 and multiplied in {precision.compute}, which is slower"
        return "emulated_float8", [f"{formats}, emulated on {device.device_kind}: {how}"]
    raise ValueError(
        f"precision.products={precision.products!r} needs float8 products, which an NVIDIA GPU of compute capability "
        f"8.9 or higher and a TPU v7 have and this device ({device.device_kind}) has not; "
        "set precision.emulate_float8=true to emulate them, or precision.products='compute'"
    )

"""What communication should cost: bytes that a device sends, from shapes and group sizes alone.

Every collective is counted as a ring runs it. The functions below give one `Traffic` for each kind of collective, per
layer and microbatch or per step as they say, without recomputation (which repeats the forward share); `Traffic.times`
scales one.

Legend: b sequences of s tokens, h wide, on one device if nothing were split over this group; P parameters that a device
would hold likewise; n or t devices in the group.
"""

import math
from dataclasses import dataclass, replace

__all__ = [
    "KINDS",
    "Traffic",
    "data_parallel",
    "expert_parallel",
    "gathered_keys_and_values",
    "gathered_parameters",
    "pipeline_exchange",
    "ring_attention",
    "ring_bytes",
    "scattered_gradients",
    "sequence_parallel_layer",
    "tensor_parallel_layer",
    "ulysses_attention",
    "vocabulary_parallel_cross_entropy",
    "vocabulary_split_embedding",
    "vocabulary_split_head",
]

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind: how many, the bytes of their full arrays, and the bytes that a device sends for them.

    `count` is None where the compiler is free to merge or split the collectives; the bytes hold all the same.
    """

    kind: str
    count: int | None
    payload_bytes: int
    sent_bytes: int

    def times(self, number: int) -> "Traffic":
        """The traffic of `number` repetitions, such as layers or microbatches.

        >>> tensor_parallel_layer(2, 16, 64, 4, element_bytes=2)[0].times(3).count
        12
        """
        return replace(
            self,
            count=None if self.count is None else number * self.count,
            payload_bytes=number * self.payload_bytes,
            sent_bytes=number * self.sent_bytes,
        )


def ring_bytes(kind: str, payload_bytes: int, group_size: int) -> int:
    """Bytes that each of n devices sends to run one collective over a full array of `payload_bytes`, rounded up.

    all-reduce 2(n−1)/n, all-gather, reduce-scatter and all-to-all (n−1)/n of the array; collective-permute all of it.
    (An all-reduce is a reduce-scatter and an all-gather; Rajbhandari 2020, section 7.)

    Raises:
      ValueError: an unknown kind.

    >>> ring_bytes("all-reduce", 800, 4), ring_bytes("all-gather", 800, 4)
    (1200, 600)
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of collective {kind!r}; known: {', '.join(KINDS)}")
    if kind == "collective-permute":
        return payload_bytes
    passes = 2 if kind == "all-reduce" else 1
    return math.ceil(passes * payload_bytes * (group_size - 1) / group_size)


def data_parallel(num_parameters: int, group_size: int, *, element_bytes: int) -> tuple[Traffic, ...]:
    """The gradients' all-reduce, 2P(n−1)/n elements (Rajbhandari 2020, section 7.1)."""
    return (_traffic("all-reduce", None, num_parameters * element_bytes, group_size),)


def scattered_gradients(num_parameters: int, group_size: int, *, element_bytes: int) -> tuple[Traffic, ...]:
    """ZeRO: gradients reduced to the parts that devices keep, P(n−1)/n elements (Rajbhandari 2020, section 7)."""
    return (_traffic("reduce-scatter", None, num_parameters * element_bytes, group_size),)


def gathered_parameters(num_parameters: int, group_size: int, *, element_bytes: int) -> tuple[Traffic, ...]:
    """Parameters that are kept in parts, gathered once: P(n−1)/n elements (Rajbhandari 2020, section 7).

    ZeRO 1 and 2 do so after the update, so that they send 2P(n−1)/n elements in all, as data parallelism does; ZeRO 3
    before a layer is used, forward and again backward, which makes 3P(n−1)/n.
    """
    return (_traffic("all-gather", None, num_parameters * element_bytes, group_size),)


def tensor_parallel_layer(
    batch: int, sequence: int, hidden: int, group_size: int, *, element_bytes: int
) -> tuple[Traffic, ...]:
    """Per layer and microbatch: 4 all-reduces of b·s·h, two each way: 8·b·s·h·(t−1)/t elements.

    (Shoeybi 2019, section 3; Narayanan 2021, section 3.2.)
    """
    return (_traffic("all-reduce", 4, 4 * batch * sequence * hidden * element_bytes, group_size),)


def sequence_parallel_layer(
    batch: int, sequence: int, hidden: int, group_size: int, *, element_bytes: int, reduce_scatter: bool = True
) -> tuple[Traffic, ...]:
    """Per layer and microbatch, tensor parallelism with the residual stream's sequence split over the same devices.

    4 all-gathers and 4 reduce-scatters of b·s·h (s whole): 8·b·s·h·(t−1)/t elements, as without the split. Without
    `reduce_scatter` (XLA on CPU) the reductions are all-reduces and slices: 12·b·s·h·(t−1)/t elements.
    (Korthikanti 2022, section 4.2.2.)
    """
    payload_bytes = 4 * batch * sequence * hidden * element_bytes
    return (
        _traffic("all-gather", 4, payload_bytes, group_size),
        _traffic(_reduction(reduce_scatter), 4, payload_bytes, group_size),
    )


def pipeline_exchange(b: int, s: int, h: int, transfers: int, *, element_bytes: int) -> Traffic:
    """`transfers` times a microbatch's activations, or their cotangents, from every stage to a neighbour (Narayanan
    2021, section 3.2: b·s·h elements each)."""
    payload_bytes = b * s * h * element_bytes
    return Traffic("collective-permute", 1, payload_bytes, payload_bytes).times(transfers)


def vocabulary_parallel_cross_entropy(
    batch: int, sequence: int, group_size: int, *, packed: bool, label_smoothing: bool = False
) -> tuple[Traffic, ...]:
    """Per microbatch, forward: all-reduces of b·s float32 for the maximum, the sum of exponentials, the target's logit,
    and with label smoothing the logits' sum.

    `packed` sends all but the first as one array: two collectives, the same bytes. The backward pass of the loss itself
    sends nothing. (Shoeybi 2019, section 3.)
    """
    values = 3 + label_smoothing
    return (_traffic("all-reduce", 2 if packed else values, values * batch * sequence * 4, group_size),)


def vocabulary_split_embedding(
    batch: int, sequence: int, hidden: int, group_size: int, *, element_bytes: int, sequence_parallel: bool = False
) -> tuple[Traffic, ...]:
    """Per microbatch, forward: one all-reduce of b·s·h, each token's row from one device (Shoeybi 2019, section 3).

    With the sequence split over the same devices it is a reduce-scatter, and the gradient is gathered backward.
    """
    payload_bytes = batch * sequence * hidden * element_bytes
    kinds = ("reduce-scatter", "all-gather") if sequence_parallel else ("all-reduce",)
    return tuple(_traffic(kind, 1, payload_bytes, group_size) for kind in kinds)


def vocabulary_split_head(
    batch: int, sequence: int, hidden: int, group_size: int, *, element_bytes: int, sequence_parallel: bool = False
) -> tuple[Traffic, ...]:
    """Per microbatch, backward: one all-reduce of the hidden states' gradient, b·s·h in float32 (Shoeybi 2019).

    With the sequence split over the same devices it is a reduce-scatter, and the hidden states are gathered forward.
    """
    size = batch * sequence * hidden
    if not sequence_parallel:
        return (_traffic("all-reduce", 1, size * 4, group_size),)
    return (
        _traffic("all-gather", 1, size * element_bytes, group_size),
        _traffic("reduce-scatter", 1, size * 4, group_size),
    )


def ring_attention(
    batch: int, sequence: int, kv_width: int, group_size: int, *, element_bytes: int
) -> tuple[Traffic, ...]:
    """Per layer and microbatch over c devices that share the sequence (Liu 2023, section 3): c − 1 hops of a device's
    keys and values, forward and again backward, where their gradients make c hops in float32.

    With b·s·w elements of keys in all (w: the key/value heads times their width): 2·b·s·w·(c−1)/c forward, that and
    2·b·s·w backward.
    """
    elements = 2 * batch * sequence * kv_width // group_size
    payload_bytes = elements * (2 * (group_size - 1) * element_bytes + group_size * 4)
    return (Traffic("collective-permute", None, payload_bytes, payload_bytes),)


def gathered_keys_and_values(
    batch: int, sequence: int, kv_width: int, group_size: int, *, element_bytes: int
) -> tuple[Traffic, ...]:
    """Per layer and microbatch: keys and values gathered forward and again backward, and their gradients reduced
    in float32 to the parts that devices have (Llama 3, section 3.3.2).

    2·b·s·w·(c−1)/c elements forward, twice that backward.
    """
    elements = 2 * batch * sequence * kv_width
    return (
        _traffic("all-gather", None, 2 * elements * element_bytes, group_size),
        _traffic("reduce-scatter", 2, elements * 4, group_size),
    )


def ulysses_attention(
    batch: int, sequence: int, q_width: int, kv_width: int, group_size: int, *, element_bytes: int
) -> tuple[Traffic, ...]:
    """Per layer and microbatch: all-to-alls of queries, keys, values and output, forward and of their gradients
    backward (Jacobs 2023, section 3.2).

    (2·b·s·q + 2·b·s·w)/c · (c−1)/c elements each way, for q elements of a token's queries and w of its keys.
    """
    tokens = batch * sequence // group_size
    return (_traffic("all-to-all", 8, 4 * tokens * (q_width + kv_width) * element_bytes, group_size),)


def expert_parallel(places: int, h: int, group_size: int, *, element_bytes: int) -> tuple[Traffic, ...]:
    """Per layer of experts and microbatch: all-to-alls of tokens to their experts and back, forward and of their
    gradients backward (Lepikhin 2020, section 3.3), of the places that a device has for its tokens in all experts."""
    return (_traffic("all-to-all", 4, 4 * places * h * element_bytes, group_size),)


def _traffic(kind: str, count: int | None, payload_bytes: int, group_size: int) -> Traffic:
    return Traffic(kind, count, payload_bytes, ring_bytes(kind, payload_bytes, group_size))


def _reduction(reduce_scatter: bool) -> str:
    return "reduce-scatter" if reduce_scatter else "all-reduce"

"""The formulas against hand-counted bytes."""

import pytest

from jaxpar.parallel import communication
from jaxpar.parallel.communication import Traffic


@pytest.mark.parametrize(
    ("kind", "sent_bytes"),
    [
        ("all-reduce", 1200),
        ("all-gather", 600),
        ("reduce-scatter", 600),
        ("all-to-all", 600),
        ("collective-permute", 800),
    ],
)
def test_a_ring_of_four_sends(kind: str, sent_bytes: int) -> None:
    assert communication.ring_bytes(kind, 800, 4) == sent_bytes


def test_a_ring_rounds_up_and_sends_nothing_alone() -> None:
    assert communication.ring_bytes("all-reduce", 4, 3) == 6  # 16/3
    assert communication.ring_bytes("all-reduce", 800, 1) == 0


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown kind of collective 'allreduce'; known: all-reduce, all-gather"):
        communication.ring_bytes("allreduce", 4, 2)


def test_zero_sends_what_data_parallelism_does_and_half_more_in_stage_3() -> None:
    """1000 parameters over 4 devices: 2·1000·3/4 elements in stages 0 to 2, 3·1000·3/4 in stage 3."""
    assert sent(communication.data_parallel(1000, 4, element_bytes=4)) == 1500 * 4
    gradients = communication.scattered_gradients(1000, 4, element_bytes=4)
    parameters = communication.gathered_parameters(1000, 4, element_bytes=2)
    assert [(row.kind, row.payload_bytes) for row in (*gradients, *parameters)] == [
        ("reduce-scatter", 4000),
        ("all-gather", 2000),
    ]
    assert sent((*gradients, *parameters)) == 750 * 4 + 750 * 2
    assert sent((*gradients, *parameters, *parameters)) == 750 * 4 + 1500 * 2


def test_sequence_parallelism_sends_what_tensor_parallelism_does() -> None:
    b, s, h, t = 2, 16, 32, 4
    tensor = communication.tensor_parallel_layer(b, s, h, t, element_bytes=2)
    sequence = communication.sequence_parallel_layer(b, s, h, t, element_bytes=2)
    assert sent(tensor) == sent(sequence) == 8 * b * s * h * (t - 1) // t * 2
    assert [(row.kind, row.count) for row in tensor] == [("all-reduce", 4)]
    assert [(row.kind, row.count) for row in sequence] == [("all-gather", 4), ("reduce-scatter", 4)]
    sliced = communication.sequence_parallel_layer(b, s, h, t, element_bytes=2, reduce_scatter=False)
    assert [(row.kind, row.count) for row in sliced] == [("all-gather", 4), ("all-reduce", 4)]
    assert sent(sliced) == 12 * b * s * h * (t - 1) // t * 2


def test_cross_entropy_sends_three_floats_a_token_however_packed() -> None:
    apart = communication.vocabulary_parallel_cross_entropy(2, 16, 4, packed=False)
    packed = communication.vocabulary_parallel_cross_entropy(2, 16, 4, packed=True)
    assert (apart[0].count, packed[0].count) == (3, 2)
    assert apart[0].payload_bytes == packed[0].payload_bytes == 3 * 2 * 16 * 4
    assert sent(apart) == sent(packed) == 3 * 2 * 2 * 16 * 4 * 3 // 4
    smooth = communication.vocabulary_parallel_cross_entropy(2, 16, 4, packed=True, label_smoothing=True)
    assert (smooth[0].count, smooth[0].payload_bytes) == (2, 4 * 2 * 16 * 4)


def test_embedding_and_head_send_one_hidden_array_each_or_two_with_the_sequence_split() -> None:
    """The head's gradient is summed in float32."""
    sizes = (2, 16, 32, 4)
    assert communication.vocabulary_split_embedding(*sizes, element_bytes=2) == (Traffic("all-reduce", 1, 2048, 3072),)
    assert communication.vocabulary_split_head(*sizes, element_bytes=2) == (Traffic("all-reduce", 1, 4096, 6144),)
    split = {"element_bytes": 2, "sequence_parallel": True}
    assert communication.vocabulary_split_embedding(*sizes, **split) == (
        Traffic("reduce-scatter", 1, 2048, 1536),
        Traffic("all-gather", 1, 2048, 1536),
    )
    assert communication.vocabulary_split_head(*sizes, **split) == (
        Traffic("all-gather", 1, 2048, 1536),
        Traffic("reduce-scatter", 1, 4096, 3072),
    )


def test_times_scales_counts_and_bytes_and_keeps_an_open_count_open() -> None:
    assert Traffic("all-reduce", 4, 800, 1200).times(3) == Traffic("all-reduce", 12, 2400, 3600)
    assert Traffic("all-reduce", None, 800, 1200).times(3) == Traffic("all-reduce", None, 2400, 3600)


def sent(rows: tuple[Traffic, ...]) -> int:
    return sum(row.sent_bytes for row in rows)

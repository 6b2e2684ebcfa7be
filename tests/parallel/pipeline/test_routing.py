"""Slots and transfers: as few slots as values wait at once, the way that each result takes."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.parallel.pipeline.catalogue import build_schedule
from jaxpar.parallel.pipeline.routing import PER_RANK, PER_TICK, route
from jaxpar.parallel.pipeline.schedule import Kind, PipelineSchedule

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT


def test_two_stages_and_two_microbatches_slot_by_slot() -> None:
    routed = route(build_schedule("1f1b", 2, 2))
    assert str(routed.schedule) == "F0 F1  . B0  . B1\n . F0 B0 F1 B1  ."
    # A row a rank.
    assert routed.kind.T.tolist() == [[1, 1, 0, 2, 0, 2], [0, 1, 2, 1, 2, 0]]
    assert routed.microbatch.T.tolist() == [[0, 1, 0, 0, 0, 1], [0, 0, 0, 1, 1, 0]]
    assert routed.stage.T.tolist() == [[0] * 6, [0, 1, 1, 1, 1, 0]]
    assert routed.is_first.T.tolist() == [[1, 1, 0, 1, 0, 1], [0] * 6]
    assert routed.is_last.T.tolist() == [[0] * 6, [0, 1, 1, 1, 1, 0]]
    # Rank 1 receives input 0 in tick 0. In tick 1, when it has read that, it receives input 1, and its own forward ends
    # in the loss's cotangent.
    assert routed.num_receive_slots == 2
    assert routed.from_previous[:, 1].tolist() == [0, 1, 2, 2, 2, 2]
    assert routed.own_slot[:, 1].tolist() == [2, 0, 2, 0, 2, 2]
    assert routed.input_slot[:, 1].tolist() == [2, 0, 2, 1, 2, 2]
    assert routed.cotangent_slot[:, 1].tolist() == [2, 2, 0, 2, 0, 2]
    # Of two ranks each is the other's previous one.
    assert routed.from_previous[:, 0].tolist() == [2, 2, 0, 2, 0, 2]
    assert routed.cotangent_slot[:, 0].tolist() == [2, 2, 2, 0, 2, 0]
    assert routed.residual_slot.T.tolist() == [[0, 1, 0, 0, 0, 1], [0] * 6]
    assert routed.any_from_previous.tolist() == [True, True, True, False, True, False]
    assert not routed.any_from_next.any()
    assert (routed.num_residual_slots, routed.num_weight_slots) == (2, 0)


@pytest.mark.parametrize(("placement", "num_chunks"), [("interleaved", 2), ("zb_v", 2), ("zb_h1", 1)])
def test_arrays_have_the_shapes_and_types_that_a_program_scans_over(placement: str, num_chunks: int) -> None:
    routed = route(build_schedule(placement, 3, 6, num_chunks))
    assert list(routed.arrays) == [*PER_RANK, *PER_TICK]
    for name in PER_RANK:
        assert (routed.arrays[name].dtype, routed.arrays[name].shape) == (np.int32, (routed.schedule.num_ticks, 3)), (
            name
        )
    for name in PER_TICK:
        assert (routed.arrays[name].dtype, routed.arrays[name].shape) == (np.bool_, (routed.schedule.num_ticks,)), name
    with pytest.raises(ValueError, match="read-only"):
        routed.kind[0, 0] = 1


def test_a_transfer_of_hop_2_arrives_a_tick_later() -> None:
    one, two = (route(build_schedule("naive", 3, 1, hop=hop)) for hop in (1, 2))
    assert np.argwhere(one.from_previous < one.num_receive_slots).tolist() == [[0, 1], [1, 2]]
    assert np.argwhere(one.from_next < one.num_receive_slots).tolist() == [[3, 1], [4, 0]]
    assert np.argwhere(two.from_previous < two.num_receive_slots).tolist() == [[1, 1], [3, 2]]
    assert np.argwhere(two.from_next < two.num_receive_slots).tolist() == [[6, 1], [8, 0]]
    # What stays on its rank is written at once: the loss's cotangent on the last stage.
    assert np.argwhere(one.own_slot < one.num_receive_slots).tolist() == [[2, 2]]
    assert np.argwhere(two.own_slot < two.num_receive_slots).tolist() == [[4, 2]]


def test_a_vee_turns_on_the_last_rank_and_two_ranks_need_one_permutation() -> None:
    routed = route(build_schedule("zb_v", 4, 4, 2))
    geometry, ticks = routed.schedule.geometry, routed.schedule.ticks
    for microbatch in range(4):
        assert routed.own_slot[ticks[F, microbatch, 3], 3] < routed.num_receive_slots
        assert routed.own_slot[ticks[B, microbatch, 4], 3] < routed.num_receive_slots
        assert routed.own_slot[ticks[F, microbatch, 7], 0] < routed.num_receive_slots
        assert routed.from_next[ticks[F, microbatch, 4], 2] < routed.num_receive_slots
        assert routed.from_previous[ticks[B, microbatch, 7], 1] < routed.num_receive_slots
    assert geometry.locate(5) == (2, 1)
    assert not route(build_schedule("zb_v", 2, 4, 2)).any_from_next.any()
    alone = route(build_schedule("interleaved", 1, 2, 3))
    assert not alone.any_from_previous.any()
    assert not alone.any_from_next.any()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_pool_has_a_slot_more_than_values_wait_at_once(
    data: st.DataObject, random_schedules: st.SearchStrategy
) -> None:
    schedule = data.draw(random_schedules)
    routed = route(schedule)
    assert routed.num_residual_slots == _most_at_once(schedule, _kept(schedule, F, B))
    assert routed.num_weight_slots == _most_at_once(schedule, _kept(schedule, B, W) if schedule.geometry.split else [])
    assert routed.num_receive_slots == _most_at_once(schedule, _received(schedule))


def _kept(schedule: PipelineSchedule, writer: Kind, reader: Kind) -> list[tuple[int, int, int]]:
    ticks = schedule.ticks
    return [
        (schedule.geometry.rank(stage), tick, ticks[reader, microbatch, stage])
        for (kind, microbatch, stage), tick in ticks.items()
        if kind is writer
    ]


def _received(schedule: PipelineSchedule) -> list[tuple[int, int, int]]:
    """Rank, first tick after the arrival, tick in which it is read."""
    geometry, ticks, found = schedule.geometry, schedule.ticks, []
    last = geometry.num_stages - 1
    for (kind, microbatch, stage), tick in ticks.items():
        if kind is F and stage < last:
            reader = (F, microbatch, stage + 1)
        elif kind is F:
            reader = (B, microbatch, last)
        elif kind is B and stage:
            reader = (B, microbatch, stage - 1)
        else:
            continue
        delay = 1 if geometry.rank(stage) == geometry.rank(reader[2]) else geometry.hop
        found.append((geometry.rank(reader[2]), tick + delay, ticks[reader]))
    return found


def _most_at_once(schedule: PipelineSchedule, values: list[tuple[int, int, int]]) -> int:
    waiting = Counter((rank, tick) for rank, start, end in values for tick in range(start, end + 1))
    return max(waiting.values(), default=0)


@pytest.mark.parametrize(
    ("name", "num_chunks", "slots"),
    [
        ("naive", 1, (1, 1, 0)),
        ("gpipe", 1, (8, 8, 0)),
        ("1f1b", 1, (2, 4, 0)),
        ("1f1b_aligned", 1, (2, 7, 0)),
        ("interleaved", 2, (4, 11, 0)),
        ("interleaved_aligned", 2, (2, 11, 0)),
        ("zb_h1", 1, (2, 4, 4)),
        ("zb_h2", 1, (2, 7, 7)),
        ("zb_v", 2, (3, 8, 7)),
    ],
)
def test_the_slots_that_eight_microbatches_need_on_four_ranks(
    name: str, num_chunks: int, slots: tuple[int, int, int]
) -> None:
    routed = route(build_schedule(name, 4, 8, num_chunks))
    assert (routed.num_receive_slots, routed.num_residual_slots, routed.num_weight_slots) == slots

"""A run on labels finds every value where it is read, and any number in the arrays that is wrong."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.parallel.pipeline.catalogue import build_schedule
from jaxpar.parallel.pipeline.replay import replay
from jaxpar.parallel.pipeline.routing import PER_RANK, RoutedSchedule, route
from jaxpar.parallel.pipeline.schedule import Kind, TableError

SIZES = {
    "input_slot": "num_receive_slots",
    "cotangent_slot": "num_receive_slots",
    "from_previous": "num_receive_slots",
    "from_next": "num_receive_slots",
    "own_slot": "num_receive_slots",
    "residual_slot": "num_residual_slots",
    "weight_slot": "num_weight_slots",
}


def with_value(routed: RoutedSchedule, name: str, where: tuple[int, ...], value: int) -> RoutedSchedule:
    array = getattr(routed, name).copy()
    array[where] = value
    return replace(routed, **{name: array})


def _is_used(routed: RoutedSchedule, name: str) -> np.ndarray:
    """Where an array has a number that counts."""
    if name in ("residual_slot", "weight_slot"):
        unused = Kind.WEIGHT if name == "residual_slot" else Kind.FORWARD
        return (routed.kind != Kind.IDLE) & (routed.kind != unused) & (getattr(routed, SIZES[name]) > 0)
    if name in SIZES:
        return getattr(routed, name) < routed.num_receive_slots
    return routed.kind != Kind.IDLE


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_single_wrong_number_is_found(data: st.DataObject, random_schedules: st.SearchStrategy) -> None:
    routed = route(data.draw(random_schedules))
    name = data.draw(st.sampled_from([name for name in PER_RANK if _is_used(routed, name).any()]))
    tick, rank = data.draw(st.sampled_from(np.argwhere(_is_used(routed, name)).tolist()))
    size = getattr(routed, SIZES[name]) + 1 if name in SIZES else 4
    right = int(getattr(routed, name)[tick, rank])
    wrong = data.draw(st.sampled_from([number for number in range(size) if number != right]))
    with pytest.raises(TableError):
        replay(with_value(routed, name, (tick, rank), wrong))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_nobody_sends_is_not_received(data: st.DataObject, random_schedules: st.SearchStrategy) -> None:
    routed = route(data.draw(random_schedules))
    if routed.num_receive_slots == 0:
        return
    name = data.draw(st.sampled_from(["from_previous", "from_next", "own_slot"]))
    unused = np.argwhere(~_is_used(routed, name)).tolist()
    if not unused:
        return
    tick, rank = data.draw(st.sampled_from(unused))
    received = with_value(routed, name, (tick, rank), data.draw(st.integers(0, routed.num_receive_slots - 1)))
    if name != "own_slot":
        received = with_value(received, f"any_{name}", (tick,), True)
    with pytest.raises(TableError):
        replay(received)


@pytest.mark.parametrize(
    ("name", "where", "value", "message"),
    [
        # F0 F1  . B0  . B1
        #  . F0 B0 F1 B1  .
        ("kind", (0, 0), 2, "tick 0, rank 0, B0a: the schedule has F0a here"),
        ("kind", (0, 1), 1, "tick 0, rank 1, F0a: the schedule has idle here"),
        ("is_last", (1, 1), 0, "tick 1, rank 1, F0a: stage, is_first or is_last do not fit the rank and the chunk"),
        ("input_slot", (1, 1), 1, "tick 1, rank 1, F0a: reads receive slot 1, which holds nothing"),
        ("input_slot", (1, 1), 2, "tick 1, rank 1, F0a: there is no receive slot 2"),
        ("input_slot", (3, 1), 0, "tick 3, rank 1, F1a: reads receive slot 0, which holds nothing"),
        ("from_previous", (0, 1), 2, "tick 0, rank 0, F0a: its result never arrives at F0 of stage 1"),
        ("from_previous", (0, 0), 1, "tick 0, rank 0, receive: receive slot 1 gets something that nobody sent"),
        ("from_previous", (1, 1), 0, "tick 1, rank 1, result of F0a: overwrites receive slot 0, which F1 of stage "
         "1 has not read yet"),
        ("own_slot", (0, 0), 0, "tick 0, rank 0, F0a: receives a result for F0 of stage 1"),
        ("residual_slot", (1, 0), 0, "tick 1, rank 0, F1a: overwrites residual slot 0, which B0 of stage 0 has "
         "not read yet"),
        ("residual_slot", (3, 0), 1, "tick 3, rank 0, B0a: reads residual slot 1, which holds what B1 of stage 0 is "
         "to read"),
        ("any_from_previous", (0,), False, "tick 0, receive: any_from_previous does not say whether a rank receives"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_place(name: str, where: tuple[int, ...], value: int, message: str) -> None:
    routed = with_value(route(build_schedule("1f1b", 2, 2)), name, where, value)
    if name == "from_previous":
        routed = replace(routed, any_from_previous=(routed.from_previous < routed.num_receive_slots).any(axis=1))
    with pytest.raises(TableError) as error:
        replay(routed)
    assert str(error.value).startswith(message)


def test_a_result_is_received_once_and_all_that_is_written_is_read() -> None:
    routed = route(build_schedule("1f1b", 2, 2))
    twice = with_value(with_value(routed, "from_next", (0, 1), 1), "any_from_next", (0,), True)
    with pytest.raises(TableError, match="tick 0, rank 0, F0a: its result is received twice"):
        replay(twice)
    unfinished = replace(routed, **{name: array[:3] for name, array in routed.arrays.items()})
    with pytest.raises(TableError, match="a receive slot holds what it has not read at the end"):
        replay(unfinished)
    late = route(build_schedule("naive", 2, 1, hop=2))
    unfinished = replace(late, **{name: array[:1] for name, array in late.arrays.items()})
    with pytest.raises(TableError, match="tick 0, rank 0, F0a: its result never arrives at F0 of stage 1"):
        replay(unfinished)

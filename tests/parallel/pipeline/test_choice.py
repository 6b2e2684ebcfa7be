"""The fastest schedule that fits is chosen, and every other has its reason."""

import re

import pytest

from jaxpar.parallel.pipeline.catalogue import build_schedule
from jaxpar.parallel.pipeline.choice import Choice, SlotSizes, choose_schedule, measure
from jaxpar.parallel.pipeline.makespan import Costs

EQUAL = Costs()
RECOMPUTED = Costs(1.0, 2.0, 1.0)
"""The backward computes the forward again."""


def chosen(choice: Choice) -> tuple[str, int]:
    return choice.schedule.name, choice.schedule.geometry.num_chunks


@pytest.mark.parametrize(
    ("costs", "options", "expected"),
    [
        (EQUAL, {}, ("zb_v", 2)),
        (EQUAL, {"only_aligned": True}, ("interleaved_aligned", 2)),
        (RECOMPUTED, {}, ("interleaved_aligned", 2)),
        (RECOMPUTED, {"mode": "asynchronous"}, ("zb_v", 2)),
        (EQUAL, {"max_in_flight": 5.5}, ("interleaved_aligned", 2)),
        (EQUAL, {"max_in_flight": 5}, ("1f1b", 1)),
        (EQUAL, {"max_in_flight": 3}, ("naive", 1)),
        # zb_v has 8 slots of forwards and 7 of backwards, each for half of a rank's layers.
        (EQUAL, {"max_in_flight": 7.5}, ("zb_v", 2)),
        (EQUAL, {"max_in_flight": 7.5, "slots": SlotSizes(1.0, 1.1)}, ("interleaved_aligned", 2)),
        (EQUAL, {"max_in_flight": 5.5, "slots": SlotSizes(0.5, 0.5)}, ("zb_v", 2)),
    ],
)
def test_the_fastest_that_fits(costs: Costs, options: dict, expected: tuple[str, int]) -> None:
    assert chosen(choose_schedule(4, 8, (1, 2), costs, **options)) == expected


def test_of_equals_the_one_that_keeps_less_and_then_the_aligned_one() -> None:
    # Forwards take as long as backwards.
    assert chosen(choose_schedule(4, 8, (1,), Costs(2.0, 1.0, 1.0), max_in_flight=7)) == ("1f1b", 1)
    # One rank: all schedules but those of several chunks are one and the same.
    assert chosen(choose_schedule(1, 4, (1,), EQUAL)) == ("naive", 1)
    assert choose_schedule(4, 8, (1,), EQUAL, only_aligned=True).schedule.name == "1f1b_aligned"


def test_every_candidate_has_its_numbers_or_its_reason() -> None:
    choice = choose_schedule(4, 6, (1, 2, 3), EQUAL, max_in_flight=4)
    found = {(candidate.name, candidate.num_chunks): candidate for candidate in choice.candidates}
    assert len(found) == len(choice.candidates) == 6 + 3 + 2
    first = choice.candidates[0]
    assert first.measured is not None
    assert first.measured.schedule == choice.schedule
    assert choice.schedule.name == "1f1b"
    assert found["1f1b", 1].refused == ""
    assert found["gpipe", 1].refused == "it keeps 6 activations, more than max_in_flight=4"
    assert found["zb_h1", 1].refused == "it keeps 8 activations, more than max_in_flight=4"
    assert found["interleaved", 3].measured is None
    assert found["interleaved", 3].refused.startswith("pipeline.microbatches=6 must be a multiple of parallel.pipe=4")
    assert found["zb_h2", 1].refused.startswith("pipeline.microbatches=6 is too few")
    aligned = choose_schedule(4, 8, (1,), EQUAL, only_aligned=True)
    refused = {candidate.name: candidate.refused for candidate in aligned.candidates}
    assert refused["1f1b"] == "ranks run different kinds of task in one tick"
    times = [
        candidate.measured.makespan for candidate in aligned.candidates if candidate.measured and not candidate.refused
    ]
    assert times == sorted(times) == [33.0, 33.0]
    assert refused["naive"] == "it alternates too often to be compiled without branches"


def test_a_measured_schedule_counts_what_a_program_for_all_ranks_has_room_for() -> None:
    found = measure(build_schedule("zb_h1", 4, 8), EQUAL)
    assert (found.in_flight, found.held, found.num_receive_slots) == (4.0, 8.0, 2)
    assert (found.makespan, found.slowdown) == (27.0, 27.0 / 24.0)
    assert measure(found.schedule, EQUAL, slots=SlotSizes(1.25, 2.0)).held == 4 * 1.25 + 4 * 2.0
    assert measure(build_schedule("1f1b", 4, 8), EQUAL, slots=SlotSizes(1.25, 2.0)).held == 4.0
    vee = measure(build_schedule("zb_v", 4, 8, 2), Costs((1.0, 1.0, 1.0, 2.0)))
    assert (vee.in_flight, vee.held) == (4.0, 7.5)
    assert vee.slowdown == vee.makespan / 32.0


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((4, 8, (1, 2)), {"max_in_flight": 0.5}, 'pipeline.schedule="auto": every schedule keeps more activations of a '
         'stage than max_in_flight=0.5; the least is 1, with pipeline.schedule="naive" and pipeline.chunks=1'),
        ((4, 8, (2,)), {"max_in_flight": 5}, "every schedule keeps more activations of a stage than max_in_flight=5; "
         'the least is 5.5, with pipeline.schedule="interleaved_aligned" and pipeline.chunks=2'),
        ((4, 3, (2,)), {}, 'pipeline.schedule="auto" finds none; interleaved with 2 chunks: pipeline.microbatches=3 '
         "must be a multiple of parallel.pipe=4"),
        ((4, 8, ()), {}, 'pipeline.schedule="auto": no schedule has no chunks'),
        ((4, 8, (1,)), {"mode": "fast"}, "mode='fast' must be one of"),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_refused(arguments: tuple, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        choose_schedule(*arguments, EQUAL, **options)

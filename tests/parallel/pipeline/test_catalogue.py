"""Schedules by name: all of them can run, and what cannot be made is refused with the nearest thing that can."""

import pytest

from jaxpar.parallel.pipeline.catalogue import SCHEDULES, build_schedule
from jaxpar.parallel.pipeline.validate import validate

NAMES = ("naive", "gpipe", "1f1b", "1f1b_aligned", "interleaved", "interleaved_aligned", "zb_h1", "zb_h2", "zb_v")


@pytest.mark.parametrize("hop", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_can_run_and_is_aligned_and_split_as_it_says(name: str, hop: int) -> None:
    assert tuple(SCHEDULES) == NAMES
    recipe = SCHEDULES[name]
    num_chunks = recipe.legal_chunks[0]
    for num_ranks in (1, 2, 3, 4, 7):
        fewest = max(recipe.min_microbatches(num_ranks), num_ranks if recipe.in_rounds else 1)
        for num_microbatches in (fewest, 2 * fewest, 3 * fewest):
            schedule = build_schedule(name, num_ranks, num_microbatches, num_chunks, hop=hop)
            assert schedule.name == name
            validate(schedule)
            assert schedule.aligned or not recipe.aligned
            assert (schedule.geometry.split, schedule.geometry.hop) == (recipe.split, hop)


def test_the_names_without_aligned_are_not() -> None:
    for name in ("1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v"):
        assert not build_schedule(name, 4, 8, SCHEDULES[name].legal_chunks[0]).aligned


def test_interleaving_takes_any_number_of_chunks_from_two() -> None:
    for num_chunks in (2, 3, 5):
        validate(build_schedule("interleaved", 3, 6, num_chunks))
        validate(build_schedule("interleaved_aligned", 2, 2, num_chunks, hop=2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b_alinged", 4, 8), 'pipeline.schedule="1f1b_alinged" is unknown; legal values: "naive", "gpipe", '
         '"1f1b", "1f1b_aligned", "interleaved", "interleaved_aligned", "zb_h1", "zb_h2", "zb_v"; did you mean '
         '"1f1b_aligned"?'),
        (("gpipe", 0, 8), "parallel.pipe=0 must be 1 or more"),
        (("gpipe", 4, 0), "pipeline.microbatches=0 must be 1 or more"),
        (("gpipe", 4, 8, 0), "pipeline.chunks=0 must be 1 or more"),
        (("gpipe", 4, 8, 2), 'pipeline.chunks=2 does not go with pipeline.schedule="gpipe"; legal values: 1; '
         'schedules for 2 chunks: "interleaved", "interleaved_aligned", "zb_v"'),
        (("interleaved", 4, 8, 1), 'pipeline.chunks=1 does not go with pipeline.schedule="interleaved"; legal values: '
         '2 or more; schedules for 1 chunk: "naive", "gpipe", "1f1b", "1f1b_aligned", "zb_h1", "zb_h2"'),
        (("zb_v", 4, 8, 3), 'pipeline.chunks=3 does not go with pipeline.schedule="zb_v"; legal values: 2; '
         'schedules for 3 chunks: "interleaved", "interleaved_aligned"'),
        (("interleaved_aligned", 4, 10, 2), "pipeline.microbatches=10 must be a multiple of parallel.pipe=4 for "
         'pipeline.schedule="interleaved_aligned", which sends the microbatches around in groups of one for each rank; '
         "nearest legal values: 8, 12"),
        (("interleaved", 4, 3, 2), "nearest legal values: 4"),
        (("zb_h1", 4, 3), 'pipeline.microbatches=3 is too few for pipeline.schedule="zb_h1" with parallel.pipe=4: with '
         "fewer, no weight gradients are left that fill the idle ticks; legal values: 4 or more"),
        (("zb_h2", 4, 6), "legal values: 7 or more"),
        (("zb_v", 4, 3, 2), "legal values: 4 or more"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_refused_with_what_can(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=r"^(pipeline|parallel)\.") as error:
        build_schedule(*arguments)
    assert message in str(error.value)


def test_a_hop_of_three_ticks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^hop=3 must be 1 or 2"):
        build_schedule("gpipe", 2, 2, hop=3)

"""The orders of the literature, as their papers draw them; the tables' lengths are in test_closed_forms.py."""

from jaxpar.parallel.pipeline import orders
from jaxpar.parallel.pipeline.schedule import Geometry, Kind


def labels(found: orders.Orders, *, with_chunk: bool = False) -> list[str]:
    return [" ".join(task.label(with_chunk=with_chunk) for task in tasks) for tasks in found]


def test_one_at_a_time() -> None:
    assert labels(orders.one_at_a_time(Geometry(2, 2))) == ["F0 B0 F1 B1"] * 2


def test_gpipe_has_all_forwards_first() -> None:
    assert labels(orders.all_forward_first(Geometry(2, 3))) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_1f1b_has_a_forward_for_each_rank_to_come_first() -> None:
    """Narayanan et al. 2021, figure 4 (top)."""
    assert labels(orders.one_forward_one_backward(Geometry(4, 5))) == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]
    assert labels(orders.one_forward_one_backward(Geometry(2, 4, hop=2)))[0] == "F0 F1 F2 B0 F3 B1 B2 B3"


def test_interleaving_takes_the_microbatches_in_groups_through_the_chunks() -> None:
    """Narayanan et al. 2021, figure 4 (bottom), with the chunks written as letters."""
    found = labels(orders.interleaved(Geometry(2, 4, 2)), with_chunk=True)
    assert found[0] == "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a"
    assert found[1] == "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"


def test_one_chunk_interleaved_is_1f1b_with_twice_the_forwards_but_one_first() -> None:
    for rank, tasks in enumerate(orders.interleaved(Geometry(4, 9))):
        first_backward = next(number for number, task in enumerate(tasks) if task.kind is Kind.BACKWARD)
        assert first_backward == 2 * (4 - rank) - 1


def test_zb_h1_puts_off_as_many_weight_gradients_as_the_ranks_number() -> None:
    """Qi et al. 2023, figure 3 (top)."""
    found = labels(orders.zero_bubble(Geometry(3, 4, split=True)))
    assert found == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


def test_zb_h2_puts_off_twice_as_many() -> None:
    """Qi et al. 2023, figure 3 (bottom)."""
    found = labels(orders.zero_bubble_deep(Geometry(2, 4, split=True)))
    assert found == ["F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3", "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"]


def test_zb_v_runs_chunk_1_as_soon_as_it_comes_back() -> None:
    found = labels(orders.vee(Geometry(2, 3, 2, "vee", split=True)), with_chunk=True)
    assert found == [
        "F0a F1a F2a F0b B0b W0b F1b B1b W1b B0a W0a F2b B2b W2b B1a W1a B2a W2a",
        "F0a F0b F1a F1b B0b W0b F2a B0a W0a F2b B1b W1b B1a B2b B2a W1a W2b W2a",
    ]
    few = labels(orders.vee(Geometry(2, 1, 2, "vee", split=True)), with_chunk=True)
    assert few == ["F0a F0b B0b W0b B0a W0a", "F0a F0b B0b W0b B0a W0a"]

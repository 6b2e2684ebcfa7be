"""The line between processes, with threads of one process at its ends."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from jaxpar import member as member_module
from jaxpar.heartbeat import Heartbeats
from jaxpar.hub import Hub
from jaxpar.line import Traveller
from jaxpar.member import Member, RollCallError
from jaxpar.parallel.agreement import FailedElsewhereError, active, agreed, any_process, last_words, together

Ends = list[tuple[int, int, str]]


class Run:
    """Processes that are threads: what each does is a function of its `Member`."""

    def __init__(
        self,
        count: int,
        *,
        arrival_seconds: float = 5.0,
        heartbeat_seconds: float = 30.0,
        start_seconds: float = 60.0,
    ) -> None:
        self.count, self._arrival, self._heartbeat = count, arrival_seconds, heartbeat_seconds
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.ends: Ends = []
        self.members: list[Member] = []
        Hub(
            listener,
            count,
            arrival_seconds=arrival_seconds,
            heartbeat_seconds=heartbeat_seconds,
            start_seconds=start_seconds,
        ).start()

    def member(self, index: int, **changes: Any) -> Member:
        said = {"count": self.count, "host": "here", "pid": 100 + index, "version": "jax 1", "config": "c"} | changes

        def end_process(status: int, why: str) -> None:
            self.ends.append((index, status, why))

        member = Member(Traveller(index=index, **said), end_process, heartbeat_seconds=self._heartbeat)
        self.members.append(member)
        return member

    def do(self, work: Callable[[Member], Any], members: Sequence[Member] | None = None) -> list[Any]:
        """Each process's result of `work`, or the error that it raised."""
        members = [self.member(index) for index in range(self.count)] if members is None else members
        results: list[Any] = [None] * len(members)

        def run(place: int, member: Member) -> None:
            try:
                member.arrive(self.address, arrival_seconds=self._arrival)
                with active(member):
                    results[place] = work(member)
            except Exception as error:
                results[place] = error

        threads = [threading.Thread(target=run, args=pair) for pair in enumerate(members)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        return results

    def wait_for_ends(self, number: int) -> Ends:
        deadline = time.monotonic() + 15
        while len(self.ends) < number and time.monotonic() < deadline:
            time.sleep(0.02)
        return sorted(self.ends)


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets every run of a test end, so that no thread and no socket of it is left."""
    made: list[Run] = []
    original = Run.__init__

    def noted(self: Run, *arguments: Any, **keys: Any) -> None:
        made.append(self)
        original(self, *arguments, **keys)

    monkeypatch.setattr(Run, "__init__", noted)
    yield
    for run in made:
        for member in run.members:
            if hasattr(member, "_line"):
                member.leave()
    for thread in threading.enumerate():
        if thread.name.startswith("hub"):
            thread.join(10)
            assert not thread.is_alive()


def test_every_process_gets_everyones_answers_in_order() -> None:
    def work(member: Member) -> Any:
        first = agreed(member.index * 10)
        time.sleep(0.05 * member.index)
        return first, agreed(f"from {member.index}"), member.coordinator

    run = Run(3)
    results = run.do(work)
    assert {result[:2] for result in results} == {((0, 10, 20), ("from 0", "from 1", "from 2"))}
    (coordinator,) = {result[2] for result in results}
    assert coordinator.startswith("127.0.0.1:")
    assert int(coordinator.partition(":")[2]) != run.address[1]
    time.sleep(0.1)
    assert run.ends == []


def test_a_condition_of_one_process_is_true_in_all_a_call_later() -> None:
    def work(member: Member) -> Any:
        calls = iter(range(5))
        stop = any_process(lambda: member.index == 1 and next(calls) >= 2)
        return [stop() for _ in range(5)]

    assert Run(2).do(work) == [[False, False, False, True, True]] * 2


def test_nobody_waits_for_the_slowest_at_the_call_itself() -> None:
    """Only at the next: so the answers travel while the step runs."""

    def work(member: Member) -> float:
        stop = any_process(lambda: False)
        time.sleep(0.5 * member.index)
        began = time.monotonic()
        stop()
        return time.monotonic() - began

    assert Run(2).do(work)[0] < 0.3


def test_with_one_process_the_condition_is_itself() -> None:
    def condition() -> bool:
        return True

    assert any_process(condition) is condition
    assert agreed("x") == ("x",)
    with pytest.raises(ValueError, match="alone"), together(ValueError):
        raise ValueError("alone")


@pytest.mark.parametrize("asks_before", [False, True], ids=["at the end", "at the next question"])
def test_an_error_of_one_process_is_one_of_all_and_the_first_shows_it(asks_before: bool) -> None:
    def work(member: Member) -> None:
        with together(ValueError):
            if member.index:
                raise ValueError(f"no file in {member.index}")
            if asks_before:
                agreed(5)

    first, second, third = Run(3).do(work)
    assert isinstance(first, FailedElsewhereError)
    assert str(second) == "no file in 1"
    assert isinstance(third, FailedElsewhereError)


def test_who_does_not_come_is_named_to_all_who_came() -> None:
    run = Run(4, arrival_seconds=0.7)
    for error in run.do(lambda member: None, [run.member(0), run.member(2)]):
        assert isinstance(error, RollCallError)
        assert str(error).startswith(
            "processes 1, 3 of 4 did not arrive within distributed.initialization_timeout_seconds=0.7; here: "
            "process 0 (here, pid 100), process 2 (here, pid 102). "
        )


def test_without_process_0_the_others_say_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    member = Member(Traveller(1, 2, "here", 7, "", ""), lambda status, why: None, heartbeat_seconds=9.0)
    with pytest.raises(RollCallError, match=r"^process 1 could not reach process 0 at 127\.0\.0\.1:\d+ within .*=0\.4"):
        member.arrive(address, arrival_seconds=0.4)


@pytest.mark.parametrize(
    ("index", "changes", "message"),
    [
        (0, {"pid": 5}, r"distributed\.process_id=0 is used twice, by process 0 \(here, pid \d+\) and by process 0"),
        (1, {"count": 3}, r"distributed\.num_processes=3 in process 1 \(here, pid 101\) must be 2, as in process 0"),
        (1, {"config": "d"}, r"process \d \(.*\) and process \d \(.*\) have different configurations; start every"),
        (1, {"version": "jax 2"}, r"process \d \(.*\) has jax \d, but process \d \(.*\) has jax \d; install the same"),
    ],
    ids=["number", "count", "configuration", "version"],
)
def test_processes_that_do_not_belong_together_are_refused(index: int, changes: dict[str, Any], message: str) -> None:
    run = Run(2)
    errors = run.do(lambda member: None, [run.member(0), run.member(index, **changes)])
    for error in errors:
        assert isinstance(error, ValueError)
        assert re.match(message, str(error)), error


def test_what_is_not_of_ours_does_not_disturb_the_roll_call() -> None:
    run = Run(2)
    for junk in (b"GET / HTTP/1.1\r\n\r\n", json.dumps({"hello": {"index": 1}}).encode() + b"\n", b""):
        with socket.create_connection(run.address) as stranger:
            stranger.sendall(junk)
    assert run.do(lambda member: agreed(member.index)) == [(0, 1), (0, 1)]


def test_when_a_process_is_lost_all_others_end_and_are_told_which() -> None:
    run = Run(3)
    members = [run.member(index) for index in range(3)]
    run.do(lambda member: agreed(1), members)
    members[1]._line._connection.shutdown(socket.SHUT_RDWR)
    ends = run.wait_for_ends(3)
    assert [end for end in ends if end[0] != 1] == [
        (index, 1, "process 1 (here, pid 101) has ended; its own output tells why. All others end with it")
        for index in (0, 2)
    ]


def test_a_process_that_cannot_go_on_ends_all_with_its_status() -> None:
    run = Run(2)
    members = [run.member(index) for index in range(2)]
    run.do(lambda member: agreed(1), members)
    members[1].end_all(75, "process 1 was stopped")
    assert set(run.wait_for_ends(3)) >= {(0, 75, "process 1 was stopped"), (1, 75, "process 1 was stopped")}


def ends_of_loops(run: Run, hanging: Sequence[int]) -> Ends:
    """How loops end of which some make two calls and the others three, and then all are silent."""

    def work(member: Member) -> None:
        stop = any_process(lambda: False)
        for _ in range(2 if member.index in hanging else 3):
            stop()

    run.do(work)
    return run.wait_for_ends(run.count)


def test_the_process_that_hangs_is_named() -> None:
    ends = ends_of_loops(Run(3, heartbeat_seconds=1.0), [1])
    why = (
        "process 1 (here, pid 101) hangs: no sign of life within distributed.heartbeat_timeout_seconds=1, and the "
        "others wait. The run ends"
    )
    assert ends == [(index, 1, why) for index in range(3)]


def test_if_none_is_behind_no_process_is_blamed() -> None:
    ends = ends_of_loops(Run(2, heartbeat_seconds=1.0), [0, 1])
    assert [(index, status) for index, status, _ in ends] == [(0, 1), (1, 1)]
    assert ends[0][2].startswith("no process has given a sign of life within distributed.heartbeat_timeout_seconds=1:")


def test_the_process_that_does_not_come_to_its_first_step_is_named() -> None:
    run = Run(3, start_seconds=1.0)

    def work(member: Member) -> None:
        if member.index != 2:
            member.send("has read its data")

    run.do(work)
    why = (
        "process 2 (here, pid 102) hangs: no first step within distributed.start_timeout_seconds=1 (restore, data, "
        "compilation). The run ends"
    )
    assert run.wait_for_ends(3) == [(index, 1, why) for index in range(3)]


def test_once_all_have_begun_the_start_has_no_limit() -> None:
    run = Run(2, start_seconds=1.0)

    def work(member: Member) -> Any:
        any_process(lambda: False)()
        if member.index:
            member.rest()
        time.sleep(2.5)
        return agreed(member.index)

    assert run.do(work) == [(0, 1), (0, 1)]
    assert run.ends == []


def test_why_a_process_ends_is_noted_before_it_does_though_the_disk_may_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "_NOTE_SECONDS", 0.2)
    run = Run(2)
    members = [run.member(index) for index in range(2)]
    noted: list[tuple[str, Ends]] = []
    hangs = threading.Event()

    def work(member: Member) -> None:
        if member.index == 0:
            with last_words(lambda why: pytest.fail("the block has ended")):
                agreed(0)
            member.at_end(lambda why: (noted.append((why, list(run.ends))), hangs.wait(20)))
        else:
            agreed(0)

    run.do(work, members)
    members[1].end_all(1, "process 1 failed")
    assert (0, 1, "process 1 failed") in run.wait_for_ends(3)
    assert [why for why, _ in noted] == ["process 1 failed"]
    assert all(index != 0 for index, _, _ in noted[0][1])
    hangs.set()


def test_no_heartbeat_is_expected_outside_the_loop() -> None:
    run = Run(2, heartbeat_seconds=1.0)

    def work(member: Member) -> Any:
        stop = any_process(lambda: False)
        stop()
        member.rest()
        time.sleep(2.5)
        return agreed(member.index)

    assert run.do(work) == [(0, 1), (0, 1)]
    assert run.ends == []


def test_time_in_which_nobody_could_look_does_not_count() -> None:
    heartbeats = Heartbeats(count=1, timeout_seconds=10, start_seconds=100)
    heartbeats.tick(0.0)
    heartbeats.beat(0)
    heartbeats.tick(3600.0)  # the machine was asleep
    assert heartbeats.silent() == ()
    for second in range(3601, 3610):
        heartbeats.tick(second)
    assert heartbeats.silent() == (0,)
    heartbeats.beat(0)
    assert heartbeats.silent() == ()

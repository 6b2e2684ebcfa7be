"""One run in several processes, started by the launcher as a user starts it."""

import re
from typing import Any

import numpy as np
import pytest

from jaxpar.config import load_config
from jaxpar.events import read_events

Work = Any
"""See conftest.py."""


@pytest.fixture(scope="module")
def two(work: Work) -> tuple[int, str, str]:
    """A run of 12 steps in `two` that nothing interrupts: two processes of two devices."""
    return work.run("two")


def test_two_processes_are_one_run(work: Work, two: tuple[int, str, str]) -> None:
    """With the losses of one process that has all the devices, and each reads its rows alone."""
    status, out, err = two
    assert (status, err) == (0, "")
    shown = [line.removeprefix("[0] ") for line in out.splitlines() if line.startswith("[0] ")]
    assert len(shown) == len(out.splitlines()), "process 1 has nothing to say"
    assert "4 cpu device(s): data 2 × fsdp 2" in shown
    assert work.rows("two", 0) == {0, 1, 2, 3}
    assert work.rows("two", 1) == {4, 5, 6, 7}

    assert work.run("one", options=("--processes", "1"))[0] == 0
    assert work.rows("one", 0) == set(range(8))
    found, expected = work.metrics("two"), work.metrics("one")
    assert [line["step"] for line in found] == [*range(1, 7), 6, *range(7, 13), 12]
    for line, other in zip(found, expected, strict=True):
        assert line == pytest.approx(other, rel=2e-5)
    sample = out.rpartition("sample:\n")[2].replace("[0] ", "")
    assert sample.startswith("one fish ")
    # What was started how is not the run's configuration: it can be run again by any number of processes.
    stored = load_config(work.directory / "two" / "config.toml")
    assert stored == load_config(work.directory / "run.toml", ["run.dir=two"])


def test_a_process_that_hangs_or_is_killed_is_named_and_the_run_goes_on_bit_by_bit(
    work: Work, two: tuple[int, str, str]
) -> None:
    status, _, err = work.run(
        "faults",
        "distributed.heartbeat_timeout_seconds=15",
        options=("--processes", "2", "--max-restarts", "3"),
        events={"1": [[1, 6, "SIGSTOP"]], "2": [[0, 3, "SIGKILL"]]},
    )
    assert status == 0, err
    hung, killed = re.findall(r"^\[launch\] restart .*$", err, re.MULTILINE)
    assert re.search(
        r"restart 1 of 3 .*: process 0 .* ended with exit status 1: process 1 \(\S+, pid \d+\) hangs: no sign of life",
        hung,
    )
    assert re.search(r"restart 2 of 3 .*: process 0 \(pid \d+\) was killed by SIGKILL$", killed)
    history = read_events(work.directory / "faults" / "events.jsonl")
    assert history.problems == ()
    faults = [event["text"] for event in history.events if event["event"] == "fault"]
    # The first is told by process 0, in its last moment, and by the launcher; of its own death process 0 tells nothing.
    assert [text.rpartition(": ")[0].startswith("process 0 (pid") for text in faults] == [False, True, False], faults
    assert re.fullmatch(r"process 1 \(\S+, pid \d+\) hangs: no sign of life .*", faults[0])
    assert re.fullmatch(r"process 0 \(pid \d+\) was killed by SIGKILL", faults[2])
    assert [event["number"] for event in history.events if event["event"] == "restart"] == [1, 2]
    assert re.search(r"^\[1\] process 0 \(\S+, pid \d+\) has ended; its own output tells why", err, re.MULTILINE)
    assert work.metrics("faults") == work.metrics("two")
    found, expected = work.state("faults", 12), work.state("two", 12)
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)


def test_a_preempted_process_stops_all_and_the_run_goes_on_in_another_number_of_them(
    work: Work, two: tuple[int, str, str]
) -> None:
    """SIGUSR1 to one process only, as a cluster sends it; then one process, with the model split over all devices."""
    status, out, err = work.run("moved", events={"1": [[1, 3, "SIGUSR1"]]})
    assert status == 75, err
    assert err.splitlines() == [
        "[1] SIGUSR1: stopping after this step, with the state saved; a further Ctrl-C ends the process at once",
        "[0] the state is saved in moved; the same command goes on",
    ]
    # All learn of it with the next step.
    assert "[0] stopped after step 4 of 12\n" in out
    assert (work.directory / "moved" / "checkpoints" / "4").is_dir()
    layout = ("parallel.data=1", "parallel.fsdp=1", "parallel.tensor=4")
    status, out, err = work.run("moved", *layout, options=("--processes", "1"))
    assert (status, err) == (0, "")
    assert "[0] continuing after step 4 of 12\n[0] changed: parallel.data 2 → 1, parallel.fsdp 2 → 1, parallel.t" in out
    found, expected = work.metrics("moved"), work.metrics("two")
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for line, other in zip(found, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-4)


def test_a_run_whose_checkpoints_are_behind_a_url_goes_on_in_more_processes(
    work: Work, two: tuple[int, str, str], bucket: Any
) -> None:
    """One process is preempted, and two go on."""
    url = "checkpoint.directory=s3://bucket/grown"
    status, _, err = work.run("grown", url, options=("--processes", "1"), events={"1": [[0, 6, "SIGUSR1"]]})
    assert status == 75, err
    names = {name.split("/")[2] for name in bucket.find("bucket/grown")}
    assert names == {"4", "6"}
    status, out, err = work.run("grown", url)
    assert (status, err) == (0, "")
    assert "[0] continuing after step 6 of 12\n" in out
    assert work.rows("grown", 1) == {4, 5, 6, 7}
    found, expected = work.metrics("grown"), work.metrics("two")
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for line, other in zip(found, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-4)
    assert {name.split("/")[2] for name in bucket.find("bucket/grown")} == {"6", "8", "12"}
    assert not (work.directory / "grown" / "checkpoints").exists()
    assert list((work.directory / "grown" / "staging").iterdir()) == []


def test_a_users_error_in_one_process_ends_all_is_shown_once_and_not_repeated(work: Work) -> None:
    """Process 0 alone writes metrics."""
    (work.directory / "damaged").mkdir()
    (work.directory / "damaged" / "metrics.jsonl").write_text("no json\nnor this\n")
    status, _, err = work.run("damaged", options=("--processes", "2", "--max-restarts", "2"))
    assert status == 2
    (line,) = err.splitlines()
    assert re.match(r"\[0\] \S*damaged/metrics\.jsonl, line 1, is not a JSON object with a step", line)

"""The launcher, with processes that are small scripts: what it shows, forwards, names, starts again and returns."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpar import launch
from jaxpar.events import Events, read_events
from jaxpar.launch import main
from jaxpar.run_directory import run_directory

ROOT = Path(__file__).parents[1]

Launch = Callable[..., int]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Launches a script with `index`, `attempt` and `arguments` in place of a run; returns the exit status."""
    (tmp_path / "run.toml").write_text('model = { name = "transformer" }\nparallel = { simulated_devices = 4 }\n')
    monkeypatch.chdir(tmp_path)

    def run(script: str, *options: str, processes: int = 2, overrides: tuple[str, ...] = ()) -> int:
        (tmp_path / "script.py").write_text(_BEFORE + textwrap.dedent(script))
        monkeypatch.setattr(launch, "_PROGRAM", ("-u", "script.py"))
        return main(["--processes", str(processes), *options, "--", "run.toml", *overrides])

    return run


_BEFORE = """
import os, signal, sys, time
assert int(sys.argv[1]) == os.getppid()
arguments = sys.argv[2:]
given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
index = int(given.get("distributed.process_id", 0))
starts = open(f"starts.{index}", "a+")
starts.write("x")
starts.flush()
starts.seek(0)
attempt = len(starts.read())
"""


def test_each_process_gets_its_place_and_its_lines_are_shown_with_it(
    launched: Launch, capfd: pytest.CaptureFixture
) -> None:
    script = 'print(*arguments); print("no newline", end="", file=sys.stderr)'
    assert launched(script, "--devices-per-process", "3", overrides=("run.seed=7",)) == 0
    out, err = capfd.readouterr()
    places = [re.fullmatch(r"\[(\d)\] run\.toml run\.seed=7 (.*)", line) for line in out.splitlines()]
    found = {place[1]: place[2] for place in places if place}
    port = re.search(r"127\.0\.0\.1:(\d+)", found["0"])
    assert port
    assert found == {
        str(index): f'distributed.detect=off distributed.coordinator_address="127.0.0.1:{port[1]}" '
        f"distributed.num_processes=2 distributed.process_id={index} parallel.simulated_devices=6"
        for index in range(2)
    }
    assert sorted(err.splitlines()) == ["[0] no newline", "[1] no newline"]


def test_one_process_is_no_distributed_run(launched: Launch, capfd: pytest.CaptureFixture) -> None:
    assert launched("print(*arguments)", processes=1) == 0
    assert capfd.readouterr().out == "[0] run.toml\n"


@pytest.mark.parametrize(
    ("devices", "ids"), [((), ["[0]", "[1]"]), (("--devices-per-process", "2"), ["[0, 1]", "[2, 3]"])]
)
def test_on_gpus_each_process_has_its_own(
    launched: Launch, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, devices: tuple, ids: list[str]
) -> None:
    monkeypatch.setattr(launch, "expected_platform", lambda parallel: "gpu")
    assert launched('print(given["distributed.local_device_ids"])', *devices) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[{index}] {own}" for index, own in enumerate(ids)]


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("sys.exit(75)", 75),
        ("sys.exit(2)", 2),
        ("sys.exit(130)", 130),
        ("sys.exit(75 if index else 0)", 75),
        ("time.sleep(index); sys.exit(2)", 2),
    ],
)
def test_the_runs_status_is_the_launchers_and_not_a_reason_to_restart(
    launched: Launch, capfd: pytest.CaptureFixture, tmp_path: Path, script: str, status: int
) -> None:
    assert launched(script, "--max-restarts", "3") == status
    assert (tmp_path / "starts.0").read_text() == "x"
    assert capfd.readouterr().err == ""


def test_a_process_that_dies_is_named_with_its_last_lines_and_the_others_end(
    launched: Launch, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_OTHERS_SECONDS", 0.5)
    script = """
    for number in range(20):
        print("line", number)
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)
    """
    began = time.monotonic()
    assert launched(script) == 1
    assert time.monotonic() - began < 20
    err = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"\[launch\] process 1 \(pid \d+\) was killed by SIGKILL", err[0])
    assert err[1] == "[launch] its last lines:"
    assert err[2:-1] == [f"    line {number}" for number in range(5, 20)]
    assert re.fullmatch(r"\[launch\] process 0 \(pid \d+\) did not end within 0.5 s after it and was killed", err[-1])


def test_a_fault_is_started_again_and_each_time_it_is_said_why(
    launched: Launch, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_FIRST_PAUSE_SECONDS", 0.1)
    script = """
    if attempt == 3:
        sys.exit(0)
    if index == attempt - 1:
        print(f"ValueError: attempt {attempt} failed", file=sys.stderr)
        sys.exit(1)
    time.sleep(0.5)
    """
    assert launched(script, "--max-restarts", "5") == 0
    err = capfd.readouterr().err
    restarts = re.findall(r"^\[launch\] (restart .*)$", err, re.MULTILINE)
    assert [re.sub(r"pid \d+", "pid N", restart) for restart in restarts] == [
        "restart 1 of 5 from the last checkpoint in 0.1 s: process 0 (pid N) ended with exit status 1: "
        "ValueError: attempt 1 failed",
        "restart 2 of 5 from the last checkpoint in 0.2 s: process 1 (pid N) ended with exit status 1: "
        "ValueError: attempt 2 failed",
    ]


def test_it_gives_up_after_the_last_restart(
    launched: Launch, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "_FIRST_PAUSE_SECONDS", 0.05)
    assert launched("sys.exit(3)", "--max-restarts", "2") == 1
    assert (tmp_path / "starts.0").read_text() == "xxx"
    assert capfd.readouterr().err.splitlines()[-1] == "[launch] giving up after --max-restarts 2"


def test_what_ends_an_attempt_is_among_the_runs_events(
    launched: Launch, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "_FIRST_PAUSE_SECONDS", 0.05)
    path = tmp_path / "of a run" / "events.jsonl"
    path.parent.mkdir()
    with Events(path) as events:
        events.record("start")
    directory = ('run.dir="of a run"',)
    assert launched("os.kill(os.getpid(), 9)", "--max-restarts", "1", processes=1, overrides=directory) == 1
    found = read_events(path)
    assert found.problems == ()
    told = [(event["event"], event.get("text", event.get("number"))) for event in found.events]
    assert [event for event, _ in told] == ["start", "fault", "restart", "fault"]
    assert re.fullmatch(r"process 0 \(pid \d+\) was killed by SIGKILL", told[1][1])
    assert told[2][1] == 1
    capfd.readouterr()
    with run_directory(str(path.parent), is_writer=True):
        assert launched("sys.exit(1)", processes=1, overrides=directory) == 1
    assert len(read_events(path).events) == 4, "it is another run's now"
    assert "[launch] fault is not in of a run/events.jsonl: run.dir='of a run' is in use" in capfd.readouterr().err


def test_processes_that_do_not_end_after_a_signal_are_killed(
    launched: Launch, capfd: pytest.CaptureFixture, tmp_path: Path
) -> None:
    script = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("ready", "w")
    time.sleep(60)
    """
    sender = _send_when(tmp_path / "ready", signal.SIGTERM)
    bounds = ("checkpoint.timeout_seconds=1", "distributed.heartbeat_timeout_seconds=1")
    assert launched(script, "--max-restarts", "2", processes=1, overrides=bounds) == 1
    sender.join()
    assert re.search(
        r"^\[launch\] process 0 \(pid \d+\) did not end within 2 s \(checkpoint\.timeout_seconds \+ "
        r"distributed\.heartbeat_timeout_seconds\) after SIGTERM and was killed$",
        capfd.readouterr().err,
        re.MULTILINE,
    )


def test_a_reader_that_leaves_does_not_hold_the_run(launched: Launch, tmp_path: Path) -> None:
    assert launched("pass") == 0
    (tmp_path / "script.py").write_text(_BEFORE + 'for _ in range(20000): print("a line of some length")')
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER], env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().endswith("a line of some length\n")
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == ""
    process.stderr.close()


def _send_when(started: Path, number: signal.Signals) -> threading.Thread:
    """Sends this process a signal once the file is there."""

    def send() -> None:
        while not started.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_signals_go_on_to_all(launched: Launch, capfd: pytest.CaptureFixture, tmp_path: Path, name: str) -> None:
    script = """
    def stop(number, frame):
        print("got", signal.Signals(number).name)
        sys.exit(75)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, stop)
    open("ready" if os.path.exists("one") else "one", "w")
    time.sleep(30)
    """
    sender = _send_when(tmp_path / "ready", signal.Signals[name])
    assert launched(script, "--max-restarts", "2") == 75
    sender.join()
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"[0] got {name}", f"[1] got {name}"]
    assert err == f"[launch] {name} goes on to all processes\n"


def test_a_signal_while_it_waits_to_restart_ends_the_wait(
    launched: Launch, capfd: pytest.CaptureFixture, tmp_path: Path
) -> None:
    sender = _send_when(tmp_path / "ended", signal.SIGTERM)
    assert launched('open("ended", "w"); sys.exit(1)', "--max-restarts", "2", processes=1) in (1, 75)
    sender.join()
    assert (tmp_path / "starts.0").read_text() == "x"


_LAUNCHER = """
import sys
from jaxpar import launch
launch._PROGRAM = ("-u", "script.py")
sys.exit(launch.main(["--processes", "2", "--", "run.toml"]))
"""


def test_if_the_launcher_is_killed_so_are_its_processes(launched: Launch, tmp_path: Path) -> None:
    assert launched("pass") == 0
    script = """
from jaxpar.launched import die_with
die_with(int(sys.argv[1]))
open(f"pid.{index}", "w").write(f"{os.getpid()}\\n")
time.sleep(60)
"""
    (tmp_path / "script.py").write_text(_BEFORE + script)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    files = [tmp_path / f"pid.{index}" for index in range(2)]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text().endswith("\n") for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    for file in files:
        status = Path(f"/proc/{int(file.read_text())}/stat")
        while status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX":
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("options", "overrides", "message"),
    [
        ([], ["train.num_stepz=3"], r"unknown key train\.num_stepz"),
        ([], ["distributed.process_id=1"], r"^distributed: the launcher sets the processes' places itself; leave out"),
        (["--processes", "3"], [], r"^--processes 3 must divide parallel\.simulated_devices=4; legal values: 1, 2, 4"),
    ],
    ids=["configuration", "places", "devices"],
)
def test_a_users_error_is_shown_once_and_nothing_is_started(
    launched: Launch, capfd: pytest.CaptureFixture, tmp_path: Path, options: list, overrides: list, message: str
) -> None:
    assert launched("pass", *options, overrides=tuple(overrides)) == 2
    err = capfd.readouterr().err
    assert re.search(message, err), err
    assert len(re.findall(message, err)) == 1
    assert not (tmp_path / "starts.0").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "run.toml"], "the following arguments are required: --processes"),
        (["--processes", "0", "--", "run.toml"], "argument --processes: must be 1 or more"),
        (["--processes", "2", "--max-restarts", "-1", "--", "run.toml"], "'-1' must be a whole number, 0 or more"),
    ],
)
def test_options_that_are_wrong(capsys: pytest.CaptureFixture, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert main(["--processes", "2"]) == 2
    assert capsys.readouterr().err.startswith("usage: python -m jaxpar.launch --processes N -- CONFIG.toml")

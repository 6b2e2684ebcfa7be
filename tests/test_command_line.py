"""What all command lines share: arguments, exit status, one readable message, signals."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxpar import backend, command_line
from jaxpar.command_line import Stopped, StopSignals, UserError, run_command, user_errors
from jaxpar.config import Config, load_config
from jaxpar.parallel.pipeline.divergence import WouldHangError

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.toml")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`run(arguments, command)` with the flag --careful, and a backend that is left as it is."""
    monkeypatch.setattr(backend, "prepare", lambda parallel, runtime: [f"{parallel.simulated_devices} devices"])

    def run(*arguments: str, command: Callable[[Config, Collection[str]], int] = lambda config, flags: 0) -> int:
        return run_command("jaxpar.train", "Trains.", command, arguments, flags=["--careful"])

    return run


def test_a_command_gets_its_configuration_and_flags(run: Callable[..., int], capsys: pytest.CaptureFixture) -> None:
    seen: list[object] = []

    def command(config: Config, flags: Collection[str]) -> int:
        seen.extend((config.train.num_steps, "--careful" in flags))
        return 7

    assert run(QUICKSTART, "train.num_steps=5", "--careful", command=command) == 7
    assert run(QUICKSTART, command=command) == 7
    assert seen == [5, True, 300, False]
    assert capsys.readouterr().out == "8 devices\n" * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: python -m jaxpar.train CONFIG.toml [KEY=VALUE ...]   (--help lists every key)"),
        (["train.num_steps=5"], "usage: python -m jaxpar.train CONFIG.toml"),
        ([QUICKSTART, "--carefull"], "unknown option --carefull; options: --careful, --print-config, --help"),
        ([QUICKSTART.replace("start", "strat")], f"quickstrat.toml does not exist; did you mean {QUICKSTART}?"),
        ([QUICKSTART, "parallel.tensr=2"], "unknown key parallel.tensr (did you mean parallel.tensor?)"),
        ([QUICKSTART, "train.num_steps=many"], "train.num_steps=\"many\" must be a whole number"),
    ],
    ids=["nothing", "no file", "option", "missing file", "key", "type"],
)  # fmt: skip
def test_what_the_user_got_wrong_is_one_message(
    run: Callable[..., int], capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
    def never(config: Config, flags: Collection[str]) -> int:
        raise AssertionError("the command ran")

    assert run(*arguments, command=never) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_errors_of_the_checks_are_the_users_and_others_are_faults(
    run: Callable[..., int], capsys: pytest.CaptureFixture
) -> None:
    def refuses(config: Config, flags: Collection[str]) -> int:
        with user_errors():
            raise ValueError("parallel.tensor=3 must divide model.num_heads=32")

    def breaks(config: Config, flags: Collection[str]) -> int:
        raise ValueError("a fault")

    assert run(QUICKSTART, command=refuses) == 2
    assert capsys.readouterr().err == "parallel.tensor=3 must divide model.num_heads=32\n"
    with pytest.raises(ValueError, match="a fault"):
        run(QUICKSTART, command=breaks)
    with pytest.raises(UserError, match=r"No such file.*nothing\.txt"), user_errors():
        Path("nothing.txt").read_text()


def test_a_pipeline_that_would_hang_is_the_users_error(run: Callable[..., int], capsys: pytest.CaptureFixture) -> None:
    """It shows in the compiled program only."""

    def compiles(config: Config, flags: Collection[str]) -> int:
        raise WouldHangError("the compiled pipeline would hang")

    assert run(QUICKSTART, command=compiles) == 2
    assert capsys.readouterr().err == "the compiled pipeline would hang\n"


def test_ctrl_c_leaves_without_a_traceback(run: Callable[..., int], capsys: pytest.CaptureFixture) -> None:
    def interrupted(config: Config, flags: Collection[str]) -> int:
        raise KeyboardInterrupt

    assert run(QUICKSTART, command=interrupted) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_help_and_print_config_run_nothing(
    run: Callable[..., int], capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    def never(config: Config, flags: Collection[str]) -> int:
        raise AssertionError("the command ran")

    assert run("--help", command=never) == 0
    out = capsys.readouterr().out
    assert out.startswith("Trains.\n")
    assert "Megatron" in out
    assert run(QUICKSTART, "train.num_steps=5", "--print-config", command=never) == 0
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(capsys.readouterr().out)
    assert load_config(resolved) == load_config(QUICKSTART, ["train.num_steps=5"])


@pytest.mark.parametrize("arguments", [["--help"], [QUICKSTART, "--print-config"]], ids=["long", "short"])
def test_a_reader_that_has_seen_enough_is_no_fault(arguments: list[str]) -> None:
    """As `python -m jaxpar.train --help | head -1`."""
    code = f"from jaxpar.command_line import run_command; import sys; sys.exit(run_command('m', '', None, {arguments}))"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.communicate()[1] == b""
    assert process.returncode == 0


def test_a_signal_stops_at_once_or_is_noted(capsys: pytest.CaptureFixture) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopSignals() as signals:
        assert not signals.stop()
        with signals.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.received is signal.SIGTERM
            assert signals.stop()
        with pytest.raises(Stopped, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    with pytest.raises(Stopped, match="SIGINT"), StopSignals():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.set_wakeup_fd(-1) == -1


def test_only_a_later_ctrl_c_kills(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """Not a second SIGTERM, and not the same keystroke that a wrapper forwards."""
    killed: list[int] = []
    clock = [0.0]
    seen = threading.Semaphore(0)

    def monotonic() -> float:
        now = clock[0]
        seen.release()
        return now

    monkeypatch.setattr(command_line, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(command_line.os, "_exit", killed.append)
    with StopSignals() as signals, signals.deferred():
        for now, number in ((0.0, signal.SIGTERM), (0.1, signal.SIGINT), (9.0, signal.SIGTERM)):
            clock[0] = now
            os.kill(os.getpid(), number)
            if number is signal.SIGINT or now == 0.0:
                assert seen.acquire(timeout=30)
        assert not killed
        os.kill(os.getpid(), signal.SIGINT)
        assert seen.acquire(timeout=30)
    assert killed == [130]
    err = capfd.readouterr().err
    assert err.splitlines() == [
        "SIGTERM: stopping after this step, with the state saved; a further Ctrl-C ends the process at once",
        "killed by a second SIGINT",
    ]


_DEADLOCK = """
import ctypes
from jaxpar import command_line
command_line._REPEATED_SECONDS = 0.0
mutex, library = ctypes.create_string_buffer(128), ctypes.CDLL(None)
with command_line.StopSignals() as signals, signals.deferred():
    library.pthread_mutex_lock(mutex)
    print("locked", flush=True)
    library.pthread_mutex_lock(mutex)
"""


def test_the_second_ctrl_c_kills_also_while_no_python_runs() -> None:
    """The main thread waits for itself outside of Python, as for a compilation or for devices that never answer."""
    process = subprocess.Popen(
        [sys.executable, "-c", _DEADLOCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "locked\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith("SIGINT: stopping after this step, with the state saved")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == "killed by a second SIGINT\n"
    finally:
        process.kill()
        process.communicate()

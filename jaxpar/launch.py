"""`python -m jaxpar.launch --processes N [options] -- CONFIG [KEY=VALUE ...]`: a run in several processes of a machine.

Starts `python -m jaxpar.train CONFIG KEY=VALUE ...` N times, as the processes of one run: with simulated devices on the
CPU, or with one GPU each. Every line of theirs is shown with [its process]. SIGINT (Ctrl-C), SIGTERM and SIGUSR1 go on
to all of them, which save and stop; if one process dies, all are stopped, and it is named with its last lines. With
--max-restarts the run then starts again from its last checkpoint. If the launcher itself is killed, so are they.

Exit status: that of the run (0 done, 2 the configuration or the data is wrong, 75 stopped with the state saved), 1 if a
process failed and no restart was left.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from jaxpar.command_line import UserError, show, whole_number
from jaxpar.compiler_flags import expected_platform
from jaxpar.config import Config, ConfigError, load_config
from jaxpar.events import Events
from jaxpar.exit_status import FAULT, INTERRUPTED, STOPPED, USER_ERROR
from jaxpar.run_directory import run_directory

__all__ = ["main"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_LAST_LINES = 15
_POLL_SECONDS = 0.05
_OTHERS_SECONDS = 10.0
"""What the others have to end by themselves, with a message of their own, after one process has died."""
_TOGETHER_SECONDS = 120.0
"""What they have after one has ended as it should, or because of the user's error."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_GLOO = "Expected number of connected peer ranks is"
"""Of lines that gloo writes for each group of devices, from several threads at once, to say that all are connected."""
_PROGRAM = ("-u", "-m", "jaxpar.launched")
"""What Python runs in each process; then come this process's id and the command line of the run."""


@dataclass(frozen=True)
class _Places:
    """How the machine's devices are shared among the processes."""

    count: int
    platform: str
    devices: int | None

    def overrides(self, index: int, port: int) -> list[str]:
        """What one process gets beside the user's KEY=VALUE."""
        result = []
        if self.count > 1:
            result += [
                "distributed.detect=off",
                f'distributed.coordinator_address="127.0.0.1:{port}"',
                f"distributed.num_processes={self.count}",
                f"distributed.process_id={index}",
            ]
        if self.platform == "gpu":
            share = self.devices or 1
            result.append(f"distributed.local_device_ids={list(range(index * share, (index + 1) * share))}")
        elif self.devices is not None:
            result.append(f"parallel.simulated_devices={self.count * self.devices}")
        return result


@dataclass(frozen=True)
class _Outcome:
    """How an attempt ended: the exit status, and why if it failed: one line, and what helps to understand it."""

    status: int
    why: str = ""
    details: tuple[str, ...] = ()


@dataclass
class _Child:
    """A process of the run, and what it said last."""

    index: int
    process: subprocess.Popen[str]
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    last_error: str = ""
    threads: list[threading.Thread] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"process {self.index} (pid {self.process.pid})"

    @property
    def has_failed(self) -> bool:
        """Whether it ended in a way in which a run does not end."""
        return self.process.returncode not in (None, 0, USER_ERROR, STOPPED, INTERRUPTED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        if not command or "=" in command[0] or command[0].startswith("-"):
            raise UserError("usage: python -m jaxpar.launch --processes N -- CONFIG.toml [KEY=VALUE ...]   (--help)")
        # Read here too, so that an error in it is shown once.
        config = load_config(command[0], command[1:])
        places = _places(config, options.processes, options.devices_per_process)
    except (ConfigError, UserError) as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    longest = config.checkpoint.timeout_seconds + config.distributed.heartbeat_timeout_seconds
    return _Launcher(command, places, options.max_restarts, Path(config.run.dir), stop_seconds=longest).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxpar.launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=_positive, required=True, help="how many processes the run has")
    parser.add_argument(
        "--devices-per-process", type=_positive,
        help="simulated CPU devices of each (default: its share of parallel.simulated_devices), or GPUs (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--max-restarts", type=whole_number, default=0, help="how often the run starts again after a fault (default: 0)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CONFIG [KEY=VALUE ...]")
    return parser


def _positive(text: str) -> int:
    number = whole_number(text)
    if number == 0:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def _places(config: Config, count: int, devices: int | None) -> _Places:
    """How `count` processes share this machine.

    Raises:
      UserError: the configuration is not for processes of one machine.
    """
    if sys.platform != "linux":
        raise UserError(f"the launcher needs Linux, whose kernel ends processes with their parent, not {sys.platform}")
    keys = config.distributed
    if keys.coordinator_address or keys.num_processes or keys.process_id >= 0 or keys.local_device_ids:
        raise UserError(
            "distributed: the launcher sets the processes' places itself; leave out distributed.coordinator_address, "
            "distributed.num_processes, distributed.process_id and distributed.local_device_ids"
        )
    platform = expected_platform(config.parallel)
    if platform not in ("cpu", "gpu"):
        raise UserError(
            f"the launcher starts processes on CPUs and NVIDIA GPUs, but JAX takes {platform!r} here, whose processes "
            "the cluster starts, one a host; set parallel.simulated_devices for the CPU"
        )
    simulated = config.parallel.simulated_devices
    if platform == "cpu" and devices is None and simulated % count:
        legal = ", ".join(str(number) for number in range(1, simulated + 1) if simulated % number == 0)
        raise UserError(
            f"--processes {count} must divide parallel.simulated_devices={simulated}; legal values: {legal}; or set "
            "--devices-per-process"
        )
    return _Places(count, platform, devices)


class _Launcher:
    """Starts the processes of a run, watches them, and starts them again.

    `stop_seconds` is how long they may take to end after a signal: a step and a save, each with its own bound.
    """

    def __init__(
        self, command: Sequence[str], places: _Places, max_restarts: int, run_dir: Path, *, stop_seconds: float
    ):
        self._command = command
        self._places = places
        self._max_restarts = max_restarts
        self._run_dir = run_dir.expanduser()
        self._stop_seconds = stop_seconds
        self._children: list[_Child] = []
        self._signals: deque[signal.Signals] = deque()
        self._received: signal.Signals | None = None
        self._stops_at: float | None = None
        self._writing = threading.Lock()

    def run(self) -> int:
        """Runs until the run has ended and no restart is due; returns the exit status."""
        before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        try:
            for restart in range(self._max_restarts + 1):
                outcome = self._attempt()
                if outcome.status != FAULT:
                    return outcome.status
                self._say(outcome.why, *outcome.details)
                self._record("fault", kind="process", text=outcome.why)
                if self._received is not None:
                    self._say(f"not started again after {self._received.name}")
                    return FAULT
                if restart < self._max_restarts:
                    if not self._pause(restart, outcome.why):
                        return STOPPED
                    self._record("restart", number=restart + 1, of=self._max_restarts)
            if self._max_restarts:
                self._say(f"giving up after --max-restarts {self._max_restarts}")
            return FAULT
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(signal.Signals(number))

    def _record(self, event: str, **details: Any) -> None:
        """Notes in the run's events what none of its processes, all of which have ended, could."""
        path = self._run_dir / "events.jsonl"
        if not path.exists():
            return
        try:
            with run_directory(str(self._run_dir), is_writer=True), Events(path) as events:
                events.record(event, **details)
        except (ValueError, OSError) as error:  # another run is there, or the disk is full
            self._say(f"{event} is not in {path}: {error}")

    def _pause(self, restart: int, why: str) -> bool:
        """Waits before a restart, longer each time; False if a signal ends the wait."""
        seconds = min(_FIRST_PAUSE_SECONDS * 2**restart, _LONGEST_PAUSE_SECONDS)
        self._say(f"restart {restart + 1} of {self._max_restarts} from the last checkpoint in {seconds:g} s: {why}")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._signals:
                self._say(f"{self._signals[0].name}: not started again; the same command goes on")
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _attempt(self) -> _Outcome:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._children = []
        try:
            for index in range(self._places.count):
                self._children.append(_Child(index, self._start(index, port)))
            for child in self._children:
                assert child.process.stdout is not None
                assert child.process.stderr is not None
                for source, sink in ((child.process.stdout, sys.stdout), (child.process.stderr, sys.stderr)):
                    child.threads.append(threading.Thread(target=self._show, args=(child, source, sink), daemon=True))
                    child.threads[-1].start()
            return self._watch()
        finally:
            self._end_children()

    def _start(self, index: int, port: int) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, *_PROGRAM, str(os.getpid()), *self._command, *self._places.overrides(index, port)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip

    def _show(self, child: _Child, source: TextIO, sink: TextIO) -> None:
        """Passes on what a process writes, line by line."""
        with source:
            for line in source:
                if _GLOO in line:
                    continue
                text = line.rstrip("\n")
                child.last_lines.append(text)
                if source is child.process.stderr:
                    child.last_error = text
                # Whoever reads it may have seen enough; the process must still be able to write.
                with self._writing:
                    show(f"[{child.index}] {text}\n", sink)

    def _watch(self) -> _Outcome:
        """Waits until all have ended, or those that are left after one has must be made to."""
        first: _Child | None = None
        deadline = 0.0
        while True:
            while self._signals:
                self._forward(self._signals.popleft())
            ended = [child for child in self._children if child.process.poll() is not None]
            failed = [child for child in ended if child.has_failed]
            if failed and (first is None or not first.has_failed):
                # Of several at once it is the one that was killed: the others end because of it.
                first = min(failed, key=lambda child: (child.process.returncode >= 0, child.index))
                deadline = time.monotonic() + _OTHERS_SECONDS
            elif ended and first is None:
                first = ended[0]
                deadline = time.monotonic() + _TOGETHER_SECONDS
            if len(ended) == len(self._children):
                break
            if first is not None and time.monotonic() > deadline:
                break
            if self._stops_at is not None and time.monotonic() > self._stops_at:
                return self._too_slow(left=[child for child in self._children if child not in ended])
            time.sleep(_POLL_SECONDS)
        assert first is not None
        left = [child for child in self._children if child.process.poll() is None]
        self._end_children()
        return self._outcome(first, left)

    def _outcome(self, first: _Child, left: Sequence[_Child]) -> _Outcome:
        statuses = {child.process.returncode for child in self._children}
        if self._received is not None and first.process.returncode == -self._received:
            return _Outcome(STOPPED)
        if not first.has_failed and not left:
            return _Outcome(next(status for status in (USER_ERROR, INTERRUPTED, STOPPED, 0) if status in statuses))
        status = first.process.returncode
        ended = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        why = f"{first.name} {ended}" + (f": {first.last_error}" if status > 0 and first.last_error else "")
        names = ", ".join(child.name for child in left)
        details = [f"its last lines:{''.join(f'{chr(10)}    {line}' for line in first.last_lines)}"]
        if not first.has_failed:
            why = f"{names} did not end within {_TOGETHER_SECONDS:g} s after {first.name}"
        elif left:
            details.append(f"{names} did not end within {_OTHERS_SECONDS:g} s after it and was killed")
        return _Outcome(FAULT, why, tuple(details))

    def _too_slow(self, left: Sequence[_Child]) -> _Outcome:
        assert self._received is not None
        names = ", ".join(child.name for child in left)
        self._end_children()
        return _Outcome(
            FAULT,
            f"{names} did not end within {self._stop_seconds:g} s (checkpoint.timeout_seconds + "
            f"distributed.heartbeat_timeout_seconds) after {self._received.name} and was killed",
        )

    def _forward(self, number: signal.Signals) -> None:
        if self._received is None:
            self._received, self._stops_at = number, time.monotonic() + self._stop_seconds
        self._say(f"{number.name} goes on to all processes")
        for child in self._children:
            child.process.send_signal(number)

    def _end_children(self) -> None:
        """Kills what is left, and waits until everything that was written is shown."""
        for child in self._children:
            # The group: something that a process has started may hold its output open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
            for thread in child.threads:
                thread.join()

    def _say(self, *lines: str) -> None:
        with self._writing:
            show("".join(f"[launch] {line}\n" for line in lines), sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

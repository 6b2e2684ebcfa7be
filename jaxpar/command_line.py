"""What the command lines share: arguments, exit status, signals, and what is set before JAX starts."""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from jaxpar.config import Config, ConfigError, dump_toml, help_text, load_config
from jaxpar.exit_status import FAULT, INTERRUPTED, STOPPED, USER_ERROR

if TYPE_CHECKING:
    from jaxpar.member import Member

__all__ = [
    "StopSignals",
    "Stopped",
    "UserError",
    "run_command",
    "show",
    "user_errors",
    "whole_number",
]

_SHOW_CURSOR = b"\x1b[?25h\r\n"
_REPEATED_SECONDS = 0.5
_LOST_SECONDS = 3.0
_LAST_WORD_SECONDS = 0.3
_LONGEST_REASON = 300
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_USER_ERRORS = (ValueError, FileNotFoundError, NotADirectoryError, PermissionError)

Command = Callable[[Config, Collection[str]], int]
"""What an entry point does with a configuration and the options; returns the exit status."""


class UserError(Exception):
    """Something that the user can put right; its text is all that is shown."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns a ValueError or a missing file inside into a `UserError`: for checks before anything is computed.

    Of several processes none goes on if one has such an error.
    """
    from jaxpar.parallel.agreement import together

    try:
        with together(*_USER_ERRORS):
            yield
    except _USER_ERRORS as error:
        raise UserError(str(error)) from error


def run_command(
    module: str,
    description: str | None,
    command: Command,
    arguments: Sequence[str],
    *,
    flags: Sequence[str] = (),
    several_processes: bool = False,
) -> int:
    """Loads the configuration that `arguments` name, prepares the backend, and runs `command` on it and the options.

    `flags` are the options that the command knows beside --help and --print-config; `several_processes` says whether it
    can run in several at once. Returns the exit status.
    """
    options = [argument for argument in arguments if argument.startswith("-")]
    rest = [argument for argument in arguments if not argument.startswith("-")]
    try:
        if {"-h", "--help"} & set(options):
            show(f"{(description or '').strip()}\n\n{help_text()}\n")
            return 0
        known = (*flags, "--print-config", "--help")
        if unknown := [option for option in options if option not in known]:
            raise UserError(f"unknown option {unknown[0]}; options: {', '.join(known)}")
        if not rest or "=" in rest[0]:
            raise UserError(f"usage: python -m {module} CONFIG.toml [KEY=VALUE ...]   (--help lists every key)")
        config = load_config(rest[0], rest[1:])
        if "--print-config" in options:
            show(dump_toml(config))
            return 0
        if several_processes:
            return _run_joined(command, config, options)
        if config.distributed.coordinator_address or config.distributed.num_processes > 1:
            raise UserError(
                f"distributed: {module} runs in one process; leave out distributed.coordinator_address and "
                "distributed.num_processes (parallel.simulated_devices stands in for devices that are not here)"
            )
        _prepare(config)
        return _run(command, config, options)
    except (ConfigError, UserError) as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    except Stopped as stopped:
        print(f"stopped by {stopped}; nothing is lost, the same command goes on", file=sys.stderr)
        return STOPPED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(command: Command, config: Config, options: Collection[str]) -> int:
    """The command, of which one mistake of a user shows only in what is compiled, on all processes alike."""
    from jaxpar.parallel.pipeline.divergence import WouldHangError

    try:
        return command(config, options)
    except WouldHangError as error:
        raise UserError(str(error)) from error


def _run_joined(command: Command, config: Config, options: Collection[str]) -> int:
    """Runs the command as one of the run's processes; what ends it alone ends all of them."""
    from jaxpar.member import Member, RollCallError
    from jaxpar.parallel.agreement import FailedElsewhereError
    from jaxpar.processes import joined, local_parallel, placeless

    with ExitStack() as opened:
        try:
            with user_errors():
                member: Member | None = opened.enter_context(joined(config, _end_process))
        except RollCallError as error:
            print(error, file=sys.stderr)
            return FAULT
        try:
            with user_errors():
                local = config if member is None else local_parallel(config, member.count)
            _prepare(local, is_shown=member is None or member.index == 0)
            return _run(command, placeless(config), options)
        except FailedElsewhereError:
            return USER_ERROR
        except UserError as error:
            print(error, file=sys.stderr)
            return USER_ERROR
        except BaseException as error:
            if member is not None:
                _end_all(member, error)
            raise


def _end_all(member: "Member", error: BaseException) -> None:
    """Ends all processes of the run, because this one cannot go on."""
    if isinstance(error, Stopped):
        member.end_all(STOPPED, f"{member.name} was stopped by {error}; nothing is lost, the same command goes on")
    if isinstance(error, KeyboardInterrupt):
        member.end_all(INTERRUPTED, f"{member.name} was interrupted")
    # If another process is lost, its end is the reason, and what follows from it is not worth a traceback.
    if not member.wait_for_end(_LOST_SECONDS):
        traceback.print_exception(error)
        sys.stderr.flush()
        why = f"{member.name} failed: {type(error).__name__}: {error}".splitlines()[0]
        member.end_all(FAULT, why[:_LONGEST_REASON], is_said=True)


def _prepare(config: Config, *, is_shown: bool = True) -> None:
    from jaxpar.backend import prepare

    with user_errors():
        lines = prepare(config.parallel, config.runtime)
    if is_shown:
        print(*lines, sep="\n", end="\n" * bool(lines), flush=True)


def _end_process(status: int, why: str) -> None:
    """Ends this process, from whatever thread, with a last word."""
    if why:
        print(why, file=sys.stderr, flush=True)
    # The process that is lost ends first, so that who watches them all sees which one it was.
    time.sleep(_LAST_WORD_SECONDS)
    if os.isatty(1):
        os.write(1, _SHOW_CURSOR)
    os._exit(status)


def show(text: str, sink: TextIO | None = None) -> None:
    """Writes to `sink` (standard output unless given), whose reader may have left."""
    sink = sys.stdout if sink is None else sink
    try:
        print(text, end="", file=sink, flush=True)
    except BrokenPipeError:
        # The reader (`head`, `less`) has seen enough; Python's own flush at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sink.fileno())


def whole_number(text: str) -> int:
    """An option's value, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 0 or more")
    return int(text)


class Stopped(BaseException):
    """A signal has arrived where stopping at once loses nothing."""


class StopSignals:
    """Takes SIGINT (Ctrl-C), SIGTERM and SIGUSR1 (preemption) while it is entered, in the main thread.

    The first one raises `Stopped`, or inside `deferred()` is only noted in `received`. A further Ctrl-C ends the
    process at once. A thread reads the signals from a pipe, since Python itself runs handlers between two of its own
    instructions: a compilation, or a wait for devices that never answer, would keep even the second Ctrl-C waiting.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._raised = False
        self._deferred = False

    def __enter__(self) -> Self:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._previous_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, self._handle) for number in _STOPS}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._write_end)
        self._thread.join()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """A block that looks at `received` itself, where it can stop with its state saved."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def stop(self) -> bool:
        """Whether a signal has arrived."""
        return self.received is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        if not self._deferred and not self._raised:
            self._raised = True
            raise Stopped(self.received.name)

    def _watch(self) -> None:
        first: float | None = None
        while number := os.read(self._read_end, 1):
            if number[0] not in self._previous:
                continue
            name = signal.Signals(number[0]).name
            if first is None:
                first = time.monotonic()
                self.received = self.received or signal.Signals(number[0])
                ends = "stopping after this step, with the state saved" if self._deferred else "stopping"
                print(f"{name}: {ends}; a further Ctrl-C ends the process at once", file=sys.stderr, flush=True)
            # Wrappers forward the terminal's Ctrl-C, so that one keystroke can arrive twice.
            elif number[0] == signal.SIGINT and time.monotonic() - first > _REPEATED_SECONDS:
                print(f"killed by a second {name}", file=sys.stderr, flush=True)
                if os.isatty(1):
                    os.write(1, _SHOW_CURSOR)
                os._exit(128 + number[0])
        os.close(self._read_end)

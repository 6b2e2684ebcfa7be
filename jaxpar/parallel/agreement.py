"""What the processes of a run decide together, on their hosts: devices take no part, and no step waits for an answer.

Every process must ask the same questions in the same order. Control flow that depends only on agreed values does so by
itself.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import jax

__all__ = [
    "Channel",
    "FailedElsewhereError",
    "active",
    "agreed",
    "any_process",
    "failures",
    "heartbeats",
    "last_words",
    "of_the_first",
    "rest",
    "together",
]

T = TypeVar("T")

_FAILED = {"failed": True}


class FailedElsewhereError(Exception):
    """Another process has found an error, and shows it."""


class Channel(Protocol):
    """What connects the processes; `jaxpar.processes` makes one."""

    @property
    def index(self) -> int:
        """This process, counted from 0."""

    @property
    def count(self) -> int:
        """All processes."""

    def send(self, value: Any, *, is_heartbeat: bool = False) -> int:
        """Gives this process's value (anything that JSON can hold) to all; returns the number of the question."""

    def answers(self, number: int) -> list[Any]:
        """Waits for everyone's value, and returns them in the order of the processes; once a number."""

    def rest(self) -> None:
        """No more heartbeats are expected of this process."""

    def at_end(self, note: Callable[[str], None] | None) -> None:
        """`note(why)` is called, for a moment, before this process is ended because another one is lost."""


_active: ContextVar[Channel | None] = ContextVar("channel", default=None)


@contextlib.contextmanager
def active(channel: Channel) -> Iterator[None]:
    """A block in which `channel` connects the processes."""
    token = _active.set(channel)
    try:
        yield
    finally:
        _active.reset(token)


def agreed(value: T) -> tuple[T, ...]:
    """Every process's `value`, in the order of the processes: the same everywhere. Waits for all of them.

    >>> agreed(3)
    (3,)
    """
    channel = _active.get()
    if channel is None:
        assert jax.process_count() == 1, "jaxpar.processes.joined connects the processes of a run"
        return (value,)
    return tuple(_answers(channel, channel.send(value)))


def of_the_first(value: T) -> T:
    """The first process's `value`: what it reads in a directory, all others take from it."""
    return agreed(value)[0]


def failures(message: str | None) -> list[str]:
    """The messages of those processes that have one, each with its process where there are several."""
    messages = agreed(message)
    if len(messages) == 1:
        return [text for text in messages if text]
    return [f"process {index}: {text}" for index, text in enumerate(messages) if text]


@contextlib.contextmanager
def together(*errors: type[Exception]) -> Iterator[None]:
    """A block in which an error of one process is an error of all.

    Whatever the others ask next, they get `FailedElsewhereError`, at the latest at the end of the block. If several
    processes fail, the first of them has the error, so that it is shown once.
    """
    channel = _active.get()
    if channel is None:
        yield
        return
    try:
        yield
    except errors as error:
        if channel.answers(channel.send(_FAILED)).index(_FAILED) != channel.index:
            raise FailedElsewhereError from error
        raise
    agreed(None)


def any_process(condition: Callable[[], bool]) -> Callable[[], bool]:
    """A function that is true where `condition` was true in some process at the call before; each call is a heartbeat.

    All processes get the same answer at the same call. The answers are a call late so that nobody waits for them: they
    travel while the step runs. With one process it is `condition` itself.
    """
    channel = _active.get()
    if channel is None:
        return condition
    before: list[int] = []

    def any_was_true() -> bool:
        before.append(channel.send(condition(), is_heartbeat=True))
        return len(before) > 1 and any(_answers(channel, before.pop(0)))

    return any_was_true


@contextlib.contextmanager
def last_words(note: Callable[[str], None]) -> Iterator[None]:
    """A block in which `note(why)` is called, on another thread, before this process ends because another is lost."""
    channel = _active.get()
    if channel is None:
        yield
        return
    channel.at_end(note)
    try:
        yield
    finally:
        channel.at_end(None)


@contextlib.contextmanager
def heartbeats() -> Iterator[None]:
    """A block around a loop that calls what `any_process` gives; no heartbeats are expected after it."""
    yield
    rest()


def rest() -> None:
    """Says that this process waits for something that has a bound of its own: it is watched again from its next
    heartbeat on."""
    channel = _active.get()
    if channel is not None:
        channel.rest()


def _answers(channel: Channel, number: int) -> list[Any]:
    answers = channel.answers(number)
    if _FAILED in answers:
        raise FailedElsewhereError
    return answers

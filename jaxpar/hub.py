"""The server between the processes of a run, on a thread beside process 0's loop.

It calls the roll before JAX starts, since JAX ends a process with a core dump if another one does not come. Then it
carries what the processes agree on, listens to their heartbeats, and when one is lost tells all others to end, and why.
Messages are lines of JSON.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from jaxpar.exit_status import FAULT
from jaxpar.heartbeat import Heartbeats
from jaxpar.line import Line, Traveller

__all__ = ["Hub"]

_TICK_SECONDS = 0.5
_CLOSING_SECONDS = 2.0


class Hub:
    """The server, on a thread of process 0. `start` it before any process, its own too, connects."""

    def __init__(
        self,
        listener: socket.socket,
        count: int,
        *,
        arrival_seconds: float,
        heartbeat_seconds: float,
        start_seconds: float,
    ) -> None:
        self._listener = listener
        self._count = count
        self._arrival_seconds = arrival_seconds
        self._heartbeats = Heartbeats(count=count, timeout_seconds=heartbeat_seconds, start_seconds=start_seconds)
        self._heartbeat_seconds, self._start_seconds = heartbeat_seconds, start_seconds
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._travellers: dict[int, Traveller] = {}
        self._lines: dict[int, Line] = {}
        self._newcomers: set[Line] = set()
        self._gone: set[int] = set()
        self._pinged_at = 0.0
        self._open_questions: dict[int, dict[int, Any]] = {}

    def start(self) -> None:
        """Serves until every process has said goodbye, or one is lost."""
        threading.Thread(target=self._run, name="hub", daemon=True).start()

    def _run(self) -> None:
        end = self._call_roll()
        if end is not None:
            self._refuse(end)
        self._selector.unregister(self._listener)
        if end is None:
            address, family = self._listener.getsockname()[0], self._listener.family
            with socket.create_server((address, 0), family=family) as free:
                port = free.getsockname()[1]
            self._tell_all({"go": port, "roll": [str(self._travellers[index]) for index in range(self._count)]})
        self._listener.close()
        while end is None and len(self._gone) < self._count:
            end = self._serve_once()
        if end is not None and "end" in end:
            self._tell_all(end)
        self._close()

    def _close(self) -> None:
        """Closes every line, once its other end has had time to read what was sent."""
        for line in self._lines.values():
            line.finish()
        deadline = time.monotonic() + _CLOSING_SECONDS
        while self._selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                line = key.fileobj  # type: ignore[assignment]
                if line.receive() is None:
                    self._selector.unregister(line)
                    line.close()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        for line in self._lines.values():
            line.close()
        self._selector.close()

    def _refuse(self, refusal: dict[str, Any]) -> None:
        """Tells those who have come, and for a while those who still come, process 0 itself perhaps among them."""
        for line in {*self._lines.values(), *self._newcomers}:
            line.send(refusal)
        deadline = time.monotonic() + _CLOSING_SECONDS
        self._listener.settimeout(_TICK_SECONDS)
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                line = Line(self._listener.accept()[0])
                line.send(refusal)
                self._selector.register(line, selectors.EVENT_READ)

    def _call_roll(self) -> dict[str, Any] | None:
        """Waits for everyone; a refusal if somebody does not come, or two do not agree."""
        deadline = time.monotonic() + self._arrival_seconds
        while len(self._travellers) < self._count:
            left = deadline - time.monotonic()
            if left <= 0:
                return {"refused": self._missing(), "is_fault": True}
            for key, _ in self._selector.select(min(left, _TICK_SECONDS)):
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    line = Line(connection)
                    self._newcomers.add(line)
                    self._selector.register(line, selectors.EVENT_READ)
                    continue
                line = key.fileobj  # type: ignore[assignment]
                messages = line.receive()
                if messages is None:
                    self._forget(line)
                for message in messages or ():
                    if disagreement := self._arrive(line, message):
                        return {"refused": disagreement, "is_fault": False}
        for line in list(self._newcomers):
            self._forget(line)
        return None

    def _arrive(self, line: Line, message: Any) -> str | None:
        """Notes who has come; what is wrong, if two processes cannot belong to one run."""
        try:
            new = Traveller(**message["hello"])
        except (TypeError, KeyError):
            self._forget(line)
            return None
        if new.count != self._count:
            return (
                f"distributed.num_processes={new.count} in {new} must be {self._count}, as in process 0; "
                "start every process with the same number"
            )
        if (other := self._travellers.get(new.index)) is not None:
            return (
                f"distributed.process_id={new.index} is used twice, by {other} and by {new}; give each process its "
                f"own, from 0 to {self._count - 1}"
            )
        first = next(iter(self._travellers.values()), new)
        if new.version != first.version:
            return f"{new} has {new.version}, but {first} has {first.version}; install the same versions everywhere"
        if new.config != first.config:
            return f"{new} and {first} have different configurations; start every process with the same one"
        self._travellers[new.index] = new
        self._lines[new.index] = line
        self._newcomers.discard(line)
        return None

    def _missing(self) -> str:
        missing = [index for index in range(self._count) if index not in self._travellers]
        came = ", ".join(str(self._travellers[index]) for index in sorted(self._travellers))
        return (
            f"{_processes(missing)} of {self._count} did not arrive within "
            f"distributed.initialization_timeout_seconds={self._arrival_seconds:g}; here: {came}. Look at the output "
            "of the missing, and whether they can reach distributed.coordinator_address"
        )

    def _serve_once(self) -> dict[str, Any] | None:
        """Handles what has come; the end, if there is one."""
        for key, _ in self._selector.select(_TICK_SECONDS):
            line: Line = key.fileobj  # type: ignore[assignment]
            index = next(index for index, known in self._lines.items() if known is line)
            messages = line.receive()
            for message in messages or ():
                if (end := self._handle(index, message)) is not None:
                    return end
            if messages is None:
                self._selector.unregister(line)
                if index not in self._gone:
                    why = f"{self._travellers[index]} has ended; its own output tells why. All others end with it"
                    return {"end": FAULT, "why": why}
        now = time.monotonic()
        self._heartbeats.tick(now)
        if now >= self._pinged_at + _TICK_SECONDS:
            self._pinged_at = now
            self._tell_all({"ping": True})
        if silent := self._heartbeats.silent():
            return {"end": FAULT, "why": self._hanging(silent), "silent": silent}
        if late := self._heartbeats.late():
            # Those who wait for an answer are not the ones that hang, unless all wait for the devices.
            answered = {index for answers in self._open_questions.values() for index in answers}
            hanging = [index for index in late if index not in answered] or late
            return {"end": FAULT, "why": self._not_started(hanging), "silent": hanging}
        return None

    def _handle(self, index: int, message: dict[str, Any]) -> dict[str, Any] | None:
        if "end" in message:
            return message
        if "bye" in message:
            self._gone.add(index)
            self._heartbeats.rest(index)
        elif "rest" in message:
            self._heartbeats.rest(index)
        else:
            if message["is_heartbeat"]:
                self._heartbeats.beat(index)
            number = message["number"]
            answers = self._open_questions.setdefault(number, {})
            answers[index] = message["value"]
            if len(answers) == self._count:
                del self._open_questions[number]
                self._tell_all({"number": number, "answers": [answers[i] for i in range(self._count)]})
        if self._gone and (waiting := [i for answers in self._open_questions.values() for i in answers]):
            gone = ", ".join(str(self._travellers[i]) for i in sorted(self._gone))
            return {"end": FAULT, "why": f"{gone} has finished, but {_processes(sorted(set(waiting)))} waits for it"}
        return None

    def _hanging(self, silent: Sequence[int]) -> str:
        seconds = f"distributed.heartbeat_timeout_seconds={self._heartbeat_seconds:g}"
        if len(silent) == self._count:
            return (
                f"no process has given a sign of life within {seconds}: the devices wait for each other for ever, or "
                "a step, an evaluation or a save takes longer than that"
            )
        return f"{self._who_hang(silent)}: no sign of life within {seconds}, and the others wait. The run ends"

    def _not_started(self, late: Sequence[int]) -> str:
        seconds = f"distributed.start_timeout_seconds={self._start_seconds:g}"
        return f"{self._who_hang(late)}: no first step within {seconds} (restore, data, compilation). The run ends"

    def _who_hang(self, indices: Sequence[int]) -> str:
        names = ", ".join(str(self._travellers[index]) for index in indices)
        return f"{names} {'hangs' if len(indices) == 1 else 'hang'}"

    def _forget(self, line: Line) -> None:
        self._selector.unregister(line)
        line.close()
        self._newcomers.discard(line)
        for index in [index for index, known in self._lines.items() if known is line]:
            del self._lines[index], self._travellers[index]

    def _tell_all(self, message: dict[str, Any]) -> None:
        for index, line in self._lines.items():
            if index not in self._gone:
                line.send(message)


def _processes(indices: Sequence[int]) -> str:
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"

"""A process's end of the line to the hub."""

import faulthandler
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from jaxpar.exit_status import FAULT
from jaxpar.line import Line, Traveller

__all__ = ["Member", "RollCallError"]


_NOTE_SECONDS = 2.0


class RollCallError(RuntimeError):
    """The processes of a run did not find each other."""


class Member:
    """A process's end of the line: the `jaxpar.parallel.agreement.Channel` between the processes.

    `end_process(status, why)` ends this process at once: it is called on the thread that listens, when the run is over
    because some process is lost.
    """

    def __init__(self, traveller: Traveller, end_process: Callable[[int, str], None], *, heartbeat_seconds: float):
        self.index, self.count = traveller.index, traveller.count
        self.name = str(traveller)
        self._traveller = traveller
        self._end_process = end_process
        self._heartbeat_seconds = heartbeat_seconds
        self.coordinator = ""
        """Where JAX's coordinator is to be, once all have arrived."""
        self._first = "process 0"
        self._asked = 0
        self._answers: dict[int, list[Any]] = {}
        self._news = threading.Condition()
        self._leaving = False
        self._is_said = False
        self._ended = threading.Event()
        self._note: Callable[[str], None] | None = None

    def arrive(self, address: tuple[str, int], *, arrival_seconds: float) -> None:
        """Connects, and waits until all processes have.

        Raises:
          RollCallError: some process did not come in time.
          ValueError: the processes do not belong to one run.
        """
        deadline = time.monotonic() + arrival_seconds
        self._line = self._connect(address, deadline, arrival_seconds)
        self._line.send({"hello": asdict(self._traveller)})
        # The hub says who is missing; only if it is silent too must this end judge for itself.
        self._line.set_timeout(max(deadline - time.monotonic(), 0.0) + 10.0)
        answer = next(self._messages(), None)
        if answer is None:
            self._line.close()
            raise RollCallError(f"process 0 at {address[0]}:{address[1]} ended, or fell silent, at the roll call")
        if "refused" in answer:
            self._line.close()
            raise (RollCallError if answer["is_fault"] else ValueError)(answer["refused"])
        self._first = answer["roll"][0]
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        self.coordinator = f"{host}:{answer['go']}"
        self._line.set_timeout(max(self._heartbeat_seconds, 5.0))
        threading.Thread(target=self._listen, name="hub's line", daemon=True).start()

    def _connect(self, address: tuple[str, int], deadline: float, arrival_seconds: float) -> Line:
        while True:
            try:
                return Line(socket.create_connection(address, timeout=max(deadline - time.monotonic(), 0.1)))
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RollCallError(
                        f"process {self.index} could not reach process 0 at {address[0]}:{address[1]} within "
                        f"distributed.initialization_timeout_seconds={arrival_seconds:g} ({error}); look at the output "
                        "of process 0, and whether this host can reach distributed.coordinator_address"
                    ) from error
            time.sleep(0.1)

    def send(self, value: Any, *, is_heartbeat: bool = False) -> int:
        """See `Channel`."""
        self._asked += 1
        self._line.send({"number": self._asked, "value": value, "is_heartbeat": is_heartbeat})
        return self._asked

    def answers(self, number: int) -> list[Any]:
        """See `Channel`."""
        with self._news:
            self._news.wait_for(lambda: number in self._answers)
            return self._answers.pop(number)

    def rest(self) -> None:
        """This process leaves its loop: no more heartbeats are expected of it."""
        self._line.send({"rest": True})

    def at_end(self, note: Callable[[str], None] | None) -> None:
        """See `Channel`."""
        self._note = note

    def end_all(self, status: int, why: str, *, is_said: bool = False) -> None:
        """Ends this process and all others, which cannot go on without it, with `status`.

        All say `why`; this one does not if it has said so already.
        """
        self._is_said = is_said
        self._line.send({"end": status, "why": why})
        self.wait_for_end(5.0)
        self._end_process(status, "")

    def wait_for_end(self, seconds: float) -> bool:
        """Waits until the run is declared over, which ends this process; returns whether it is."""
        return self._ended.wait(seconds)

    def leave(self) -> None:
        """Says goodbye: this process ends as it should."""
        self._leaving = True
        self._line.send({"bye": True})

    def _listen(self) -> None:
        self._hear()
        self._line.close()

    def _hear(self) -> None:
        """Handles what comes, until the run is over or the line is closed."""
        for message in self._messages():
            if "answers" in message:
                with self._news:
                    self._answers[message["number"]] = message["answers"]
                    self._news.notify_all()
            elif "end" in message:
                if self.index in message.get("silent", ()):
                    # What it hangs in: the stack of its loop is in there.
                    faulthandler.dump_traceback()
                self._end(message["end"], message["why"])
                return
        if self._line.fell_silent:
            seconds = f"distributed.heartbeat_timeout_seconds={self._heartbeat_seconds:g}"
            self._end(FAULT, f"{self._first} hangs: no sign of life within {seconds}. The run ends")
        else:
            self._end(FAULT, f"{self._first} has ended; its own output tells why. All others end with it")

    def _messages(self) -> Iterator[dict[str, Any]]:
        """What comes, until the line is closed or falls silent."""
        while (messages := self._line.receive()) is not None:
            yield from messages

    def _end(self, status: int, why: str) -> None:
        if not self._leaving:
            self._ended.set()
            if self._note is not None:
                # Apart: what this process hangs in may be the disk on which it is noted.
                thread = threading.Thread(target=self._note, args=(why,), daemon=True)
                thread.start()
                thread.join(_NOTE_SECONDS)
            self._end_process(status, "" if self._is_said else why)

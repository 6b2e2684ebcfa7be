"""One connection between a process of a run and the hub, and what a process says of itself on it."""

import contextlib
import json
import socket
import threading
from dataclasses import dataclass
from typing import Any

__all__ = ["Line", "Traveller"]


@dataclass(frozen=True)
class Traveller:
    """What a process says of itself when it arrives."""

    index: int
    count: int
    host: str
    pid: int
    version: str
    config: str
    """Hash of what must be alike in all processes."""

    def __str__(self) -> str:
        return f"process {self.index} ({self.host}, pid {self.pid})"


class Line:
    """A connection that carries one JSON value a line."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._received = b""
        self._sending = threading.Lock()
        self.fell_silent = False

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Any) -> bool:
        """Returns False if nobody is there any more."""
        try:
            with self._sending:
                self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[Any] | None:
        """The messages that have come. Waits for some bytes; None if the line is closed, silent, or not of ours."""
        try:
            received = self._connection.recv(1 << 16)
        except TimeoutError:
            self.fell_silent = True
            return None
        except OSError:
            return None
        if not received:
            return None
        *lines, self._received = (self._received + received).split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            return None

    def set_timeout(self, seconds: float) -> None:
        self._connection.settimeout(seconds)

    def finish(self) -> None:
        """Says that nothing more will be sent; what is on its way still arrives."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._connection.close()

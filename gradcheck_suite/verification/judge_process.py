"""The second process as its parent has it.

It imports torch and JAX, which takes seconds. So a command starts it before it imports them itself; nothing heavy is
imported here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection

from gradcheck_suite.run.processes import start_process

SERVE = "gradcheck_suite.verification.ahead"
"""The module whose `main` the process runs."""
LIMIT_S = 300
"""Seconds after which a process that neither reads nor answers is given up. It may judge a case for two minutes."""


class Judge:
    """The process: it answers messages in the order in which they are sent, once it has started.

    A loop may close the socket, or fork this process: then the process is gone, as where it has ended.

    Attributes:
        pid: of the process, once it has started.
    """

    def __init__(self) -> None:
        """Start it."""
        devnull = subprocess.DEVNULL
        self._starter, ours = start_process(SERVE, orphan=True, stdout=devnull, stderr=devnull)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", LIMIT_S, 0))
        self._socket = os.fstat(ours.fileno()).st_ino
        self._connection = Connection(ours.detach())
        self._owner = os.getpid()
        self.pid = 0
        self._gone = False
        self._unwanted = self._owed = 0
        """Numbers of answers that are to come: first those that nobody wants any more, then the others."""

    @property
    def is_ready(self) -> bool:
        """Whether it has started, and has not ended since."""
        if not self.pid and self._is_there() and self._connection.poll(0):
            self.wait()
        return bool(self.pid) and self._is_there()

    def send(self, message: bytes) -> bool:
        """Send a message, to be answered or else dropped; return whether it could be sent."""
        if self._put(message):
            self._owed += 1
        return not self._gone

    def answer(self) -> bytes | None:
        """Return the answer to the first message whose answer has not been returned; None where there is none."""
        while self._unwanted:
            self._unwanted -= 1
            self._receive()
        self._owed -= 1
        return self._receive()

    def drop(self, message: bytes) -> None:
        """Want no answer to any message so far.

        Args:
            message: tells the process not to work on those that wait. It is not answered.
        """
        self._unwanted, self._owed = self._unwanted + self._owed, 0
        self._put(message)

    def _is_there(self) -> bool:
        """Whether this process has the socket still; the number of a closed one may be that of another file by now."""
        if not self._gone:
            try:
                self._gone = os.getpid() != self._owner or os.fstat(self._connection.fileno()).st_ino != self._socket
            except OSError:
                self._gone = True
        return not self._gone

    def _put(self, message: bytes) -> bool:
        if self._is_there():
            try:
                self._connection.send_bytes(message)
            except OSError:
                self._gone = True
        return not self._gone

    def _receive(self) -> bytes | None:
        if not self._is_there():
            return None
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            self._gone = True
            return None

    def wait(self) -> None:
        """Wait until it has started, or has ended."""
        if not self.pid and (first := self._receive()) is not None:
            self.pid = int(first)
            self._starter.wait()

    def close(self) -> None:
        """End the process at once: what it works on is not wanted."""
        if os.getpid() != self._owner:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._starter.pid, signal.SIGKILL)
        self._starter.wait()
        if self._is_there():
            self._connection.close()


_judges: list[Judge] = []


@contextlib.contextmanager
def second_process(*, wanted: bool = True) -> Iterator[Judge | None]:
    """Judge runs in a second process inside the block, wherever that gives the same verdicts, if `wanted`.

    `verify` uses it. A system that cannot hand a socket to a process goes without.

    Yields:
        The process that is started here; None where none is.
    """
    if not wanted or _judges or not hasattr(os, "fork"):
        yield None
        return
    _judges.append(Judge())
    try:
        yield _judges[0]
    finally:
        _judges.pop().close()


def running_judge() -> Judge | None:
    """Return the second process of the block that this is in, if it has started."""
    return next((judge for judge in _judges if judge.is_ready), None)

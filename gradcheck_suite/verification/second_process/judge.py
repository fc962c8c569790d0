"""The second process as its parent has it.

It imports torch and JAX, which takes seconds. So a command starts it before it imports them itself; nothing heavy is
imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from gradcheck_suite.verification.second_process.serve import main; main(int(sys.argv[2]))"
)


class Judge:
    """The process: it answers messages in the order in which they are sent, once it has started."""

    def __init__(self) -> None:
        """Start it."""
        ours, theirs = socket.socketpair()
        # a process group of its own: Ctrl-C reaches the parent alone, which then ends this one
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, json.dumps(sys.path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._started = self._gone = False
        self._unwanted = self._owed = 0
        """Numbers of answers that are to come: first those that nobody wants any more, then the others."""

    @property
    def is_ready(self) -> bool:
        """Whether it has started, and has not ended since."""
        if not self._started and not self._gone and self._connection.poll(0):
            self.wait()
        return self._started and not self._gone

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

    def _put(self, message: bytes) -> bool:
        try:
            self._connection.send_bytes(message)
        except OSError:
            self._gone = True
        return not self._gone

    def _receive(self) -> bytes | None:
        if self._gone:
            return None
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            self._gone = True
            return None

    def wait(self) -> None:
        """Wait until it has started, or has ended."""
        if not self._started and not self._gone:
            self._started = self._receive() is not None

    def close(self) -> None:
        """End the process at once: what it works on is not wanted."""
        self._connection.close()
        self.process.kill()
        self.process.wait()


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

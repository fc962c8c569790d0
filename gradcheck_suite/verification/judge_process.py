"""The second process as its parent has it.

It needs torch and JAX, whose import takes seconds. So a command forks it after it has imported them
itself, where that is safe, and else starts it before it imports them. Nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

from gradcheck_suite.run.processes import Child, Fork

SERVE = "gradcheck_suite.verification.ahead"
"""The module whose `main` the process runs."""
NUMBER = 8
"""Bytes at the start of an answer with the number of its message, which counts from 1."""
LIMIT_S = 300
"""Seconds after which a process that neither reads nor answers is given up. It may judge a case for two minutes."""


class JudgeProcess:
    """The process: it answers messages in the order in which they are sent, once it has started.

    A loop may close the socket, or fork this process: then the process is gone, as where it has
    ended.

    Attributes:
        pid: the process id, once the process has started.
    """

    def __init__(self, *, forks: bool = False) -> None:
        """Start it.

        Args:
            forks: whether it is a fork of this process, which has imported all and computed nothing.

        Raises:
            OSError: the system has no room for a further process.
        """
        devnull = subprocess.DEVNULL
        self._child: Child | Fork = (
            Fork(SERVE, LIMIT_S)
            if forks
            else Child(
                SERVE,
                orphan=True,
                stdout=devnull,
                stderr=devnull,
                limit_s=LIMIT_S,
            )
        )
        self._connection = self._child.connection
        self._socket = os.fstat(self._connection.fileno()).st_ino
        self._owner = os.getpid()
        self.pid = 0
        self._number = 0
        self._gone = False

    @property
    def is_ready(self) -> bool:
        """Whether it has started, and has not ended since."""
        if not self.pid and self._is_there() and self._connection.poll(0):
            self.wait()
        return bool(self.pid) and self._is_there()

    def wait(self) -> None:
        """Wait until it has started, or has ended."""
        if not self.pid and (first := self._receive()) is not None:
            self.pid = int(first)
            # what started it has ended, since an orphan's starter only forks: no zombie is left
            self._child.wait()

    def send(self, message: bytes) -> int:
        """Send a message and return its number, by which `answer` is called.

        0 where it could not be sent.
        """
        self._number += 1
        return self._number if self._put(message) else 0

    def answer(self, number: int) -> bytes | None:
        """Return the answer to a message, without those to earlier ones.

        None where there is none.
        """
        while (data := self._receive()) is not None:
            # answers to cases whose turn never came are read and dropped on the way
            if int.from_bytes(data[:NUMBER]) == number:
                return data[NUMBER:]
        return None

    @property
    def has_answered(self) -> bool:
        """Whether an answer, or the end of the process, is there to be read."""
        return self._is_there() and self._connection.poll(0)

    def drop(self) -> None:
        """Want no answer to any message so far."""
        self._put(b"")

    def _is_there(self) -> bool:
        """Whether this process has the socket still.

        The number of a closed one may be that of another file by now.
        """
        if not self._gone:
            try:
                # a forked child shares the socket: its bytes would mix with its parent's
                self._gone = (
                    os.getpid() != self._owner
                    or os.fstat(self._connection.fileno()).st_ino != self._socket
                )
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
        if self._is_there():
            try:
                return self._connection.recv_bytes()
            except (EOFError, OSError):
                self._gone = True
        return None

    def close(self) -> None:
        """End the process at once: what it works on is not wanted."""
        if os.getpid() == self._owner:
            self._child.close(closes=self._is_there())


_judges: list[JudgeProcess] = []


@contextlib.contextmanager
def second_process(*, wanted: bool = True, forks: bool = False) -> Iterator[JudgeProcess | None]:
    """Judge runs in a second process inside the block, wherever that gives the same verdicts, if
    `wanted`.

    `verify` uses it. A system without room for a further process, or that cannot hand a socket to
    one, goes without.

    Args:
        wanted: whether to start one.
        forks: whether it is a fork of this process, which has imported all and computed nothing.

    Yields:
        The process that is started here; None where none is.
    """
    # a nested block uses the outer one's process
    if not wanted or _judges or not hasattr(os, "fork"):
        yield None
        return
    try:
        judge = JudgeProcess(forks=forks)
    except OSError:
        yield None
        return
    _judges.append(judge)
    try:
        yield judge
    finally:
        _judges.pop().close()


def running_judge() -> JudgeProcess | None:
    """Return the second process of the block that this is in, if it has started."""
    return next((judge for judge in _judges if judge.is_ready), None)

"""The process that forks the ranks, as the parent has it.

It imports torch, which takes seconds. So a command starts it before it imports torch itself; nothing heavy is imported
here.
"""

from __future__ import annotations

import array
import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.execution.helper_process import start_process

STARTUP_S = 120.0
"""Seconds within which the process must have imported torch, and ranks must have met."""
MOST_BYTES = 65536


class Server:
    """The process, and a socket to it.

    Attributes:
        folder: for what the process and its ranks write.
    """

    def __init__(self) -> None:
        """Start the process."""
        self.folder = Path(tempfile.mkdtemp(prefix="gradcheck-suite-ranks-"))
        with (self.folder / "errors").open("w") as errors:
            self.process, self._control = start_process(
                "gradcheck_suite.execution.ranks.server", str(self.folder), stderr=errors
            )

    def fork(self, folder: Path, backend: str, sockets: Sequence[socket.socket]) -> list[int]:
        """Fork a rank for each of the sockets, which it gets, and return their process ids.

        Raises:
            CannotRunHere: the process has ended.
        """
        handles = array.array("i", [s.fileno() for s in sockets])
        return self._command([str(folder), backend], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handles)])

    def end_ranks(self) -> list[int]:
        """End the ranks, and return how each ended: its exit status, or minus the number of a signal.

        Raises:
            CannotRunHere: the process has ended.
        """
        return self._command(None, [])

    def _command(self, wanted: list[str] | None, ancillary: list[tuple[int, int, array.array[int]]]) -> list[int]:
        try:
            self._control.sendmsg([json.dumps(wanted).encode()], ancillary)
            self._control.settimeout(STARTUP_S)
            answer = self._control.recv(MOST_BYTES)
        except (OSError, ConnectionError):
            answer = b""
        if not answer:
            said = (self.folder / "errors").read_text(errors="replace").split("\n")
            last = next((f": {line}" for line in reversed(said) if line.strip()), "")
            raise CannotRunHere(
                f"ranks cannot start: the process that starts them ended with status {self.process.poll()}{last}"
            )
        numbers: list[int] = json.loads(answer)
        return numbers

    def close(self, *, is_idle: bool = False) -> None:
        """End the process, which ends its ranks; one that is idle has none, and may still be importing."""
        self._control.close()
        if is_idle:
            self.process.kill()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


_ahead: list[Server] = []


@contextlib.contextmanager
def server_ahead(wanted: bool) -> Iterator[None]:
    """Start the process for the first ranks that the block needs, if `wanted`; end it where none took it."""
    if wanted:
        _ahead.append(Server())
    try:
        yield
    finally:
        while _ahead:
            _ahead.pop().close(is_idle=True)


def take_server() -> Server:
    """Return the process that was started ahead, or a new one."""
    return _ahead.pop() if _ahead else Server()

"""A further process of this Python, with a socket to it, started before anything heavy is imported."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import IO

_PROGRAM = (
    # before anything else is imported: `-c` finds modules in the current folder, and a file there may have any name
    "import sys; sys.path[:] = sys.argv[1].split('\\n'); "
    "import os; sys.argv[2] == 'orphan' and os.fork() and os._exit(0); "
    "from importlib import import_module; import_module(sys.argv[3]).main(int(sys.argv[4]), *sys.argv[5:])"
)


def start_process(
    module: str, *arguments: str, orphan: bool = False, stdout: int | None = None, stderr: IO[str] | int | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that finds modules where this one does.

    Args:
        module: full name of the module whose `main` it calls with the file descriptor of its socket and `arguments`.
        arguments: further arguments of `main`.
        orphan: whether it is to be no child of this process, so that code here may wait for all its children. Then
            what is returned only starts it, and is the number of its process group.
        stdout: as `subprocess.Popen` takes it.
        stderr: as `subprocess.Popen` takes it.

    Returns:
        The process and this end of the socket. The process has a group of its own: Ctrl-C reaches the parent alone,
        which then ends this one.
    """
    ours, theirs = socket.socketpair()
    how, handle = "orphan" if orphan else "child", str(theirs.fileno())
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, "\n".join(sys.path), how, module, handle, *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    return process, ours

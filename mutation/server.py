"""Run tests for one mutant after another, each in a fork of a process that has numpy, pytest and torch loaded.

Loading them takes seconds and the tests a tenth of one. The package itself is imported in the fork, so that each sees
the mutant that is on disk. `ask.py` is the command that Cosmic Ray runs: it sends its arguments here and ends as pytest
did.

    python mutation/server.py SOCKET MODULE...
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from importlib import import_module

import pytest

PAUSE_MS = 5
"""Between two looks at whether a fork has ended."""


def _test(client: socket.socket, arguments: list[str]) -> None:
    """Run pytest in this process, which is a fork, with its output to the client; never returns."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(client.fileno(), stream)
    code = 3
    try:
        code = int(pytest.main(arguments))
        sys.stdout.flush()
    finally:
        os._exit(code)


def _serve(client: socket.socket) -> None:
    arguments = json.loads(client.makefile().readline())
    fork = os.fork()
    if not fork:
        _test(client, arguments)
    gone = select.poll()
    gone.register(client, select.POLLRDHUP)
    ended, status = 0, 0
    while not ended:
        # a client that was stopped at the time limit has hung up
        if gone.poll(PAUSE_MS):
            os.killpg(fork, signal.SIGKILL)
        ended, status = os.waitpid(fork, os.WNOHANG)
    with contextlib.suppress(OSError):
        client.sendall(f"\nended with {os.waitstatus_to_exitcode(status)}".encode())


def main() -> None:
    """Serve until killed."""
    path, *modules = sys.argv[1:]
    # a mutant changes a module within the second that its bytecode would be dated by
    sys.dont_write_bytecode = True
    # where the package is installed as well, pytest would import that one for its plugin
    sys.path.insert(0, os.getcwd())
    for name in modules:
        import_module(name)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        while True:
            client, _ = server.accept()
            with client:
                _serve(client)


if __name__ == "__main__":
    main()

"""Child processes: how they start, and how they find the loop under test."""

from __future__ import annotations

import array
import contextlib
import importlib
import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gradcheck_suite.core.contract import Problem
from gradcheck_suite.errors import CannotRunHere, UsageError

# A further process of this Python, with a socket to it, started before anything heavy is imported.


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


# The process that forks the ranks, as the parent has it.
#
# It imports torch, which takes seconds. So a command starts it before it imports torch itself; nothing heavy is
# imported here.


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
                "gradcheck_suite.run.rank_server", str(self.folder), stderr=errors
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


# How another process finds a loop or a user's problem: by the call that returns it there.
#
# Ranks import what they run, as every distributed program does. What no module has under a name cannot be found.


@dataclass(frozen=True)
class Source:
    """A call that returns an object in any process of this machine.

    Attributes:
        module: that has the function.
        function: its name.
        arguments: of the call, plain data.
    """

    module: str
    function: str
    arguments: tuple[Any, ...]

    def load(self) -> Any:
        """Return the object; importing its module may raise anything."""
        return getattr(importlib.import_module(self.module), self.function)(*self.arguments)


_remembered: dict[int, tuple[Any, Source]] = {}


def remember(found: Any, source: Source) -> None:
    """Note where an object comes from that was loaded by a name which a user gave."""
    _remembered[id(found)] = (found, source)


def source_of(wanted: Any, what: str) -> Source:
    """Return how another process finds a loop or a problem.

    Args:
        wanted: the object.
        what: what it is, for the message.

    Raises:
        UsageError: no module has it under a name.
    """
    known = _remembered.get(id(wanted))
    if known is not None and known[0] is wanted:
        return known[1]
    name = _module_of(wanted)
    # a decorated loop says that it is of the module of the one inside
    beside = [place for place in sys.modules if place.partition(".")[0] == name.partition(".")[0]]
    for place in (name, *beside):
        module = sys.modules.get(place)
        for path, value in _named(module):
            if value is wanted:
                remember(wanted, Source(__name__, "found", (place, getattr(module, "__file__", None), path)))
                return _remembered[id(wanted)][1]
    shown = getattr(wanted, "__qualname__", type(wanted).__name__)
    raise UsageError(
        f"{what} {shown} of {name} cannot be imported in another process, as each rank must: define it at the top "
        "level of a module or of a file"
    )


def found(name: str, file: str | None, path: tuple[str, ...]) -> Any:
    """Return what a module has under a name, or under a name in a dictionary of its own.

    Args:
        name: of the module.
        file: that it was imported from, None for one without.
        path: the name, and the key in the dictionary where it is in one.
    """
    value: Any = vars(_module(name, file))[path[0]]
    for key in path[1:]:
        value = value[key] if isinstance(value, dict) else getattr(value, key)
    return value


def _module_of(wanted: Any) -> str:
    made = wanted.loss if isinstance(wanted, Problem) else wanted
    return str(getattr(made, "__module__", None) or type(made).__module__)


def _named(module: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the objects of a module with their paths: its names, entries of its dictionaries, loops of its records."""
    for name, value in list(getattr(module, "__dict__", {}).items()):
        yield (name,), value
        # isinstance would ask a lazy object for its class
        if issubclass(type(value), dict) and not name.startswith("__"):
            yield from (((name, key), entry) for key, entry in value.items() if isinstance(key, str))
        elif hasattr(type(value), "__dataclass_fields__"):
            yield from (((name, part), getattr(value, part, None)) for part in ("loop", "problem"))


def _module(name: str, file: str | None) -> Any:
    if name in sys.modules and name != "__main__":
        return sys.modules[name]
    if name != "__main__":
        try:
            module = importlib.import_module(name)
            if file is None or Path(getattr(module, "__file__", None) or "").resolve() == Path(file).resolve():
                return module
        except ModuleNotFoundError:
            if file is None:
                raise
    if file is None:
        raise UsageError(f"{name} has no file, so a rank cannot import it: put the loop into a file")
    # a script's own `if __name__ == "__main__"` must not run again in every rank
    own = "__gradcheck_suite_main__" if name == "__main__" else name
    if own not in sys.modules:
        spec = importlib.util.spec_from_file_location(own, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[own] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[own]
            raise
    return sys.modules[own]

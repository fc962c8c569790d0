"""Child processes: one way to start and to end them, the template that forks them, and how they
find the loop.

Nothing heavy is imported here: a command starts its processes before it imports torch, which takes
them seconds too.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import IO, Any, NoReturn

from gradcheck_suite.core.contract import Problem
from gradcheck_suite.errors import CannotRunHere, UsageError

# DistributedDataParallel imports the first of these when it is first called
FOR_RANKS = ("torch._dynamo", "torch.distributed.fsdp", "gradcheck_suite.run.ranks")
"""What loops on several ranks use, imported before there is a process for each."""
STARTUP_S = 120
"""Seconds within which a process must have imported torch, and ranks must have met."""
_PROGRAM = (
    # before anything else is imported: `-c` finds modules in the current folder, and a file there
    # may have any name
    "import sys; sys.path[:] = sys.argv[1].split('\\n'); "
    "import os; sys.argv[2] == 'orphan' and os.fork() and os._exit(0); "
    "from importlib import import_module; from multiprocessing.connection import Connection; "
    "import_module(sys.argv[3]).main(Connection(int(sys.argv[4])), *sys.argv[5:])"
)


def _socket_pair(limit_s: int) -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a connection.

    The first one gives up after some seconds in which the other neither reads nor answers.
    """
    ours, theirs = socket.socketpair()
    # a timeout of Python's own would make the file descriptor non-blocking, which `Connection` does
    # not expect
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", limit_s, 0))
    return ours, theirs


class Child:
    """A further process of this Python that finds modules where this one does.

    It has a process group of its own: Ctrl-C reaches the parent alone, which then ends it.

    Attributes:
        connection: the connection to the process.
        process: itself; of an orphan, what starts it.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        orphan: bool = False,
        stdout: int | None = None,
        stderr: IO[str] | int | None = None,
        limit_s: int = STARTUP_S,
    ) -> None:
        """Start it.

        Args:
            module: full name of the module whose `main` it calls with its end of the connection and
                `arguments`.
            arguments: further arguments of `main`.
            orphan: whether it is to be no child of this process, so that code here may wait for all
                its children.
            stdout: as `subprocess.Popen` takes it.
            stderr: as `subprocess.Popen` takes it.
            limit_s: seconds after which a process that neither reads nor answers is given up.
        """
        ours, theirs = _socket_pair(limit_s)
        how = "orphan" if orphan else "child"
        handle = str(theirs.fileno())
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _PROGRAM,
                    "\n".join(sys.path),
                    how,
                    module,
                    handle,
                    *arguments,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())

    def wait(self) -> None:
        """Wait until what was started has ended: of an orphan, what started it."""
        self.process.wait()

    def close(self, wait_s: float = 0, *, closes: bool = True) -> None:
        """End the process and what it has forked.

        Args:
            wait_s: seconds in which it may end by itself.
            closes: whether the connection is to be closed; not one whose number may be that of
                another file by now.
        """
        if closes:
            self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(wait_s)
        # the process began a session, so what it forked belongs to its group, whatever has ended
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def may_fork() -> bool:
    """Whether this process, once it has imported torch and JAX, may be forked.

    One that has JAX already may have computed with it: then it has threads that a fork would lose.
    macOS ends forks of a process that has used its frameworks.
    """
    return sys.platform == "linux" and "jax" not in sys.modules


class Fork:
    """A fork of this process that is no child of it, so that code here may wait for all children.

    It has what was imported, which takes a process of its own seconds.

    Attributes:
        connection: the connection to the process.
    """

    def __init__(self, module: str, limit_s: int = STARTUP_S) -> None:
        """Start it.

        Args:
            module: full name of the module whose `main` it calls with its end of the connection.
            limit_s: seconds after which a process that neither reads nor answers is given up.

        Raises:
            OSError: the system has no room for a further process.
        """
        ours, theirs = _socket_pair(limit_s)
        main = importlib.import_module(module).main
        with ours, theirs:
            with warnings.catch_warnings():
                # Python 3.12 sees threads, which are OpenBLAS's: it makes them again in a fork
                warnings.simplefilter("ignore", DeprecationWarning)
                starter = os.fork()
            if starter == 0:
                _serve_as_orphan(main, ours, theirs)
            # it has only forked, and its group keeps its number
            os.waitpid(starter, 0)
            self._group = starter
            self.connection = Connection(ours.detach())

    def wait(self) -> None:
        """Return at once: what started the process has ended."""

    def close(self, *, closes: bool = True) -> None:
        """End the process and what it has forked.

        Args:
            closes: whether the connection is to be closed; not one whose number may be that of
                another file by now.
        """
        if closes:
            self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)


def _serve_as_orphan(
    main: Callable[[Connection], None], ours: socket.socket, theirs: socket.socket
) -> NoReturn:
    """Call `main` in a fork of this fork, with a session of its own and without the terminal."""
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        # while it has the parent's end, too, it would not be told that the parent has ended
        ours.close()
        main(Connection(theirs.detach()))
    finally:
        os._exit(1)


def end_with_parent(connection: Connection) -> None:
    """End this process once no other one has the other end of its connection, whatever it works on."""

    def watch() -> None:
        # a signal of the system (PR_SET_PDEATHSIG) is for the thread that forked, and on Linux alone
        parent = select.poll()
        parent.register(connection.fileno(), select.POLLHUP)
        parent.poll()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


class Template:
    """A process that imports what others need once, and forks them from then on, which takes
    milliseconds.

    Attributes:
        folder: for what the process and those that it forks write.
        process: the process.
    """

    def __init__(self, *modules: str) -> None:
        """Start it; it imports torch, JAX and these modules."""
        self.folder = Path(tempfile.mkdtemp(prefix="gradcheck-suite-"))
        with (self.folder / "errors").open("w") as errors:
            self._child = Child(
                __name__,
                str(self.folder),
                *modules,
                stderr=errors,
            )
        self.process = self._child.process
        self._has_forked = False

    def fork(
        self, module: str, arguments: Sequence[Sequence[Any]]
    ) -> tuple[list[int], list[Connection]]:
        """End what was forked before.

        Fork a process for each of the arguments, whose id and connection are returned. It calls the
        module's `main` with its end of the connection and its arguments.

        Raises:
            CannotRunHere: the template has ended.
        """
        pairs = [multiprocessing.Pipe() for _ in arguments]
        pids = self._answer((module, arguments), [theirs for _, theirs in pairs])
        self._has_forked = True
        # while this process has their ends, too, it would not be told that they have ended
        for _, theirs in pairs:
            theirs.close()
        return pids, [ours for ours, _ in pairs]

    def end(self) -> list[int]:
        """End what was forked.

        Return how each ended: its exit status, or minus the number of a signal.

        Raises:
            CannotRunHere: the template has ended.
        """
        return self._answer(None)

    def _answer(self, wanted: Any, handed: Sequence[Connection] = ()) -> list[int]:
        control = self._child.connection
        try:
            control.send(wanted)
            for connection in handed:
                reduction.send_handle(control, connection.fileno(), self.process.pid)
            numbers: list[int] = control.recv()
        except (OSError, EOFError):
            lines = (self.folder / "errors").read_text(errors="replace").split("\n")
            last = next((f": {line}" for line in reversed(lines) if line.strip()), "")
            raise CannotRunHere(
                "processes cannot start: the one that starts them ended with status"
                f" {self.process.poll()}{last}"
            ) from None
        return numbers

    def close(self) -> None:
        """End the process and what it has forked.

        One that has forked nothing may still be importing.
        """
        self._child.close(5 if self._has_forked else 0)
        shutil.rmtree(self.folder, ignore_errors=True)


def main(control: Connection, folder: str, *modules: str) -> None:
    """Fork processes and end them as the parent asks, until it is gone: the work of a template.

    This process computes nothing itself, so that it has no thread that a fork could lose.

    Args:
        control: the connection to the parent.
        folder: what is written there is removed at the end, also where the parent was killed.
        modules: modules to import, beside torch and JAX.
    """
    # there is a process for each processor
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from gradcheck_suite.run import environment

    forked: list[ForkProcess] = []
    try:
        environment.set_precision()
        for name in modules:
            importlib.import_module(name)
        while True:
            wanted = control.recv()
            statuses = _exit_statuses(forked)
            forked = [] if wanted is None else _forked(control, *wanted)
            control.send([process.pid for process in forked] or statuses)
    except (OSError, EOFError):
        return
    finally:
        _exit_statuses(forked)
        shutil.rmtree(folder, ignore_errors=True)
        # unloading torch and jax in order takes a second
        os._exit(0)


def _forked(
    control: Connection, module: str, arguments: Sequence[Sequence[Any]]
) -> list[ForkProcess]:
    connections = [Connection(reduction.recv_handle(control)) for _ in arguments]
    target = multiprocessing.get_context("fork").Process
    forked = [
        target(target=_run_forked, args=(module, own, given, [control, *connections]))
        for own, given in zip(connections, arguments, strict=True)
    ]
    for process in forked:
        process.start()
    for connection in connections:
        connection.close()
    return forked


def _run_forked(
    module: str, own: Connection, arguments: Sequence[Any], connections: Sequence[Connection]
) -> None:
    # whoever has the end of another process hides from the parent that this one has ended
    for connection in connections:
        if connection is not own:
            connection.close()
    importlib.import_module(module).main(own, *arguments)


def _exit_statuses(forked: Sequence[ForkProcess]) -> list[int]:
    """End processes and return their exit statuses; one that has exited by itself keeps its own."""
    for process in forked:
        process.kill()
    for process in forked:
        process.join()
    return [process.exitcode or 0 for process in forked]


_ahead: list[Template] = []


@contextlib.contextmanager
def template_ahead(wanted: bool) -> Iterator[None]:
    """Start the process for the first ranks that the block needs, if `wanted`.

    End it where none took it.
    """
    if wanted:
        _ahead.append(Template(*FOR_RANKS))
    try:
        yield
    finally:
        while _ahead:
            _ahead.pop().close()


def take_template() -> Template:
    """Return the process that was started ahead, or a new one."""
    return _ahead.pop() if _ahead else Template(*FOR_RANKS)


@dataclass(frozen=True)
class Importable:
    """A call that returns an object in any process of this machine.

    Ranks import what they run, as every distributed program does. What no module has under a name
    cannot be found.

    Attributes:
        module: the module that has the function.
        function: its name.
        arguments: the call's arguments, plain data.
    """

    module: str
    function: str
    arguments: tuple[Any, ...]

    def load(self) -> Any:
        """Return the object; importing its module may raise anything."""
        return getattr(importlib.import_module(self.module), self.function)(*self.arguments)


_remembered: dict[int, tuple[Any, Importable]] = {}


def remember(found: Any, source: Importable) -> None:
    """Note where an object comes from that was loaded by a name which a user gave."""
    _remembered[id(found)] = (found, source)


def source_of(wanted: Any, what: str) -> Importable:
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
    made = wanted.loss if isinstance(wanted, Problem) else wanted
    name = str(getattr(made, "__module__", None) or type(made).__module__)
    # a decorated loop says that it is of the module of the one inside
    beside = [place for place in sys.modules if place.partition(".")[0] == name.partition(".")[0]]
    for place in (name, *beside):
        module = sys.modules.get(place)
        for path, value in _named_objects(module):
            if value is wanted:
                source = Importable(
                    __name__, found.__name__, (place, getattr(module, "__file__", None), path)
                )
                remember(wanted, source)
                return source
    shown = getattr(wanted, "__qualname__", type(wanted).__name__)
    raise UsageError(
        f"{what} {shown} of {name} cannot be imported in another process, as each rank must: define"
        " it at the top level of a module or of a file"
    )


def found(name: str, file: str | None, path: tuple[str, ...]) -> Any:
    """Return what a module has under a name, or under a name in a dictionary of its own.

    Args:
        name: the name of the module.
        file: the file that it was imported from; None for a module without one.
        path: the name, and the key in the dictionary where it is in one.
    """
    value: Any = vars(_imported_module(name, file))[path[0]]
    for key in path[1:]:
        value = value[key] if isinstance(value, dict) else getattr(value, key)
    return value


def _named_objects(module: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the objects of a module with their paths: its names, entries of its dictionaries, loops
    of its records.
    """
    for name, value in list(getattr(module, "__dict__", {}).items()):
        yield (name,), value
        # isinstance would ask a lazy object for its class
        if issubclass(type(value), dict) and not name.startswith("__"):
            yield from (
                ((name, key), entry) for key, entry in value.items() if isinstance(key, str)
            )
        elif hasattr(type(value), "__dataclass_fields__"):
            yield from (((name, part), getattr(value, part, None)) for part in ("loop", "problem"))


def _imported_module(name: str, file: str | None) -> Any:
    # a script's own `if __name__ == "__main__"` must not run again in every rank
    own = "__gradcheck_suite_main__" if name == "__main__" else name
    if own in sys.modules:
        return sys.modules[own]
    if own == name:
        try:
            module = importlib.import_module(name)
            if (
                file is None
                or Path(getattr(module, "__file__", None) or "").resolve() == Path(file).resolve()
            ):
                return module
        except ModuleNotFoundError:
            if file is None:
                raise
    if file is None:
        raise UsageError(
            f"{name} has no file, so a rank cannot import it: put the loop into a file"
        )
    spec = importlib.util.spec_from_file_location(own, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[own] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[own]
        raise
    return module

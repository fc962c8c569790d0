"""An audit on several ranks: each writes its own events to a file, and the first rank judges all of them at the end.

The files are in a directory that all ranks of the machine derive from their environment. Nothing is sent between ranks.
The last entry of a file says how the rank ended; a file without it is that of a rank that died.
"""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gradcheck_suite.auditing.recorder import Event
from gradcheck_suite.errors import UsageError

PATIENCE = 60.0
"""Seconds for which rank 0 waits for ranks that have written nothing, as those of another machine."""


@dataclass(frozen=True)
class End:
    """How a rank ended.

    Attributes:
        raised: its exception, `""` for a normal end.
        complete: whether its run ended by itself.
        off: instrument -> the error that switched it off.
        dtypes: key of a parameter -> dtype of its gradient.
        names: key of a parameter -> its name.
        steps: that were seen.
    """

    raised: str = ""
    complete: bool = True
    off: dict[str, str] = field(default_factory=dict)
    dtypes: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    steps: int = 0


@dataclass
class RankFile:
    """What one rank has written.

    Attributes:
        rank: of the process.
        events: its passes and steps.
        end: how it ended; None where it died or runs still.
        writer: the process; None where it has written nothing.
    """

    rank: int
    events: list[Event] = field(default_factory=list)
    end: End | None = None
    writer: Writer | None = None

    @property
    def is_open(self) -> bool | None:
        """Whether the rank may write more; None where that is not known here."""
        if self.end is not None:
            return False
        return None if self.writer is None else self.writer.lives

    @property
    def fate(self) -> str | None:
        """How it ended where that was not by itself, in words."""
        if self.end is None:
            wrote = "it died, or runs on another machine" if self.writer else "it wrote nothing on this machine"
            return f"rank {self.rank} has not ended: {wrote}"
        return f"rank {self.rank} ended with {self.end.raised}" if self.end.raised else None


RUN = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
"""Variables that all ranks of a run have alike."""


@dataclass(frozen=True)
class Writer:
    """The process that writes a file.

    Attributes:
        pid: of the process.
        host: name of its machine: a folder may be shared by several.
        began: when it began the file, in the nanoseconds of its file system.
    """

    pid: int
    host: str
    began: int

    @property
    def lives(self) -> bool | None:
        """Whether it runs; None where that is not known here."""
        return _lives(self.pid) if self.host == socket.gethostname() else None


@dataclass(frozen=True)
class Ranks:
    """The place of this process in a distributed run.

    Attributes:
        rank: of the process.
        size: number of ranks.
        folder: in which each rank writes its file.
        parent: id of the process that started this one.
    """

    rank: int
    size: int
    folder: Path
    parent: int

    @staticmethod
    def of(environment: Mapping[str, str] = os.environ) -> Ranks | None:
        """Return the place that a launcher's environment gives, or None for a single process."""
        try:
            rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        except (KeyError, ValueError):
            return None
        if size < 2:
            return None
        values = [environment.get(key, "") for key in RUN]
        # without a port, as with a file through which ranks meet, the launcher alone tells one run from another
        parent = os.getppid()
        name = "-".join(values if environment.get("MASTER_PORT") else [str(parent), *values])
        safe = "".join(c if c.isalnum() or c in "-." else "_" for c in name)
        return Ranks(rank, size, Path(tempfile.gettempdir()) / f"gradcheck-suite-audit-{os.getuid()}-{safe}", parent)

    @property
    def own(self) -> Path:
        """The file of this rank."""
        return self.folder / f"rank-{self.rank}-{self.parent}"

    def path(self, rank: int) -> Path | None:
        """Return the file of a rank of this run, None where it has none yet.

        An earlier run on the same port may have left files. Ranks of one launcher have one parent. Others train at the
        same time, so their files have been written to since this rank began its own.
        """
        if (beside := self.folder / f"rank-{rank}-{self.parent}").exists():
            return beside
        written = {path: path.stat().st_mtime_ns for path in self.folder.glob(f"rank-{rank}-*")}
        newest = max(written, key=written.__getitem__, default=None)
        return newest if newest and written[newest] >= self._began else None

    @property
    def _began(self) -> int:
        with self.own.open("rb") as file:
            began: int = pickle.load(file).began
        return began


class RankWriter:
    """Appends a rank's events to its file.

    Raises:
        UsageError: the directory is not the user's own.
    """

    def __init__(self, ranks: Ranks) -> None:
        ranks.folder.mkdir(mode=0o700, exist_ok=True)
        found = ranks.folder.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise UsageError(f"audit: {ranks.folder} is not this user's own: remove it")
        self._file: IO[bytes] = ranks.own.open("wb")
        self.write(Writer(os.getpid(), socket.gethostname(), ranks.own.stat().st_mtime_ns))

    def write(self, *entries: Any) -> None:
        """Append entries."""
        for entry in entries:
            pickle.dump(entry, self._file)
        self._file.flush()

    def end(self, end: End) -> None:
        """Write how the rank ended."""
        self.write(end)
        self._file.close()


def read(ranks: Ranks, rank: int) -> RankFile:
    """Return what a rank has written so far."""
    found = RankFile(rank)
    with suppress(EOFError, FileNotFoundError, pickle.UnpicklingError):
        if path := ranks.path(rank):
            with path.open("rb") as file:
                while True:
                    entry = pickle.load(file)
                    if isinstance(entry, Writer):
                        found.writer = entry
                    elif isinstance(entry, End):
                        found.end = entry
                    else:
                        found.events.append(entry)
    return found


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    state = Path(f"/proc/{pid}/stat")
    # a process that has ended stays in the table until its launcher looks
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def gather(ranks: Ranks, patience: float = PATIENCE) -> list[RankFile]:
    """Wait until each other rank has ended or died, and return what all have written."""
    deadline = time.monotonic() + patience
    while True:
        found = [read(ranks, rank) for rank in range(ranks.size)]
        others = [f.is_open for f in found if f.rank != ranks.rank]
        if True not in others and (None not in others or time.monotonic() > deadline):
            return found
        time.sleep(0.1)


def died_before(ranks: Ranks) -> bool:
    """Whether every rank before this one has died."""
    files = [read(ranks, rank) for rank in range(ranks.rank)]
    return all(f.end is None and f.is_open is False for f in files)

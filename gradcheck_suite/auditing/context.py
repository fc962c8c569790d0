"""`with gradcheck_suite.audit() as audit:`, and `gradcheck_suite.objective`."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from itertools import chain, compress, pairwise
from operator import not_
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch

from gradcheck_suite.auditing.custom_functions import NOT_SEEN
from gradcheck_suite.auditing.events import FREE, Event, Gap, PassRecord, StepRecord, copy_to_host
from gradcheck_suite.auditing.function_calls import (
    CallsOfProgram,
    FunctionKey,
    statement_of,
)
from gradcheck_suite.auditing.jax_opinion import JaxOpinion, ask_jax, kept_calls
from gradcheck_suite.auditing.judge import ORPHANS, AuditJudge
from gradcheck_suite.auditing.mode_changes import ModeChanges
from gradcheck_suite.auditing.modes import AsBefore
from gradcheck_suite.auditing.module_calls import (
    WINDOW_AGAIN,
    ModuleCall,
    ModuleCalls,
    without_gradients,
)
from gradcheck_suite.auditing.places import Place, live_instances, variables_of
from gradcheck_suite.auditing.program_state import preserve_rng
from gradcheck_suite.auditing.recomputation import (
    UNEXPLAINED,
    PassInTurn,
    RecomputeRequest,
    RecomputeResult,
    RecordedCall,
    judge_calls_of_program,
    recompute,
    turn_of,
)
from gradcheck_suite.auditing.recorder import ActivePass, Recorder
from gradcheck_suite.auditing.replay import StepWindow, near
from gradcheck_suite.auditing.rules import StepFault
from gradcheck_suite.auditing.schedule import AGAIN, Schedule
from gradcheck_suite.auditing.standard_error import StandardError
from gradcheck_suite.auditing.stopping import StoppedOnViolation, Terminated, in_words
from gradcheck_suite.auditing.strays import Strays
from gradcheck_suite.auditing.terms import Reader, declare_terms
from gradcheck_suite.auditing.told import Told, tell
from gradcheck_suite.auditing.weighing import violation_of
from gradcheck_suite.core.findings import Occurrence, finding
from gradcheck_suite.core.options import DEFAULT_BUDGET, INSTRUMENTS, AuditOptions
from gradcheck_suite.core.results import OTHER_RANK, Result, Violation
from gradcheck_suite.core.text import counted
from gradcheck_suite.errors import UsageError
from gradcheck_suite.run.private_names import expect_present

# An audit on several ranks: each writes its own events to a file, and the first rank judges all of
# them at the end.
#
# The files are in a directory that all ranks of the machine derive from their environment. Nothing
# is sent between ranks. The last entry of a file says how the rank ended; a file without it is that
# of a rank that died.


PATIENCE = 60.0
"""Seconds for which rank 0 waits for ranks that have written nothing, as those of another machine."""
GRACE = 10.0
"""Seconds for which it waits for any rank once it was told to end: torchrun ends it for good after 30."""


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
            wrote = (
                "it died, or runs on another machine"
                if self.writer
                else "it wrote nothing on this machine"
            )
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
            rank = int(environment["RANK"])
            size = int(environment["WORLD_SIZE"])
        except (KeyError, ValueError):
            return None
        if size < 2:
            return None
        values = [environment.get(key, "") for key in RUN]
        # without a port, as with a file through which ranks meet, the launcher alone tells one run
        # from another
        parent = os.getppid()
        name = "-".join(values if environment.get("MASTER_PORT") else [str(parent), *values])
        safe = "".join(c if c.isalnum() or c in "-." else "_" for c in name)
        return Ranks(
            rank,
            size,
            Path(tempfile.gettempdir()) / f"gradcheck-suite-audit-{os.getuid()}-{safe}",
            parent,
        )

    @property
    def own(self) -> Path:
        """The file of this rank."""
        return self.folder / f"rank-{self.rank}-{self.parent}"

    def path(self, rank: int) -> Path | None:
        """Return the file of a rank of this run, None where it has none yet.

        An earlier run on the same port may have left files. Ranks of one launcher have one parent.
        Others train at the same time, so their files have been written to since this rank began its
        own.
        """
        if (beside := self.folder / f"rank-{rank}-{self.parent}").exists():
            return beside
        written = {path: path.stat().st_mtime_ns for path in self.folder.glob(f"rank-{rank}-*")}
        newest = max(written, key=written.__getitem__, default=None)
        with self.own.open("rb") as file:
            began = pickle.load(file).began
        return newest if newest and written[newest] >= began else None


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


class RankReader:
    """Reads what a rank writes, each time what is new.

    Args:
        ranks: the run.
        rank: of the process whose file is read.
    """

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks = ranks
        self._found = RankFile(rank)
        self._path: Path | None = None
        self._at = 0

    def read(self) -> RankFile:
        """Return what the rank has written so far."""
        path = self._ranks.path(self._found.rank)
        if path != self._path:  # that of an earlier run, until this run's was begun
            self._path = path
            self._at = 0
            self._found = RankFile(self._found.rank)
        # an entry that is being written ends too early, and is read the next time
        with contextlib.suppress(EOFError, FileNotFoundError, pickle.UnpicklingError):
            if path is not None and path.stat().st_size > self._at:
                with path.open("rb") as file:
                    self._read_on(file)
        return self._found

    def _read_on(self, file: IO[bytes]) -> None:
        file.seek(self._at)
        while True:
            entry = pickle.load(file)
            self._at = file.tell()
            if isinstance(entry, Writer):
                self._found.writer = entry
            elif isinstance(entry, End):
                self._found.end = entry
            else:
                self._found.events.append(entry)


def read_ranks(ranks: Ranks, rank: int) -> RankFile:
    """Return what a rank has written so far."""
    return RankReader(ranks, rank).read()


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


def gather_ranks(
    ranks: Ranks, patience: float = PATIENCE, hurries: Callable[[], float | None] = lambda: None
) -> list[RankFile]:
    """Wait until each other rank has ended or died, and return what all have written.

    Args:
        ranks: the run.
        patience: seconds for which ranks are waited for of which nothing is known.
        hurries: returns when this process was told to end, after which it waits for `GRACE`.
    """
    begun = time.monotonic()
    readers = [RankReader(ranks, rank) for rank in range(ranks.size)]
    while True:
        found = [reader.read() for reader in readers]
        others = [f.is_open for f in found if f.rank != ranks.rank]
        now = time.monotonic()
        told = hurries()
        if told is not None and now > told + GRACE:
            return found
        if True not in others and (None not in others or now > begun + patience):
            return found
        time.sleep(0.1)


def died_before(ranks: Ranks) -> bool:
    """Whether every rank before this one has died."""
    files = [read_ranks(ranks, rank) for rank in range(ranks.rank)]
    return all(f.end is None and f.is_open is False for f in files)


# The audit.


MOST_WAITING = 16
"""Backward passes whose recorded calls are kept for windows of optimizers that have not stepped since."""
NOT_KEPT = (
    "the calls of some of its backward passes were not kept: the window of another optimizer has"
    " ended since"
)
"""Steps alone change what is recorded, and let go of it; those of the window's own optimizer end the window."""
_open: list[TorchAudit] = []


class TorchAudit:
    """Judges the optimizer steps of a run of PyTorch.

    The first violation of each kind is printed when it is found.

    Args:
        options: of the audit.
        name: of the run in the result.
        standard_error: where is printed.
        quiet: whether nothing is.
    """

    def __init__(
        self, options: AuditOptions, name: str, standard_error: StandardError, *, quiet: bool
    ) -> None:
        self.options = options
        self._name = name
        self._quiet = quiet
        self._result: Result | None = None
        self._opened = self._observing = False
        self._standard_error = standard_error
        self._process = os.getpid()
        self._passes = self._passes_at_step = 0
        self._after_gap = self._was_full = False
        self._tried = set[str]()
        self._doubts: dict[int, str] = {}
        self._reasons = dict[str, Occurrence]()
        self._told = Told()
        self._events: list[Event] = []
        self._places: set[Place] = set()
        self._lines: set[str] = set()
        self._names: dict[int, str] = {}
        self._dtypes: dict[int, str] = {}
        self._ranks = Ranks.of()
        self._schedule = Schedule(self.options, on_ranks=self._ranks is not None)
        self._recorder = Recorder(
            self._receive,
            self._samples_whole,
            self._resumes,
            self._pass_begins,
            self._schedule.forget,
            weights="weights" not in self.options.without,
            sums="sums" not in self.options.without,
            objectives=dict(given.split("=", 1) for given in self.options.objectives),
        )
        self._stance = contextlib.ExitStack()
        self._judge = self._new_judge(1)
        self._writer: RankWriter | None = None
        self._forwards = ModuleCalls(
            self._records_calls,
            self._keep_cotangent,
            self._keep_mode,
            lambda instrument, error: self._recorder.switch_off(instrument, error),
            lambda: self._recorder.steps_seen,
        )
        self._strays = Strays(self._recorder.parameters)
        self._modes = ModeChanges()
        self._hurries: float | None = None
        # whether every instrument is switched off: passes and steps are counted
        self._is_off = {*self.options.without} >= {*INSTRUMENTS}
        self._running: dict[int, ActivePass] = {}
        # index of an optimizer -> the passes before its last step, and those of its longest window
        self._stepped_at: dict[int, int] = {}
        self._longest: dict[int, int] = {}
        self._recomputed: Counter[str] = Counter()
        self._functions: set[FunctionKey] = set()
        self._looked_at: set[int] = set()
        self._outside = CallsOfProgram()
        self._calls: list[RecordedCall] | str | None = None
        self._opinion: JaxOpinion | None = None

    def _new_judge(self, ranks: int, of: End | None = None) -> AuditJudge:
        return AuditJudge(
            ranks,
            self._dtypes if of is None else of.dtypes,
            given=self.options.accumulation_steps,
            weights="weights" not in self.options.without,
            sums="sums" not in self.options.without,
            name_of=self._name_of if of is None else of.names.get,
        )

    @preserve_rng()
    def open(self) -> TorchAudit:
        """Begin to observe.

        Raises:
            CannotRunHere: this torch lacks what the audit needs.
        """
        expect_present("audit", "torch")
        if self._ranks is not None:
            self._writer = RankWriter(self._ranks)
        self._opened = self._observing = True
        _open.append(self)
        self._start = time.perf_counter()
        if self.options.eager:
            self._stance.enter_context(torch.compiler.set_stance("force_eager"))
        self._recorder.open()
        self._open_calls()
        if self._is_off:
            self._recorder.pause()
        return self

    def _detach(self) -> None:
        if self._observing:
            self._observing = False
            self._forwards.close()
            for kind in self._outside.close():
                said = f"custom function {kind.__name__}: {NOT_SEEN}"
                self._judge.note(finding("custom-function", said))
            self._recorder.close()
            self._stance.close()

    @preserve_rng()
    def close(self, error: BaseException | None = None) -> Result:
        """Stop observing and return the result; a second call returns the same.

        Args:
            error: the exception that ended the run, if any.
        """
        if self._result is None:
            self._result = self._closed(error)
        return self._result

    @np.errstate(all="ignore")
    def _closed(self, error: BaseException | None) -> Result:
        complete = self._observing and error is None
        if not self._recorder.records and not self._is_off:
            self._recorder.resume(self._recorder.steps_seen)
            if complete and (tail := self._recorder.since_step):
                said = (
                    f"{counted(tail, 'call')} of backward after the last step, in a window that was"
                    " only counted: what they add to `.grad` is in no step (`--budget none` judges"
                    " them)"
                )
                self._judge.note(finding("counted-tail", said, remedy=""))
        self._detach()
        if self in _open:
            _open.remove(self)
        if self._ranks is not None and self._writer is not None:
            self._writer.write(*self._taken())
            self._name_of(0)
            recorder = self._recorder
            end = End(
                in_words(error),
                complete,
                recorder.off,
                self._dtypes,
                self._names,
                recorder.steps_seen,
            )
            self._writer.end(end)
            return self._of_all_ranks(self._ranks, error)
        try:
            self._judge_events()
            self._judge.end(complete=complete)
        except Exception as fault:
            self._recorder.switch_off("steps", fault)
        if self.options.jax and not isinstance(error, KeyboardInterrupt | Terminated):
            calls = self._calls or []
            with AsBefore(()):
                told = JaxOpinion(refusal=calls) if isinstance(calls, str) else ask_jax(calls)
            self._opinion = told
        return self._finished(error)

    def _of_all_ranks(self, ranks: Ranks, error: BaseException | None) -> Result:
        """Judge the run from what all ranks have written, in the first rank that has not died."""
        if ranks.rank and not died_before(ranks):
            reason = f"rank {ranks.rank} of {ranks.size}: rank 0 judges the steps of all ranks"
            return replace(
                self._finished(error),
                unjudged=reason,
                unjudged_reason=OTHER_RANK,
                rank=ranks.rank,
                ranks=ranks.size,
            )
        files = gather_ranks(ranks, hurries=lambda: self._hurries)
        complete = all(file.end is not None and file.end.complete for file in files)
        self._judge = self._judged([file.events for file in files], complete=complete)
        if self._judge.ranks_train_apart:
            each = [self._judged([file.events], complete=complete, of=file.end) for file in files]
            self._judge = self._new_judge(1)
            self._judge.take_over(each)
            said = (
                "the ranks do not step on the same gradients and nothing wraps the model: each rank"
                " was judged by itself"
            )
            self._judge.note(finding("ranks-train-apart", said))
        for file in files:
            if file.fate is not None:
                self._judge.note(finding("lost-rank", file.fate))
            for what, why in (file.end or End()).off.items():
                self._recorder.off.setdefault(what, f"{why}, on rank {file.rank}")
        if "batch" not in self.options.without:
            said = "windows are not computed again where there are several ranks"
            self._judge.note(finding("several-ranks", said))
        shutil.rmtree(ranks.folder, ignore_errors=True)
        return replace(self._finished(error), rank=ranks.rank, ranks=ranks.size)

    def _judged(
        self, events: Sequence[Sequence[Event]], *, complete: bool, of: End | None = None
    ) -> AuditJudge:
        """Judge the events of ranks, of one whose parameters are its own by their names and dtypes
        there.
        """
        judge = self._new_judge(len(events), of)
        for row in zip(*events, strict=False):
            try:
                judge.take(row)
            except ValueError as error:
                judge.note(finding("unlike-ranks", f"{error}: judged up to there"))
                break
        judge.end(complete=complete)
        return judge

    def when_idle(self, act: Callable[[], None]) -> None:
        """Call a function, which closes the audit, once nothing of the audit's is half done."""
        self.hurry()
        self._recorder.when_idle(act)

    def hurry(self) -> None:
        """Wait for other ranks no longer than a launcher waits for this one."""
        self._hurries = self._hurries or time.monotonic()

    @property
    def result(self) -> Result:
        """The result so far, or the final one where the audit is closed."""
        return self._result if self._result is not None else self._finished(None)

    @property
    def observing(self) -> bool:
        """Whether steps are still judged in this process."""
        return self._observing and self._process == os.getpid()

    def _is_full(self) -> bool:
        """Return whether the window that runs is computed again.

        Whose it is shows at its step, so all are until that of each optimizer that is due has been.
        """
        return self._schedule.full or self._is_of_kept

    def _samples_whole(self) -> bool:
        """Return whether gradients are sampled as a whole.

        In a window that is computed again any edit shows, which would else be a difference without a
        reason. Where a program edits few elements, or all of them by little, each of its edits does.
        """
        return self._is_full() or self._judge.edits_slightly

    def _pass_begins(self) -> bool:
        """Return whether the window that runs is computed again; a pass of it begins."""
        if self._is_full():
            self._forwards.pass_begins()
            return True
        return False

    @property
    def _is_of_kept(self) -> bool:
        """Whether the window that runs is the first one of whose calls more is kept."""
        return not self._forwards.keeps <= self._tried

    def _resumes(self, optimizer: int) -> bool:
        """Count a window, and return whether those after it are judged again."""
        recorder = self._recorder
        if not self.observing:
            return False
        if self.options.steps is not None and recorder.steps_seen >= self.options.steps:
            recorder.resume(recorder.steps_seen)
            self._detach()
            return False
        if self._is_off:
            return False
        begins = self._schedule.resumes(optimizer, recorder.passes_seen, recorder.seconds)
        if begins:
            self._open_calls()
        return begins

    def _open_calls(self) -> None:
        if self._writer is None and "batch" not in self.options.without:
            self._forwards.open()

    def _pause(self) -> None:
        self._forwards.close()
        unseen = self._outside.close()
        # a later window shows them
        self._functions -= unseen | {statement_of(kind) for kind in unseen}
        self._running.clear()
        self._recorder.pause()

    def _name_of(self, key: int) -> str | None:
        """Return the name of a parameter: the one in its model.

        Looking through all modules takes a while.
        """
        if key not in self._names:
            self._find_names()
            self._names.setdefault(key, f"parameter {key}")
        return self._names[key]

    def _find_names(self) -> None:
        known = ((key, of.reference()) for key, of in self._recorder.parameters.items())
        keys = {id(parameter): key for key, parameter in known if parameter is not None}
        modules = [one for one in live_instances(torch.nn.Module) if "_parameters" in one.__dict__]
        inner = {id(part) for part in chain.from_iterable(one._modules.values() for one in modules)}
        holders = dict[int, torch.nn.Module]()
        # a module's parts name no parameter with more words than it does
        for module in (one for one in modules if id(one) not in inner):
            for found, parameter in module.named_parameters(remove_duplicate=False):
                key = keys.get(id(parameter))
                name = found.removeprefix("module.")
                name = name.removeprefix("_orig_mod.")
                if key is not None and len(name) > len(self._names.get(key, "")):
                    self._names[key] = name
                    holders[key] = module
        times = Counter(self._names.values())
        unclear = {key: of for key, of in holders.items() if times[self._names[key]] > 1}
        variables = variables_of(unclear.values()) if unclear else {}
        for key, module in unclear.items():
            whose = variables.get(id(module), type(module).__name__)
            self._names[key] = f"{whose}.{self._names[key]}"

    # Judging

    def _receive(self, event: Event) -> None:
        # also a closure that is called on after the last step that is judged
        if not self.observing or self._recorder.concurrent:
            return
        self._events.append(event)
        if isinstance(event, Gap):
            self._after_gap = True
            return
        self._places.add(event.place)
        if isinstance(event, PassRecord):
            self._receive_pass(event)
        else:
            self._receive_step(event)

    def _receive_pass(self, record: PassRecord) -> None:
        if self._is_full() and self._recorder.last is not None:
            self._running[self._passes] = self._recorder.last
        self._passes += 1
        self._strays.on_pass(record)
        self._lines.update(term.line for term in record.terms if term.line)

    def _receive_step(self, step: StepRecord) -> None:
        self._strays.on_step(step)
        for key in self._strays.found.keys() - self._names.keys():
            self._name_of(key)  # while its module lives
        # a step right after another one has its passes, or none
        has_passes = self._passes > self._passes_at_step
        self._passes_at_step = self._passes
        if has_passes:
            self._was_full = self._is_full()
        if self._writer is not None:
            self._writer.write(*self._taken())
        else:
            self._judge_events(again=has_passes and self._was_full)
            if self._was_full and self._judge.used and not has_passes:
                said = (
                    "a window was not computed again: another optimizer had stepped on its passes"
                )
                self._judge.note(finding("shared-passes", said))
        if has_passes or self._after_gap:
            self._after_gap = False
            self._pause_if_due(step.optimizer)
        self._let_go(step.optimizer)
        if self.options.steps is not None and step.call + 1 >= self.options.steps:
            self._detach()

    def _pause_if_due(self, optimizer: int) -> None:
        """Record nothing for a while where the schedule of an optimizer says so after its window."""
        recorder = self._recorder
        continues = self._schedule.after(
            optimizer, recorder.passes_seen, recorder.seconds, was_full=self._was_full
        )
        if not continues:
            self._pause()

    def _taken(self) -> list[Event]:
        """Return what was recorded since the last step."""
        events = self._events
        self._events = []
        self._recorder.read(events)
        copy_to_host(events)
        for key, known in self._recorder.parameters.items():
            self._dtypes.setdefault(key, known.dtype)
        return events

    # a gradient may be infinite, and what the program prints stays what it was
    @np.errstate(all="ignore")
    def _judge_events(self, *, again: bool = False) -> None:
        """Judge what was recorded since the last step, and compute its window again where that is
        asked.
        """
        for event in self._taken():
            self._judge.take([event])
        self._recorder.sparse = self._judge.sparse
        window = None if "batch" in self.options.without else self._judge.window
        if again and window is not None:
            # what a call needs to give the same again is kept in the next window, and in that one
            # it is known whether it helps
            self._tried |= self._forwards.keeps
            self._recompute(window)
            self._judge_written(window)
            self._judge_draws(window)
        if window is not None and (again or self._outside.has_calls):
            self._judge_functions(window)
        self._forwards.forget_calls()
        # a run that ends at its first violation has no later window
        stops = self.options.stop_on_violation
        for violation in self._judge.settled(is_last=stops):
            if any(map(violation.is_accepted_by, self.options.accept)):
                continue
            if stops and self._observing:
                raise StoppedOnViolation
            # how often it occurs is known at the end, and counted there alone
            self._tell(replace(violation, occurrences=1))

    def _let_go(self, optimizer: int) -> None:
        """Let go of the recorded calls that no other window needs, when an optimizer has stepped.

        A pass may be of the window of another optimizer, which is open still.
        """
        length = self._passes - self._stepped_at.get(optimizer, 0)
        self._longest[optimizer] = max(length, self._longest.get(optimizer, 0))
        self._stepped_at[optimizer] = self._passes
        waiting = [i for i, one in self._running.items() if self._is_waited_for(i, one.record)]
        kept = waiting[-MOST_WAITING:] if self._is_full() else []
        self._running = {i: self._running[i] for i in kept}

    def _is_waited_for(self, index: int, record: PassRecord) -> bool:
        """Return whether an optimizer of a parameter that a pass has reached has not stepped since.

        Which optimizer has a parameter is known from its first step on. One that steps no more is
        waited for no longer than its longest window was.
        """
        known = self._recorder.parameters
        owned = [known[key].owners for key in record.arrivals if key in known]
        owners = {*chain.from_iterable(owned)}
        ages = {owner: index - self._stepped_at.get(owner, 0) for owner in owners}
        return not owners or any(0 <= age < self._longest.get(o, 1) for o, age in ages.items())

    # The window again

    def _records_calls(self) -> bool | None:
        return None if self._recorder.muted else self._is_full()

    def _keep_cotangent(self, forward: ModuleCall, index: int, cotangent: torch.Tensor) -> None:
        if (running := self._observed()) is not None:
            if forward not in running.forwards:
                forward.note_backward(self._recorder.steps_seen)
            running.forwards.setdefault(forward, {})[index] = cotangent
            self._modes.kept(
                running.record.place,
                forward.module,
                training=forward.modes[0],
                step=self._recorder.steps_seen,
            )

    def _keep_mode(self, module: int, training: bool, _: torch.Tensor) -> None:
        if (running := self._observed()) is not None:
            running.record.modes.add((module, training))
            place = running.record.place
            step = self._recorder.steps_seen
            self._modes.ran(
                place,
                module,
                training=training,
                step=step,
            )

    def _observed(self) -> ActivePass | None:
        recorder = self._recorder
        return recorder.running() if recorder.records and not recorder.muted else None

    @preserve_rng()
    def _recompute(self, window: StepWindow) -> None:
        violation = self._judge.of_last_step()
        weights = self._weights_of(window, violation)
        is_masked = window.edit is None and bool(window.masked)
        is_edited = (window.edit == FREE or is_masked) and violation is None
        if window.edit is not None and not is_edited:
            return
        if not weights or self._recorder.is_off(WINDOW_AGAIN):
            return
        asked, ids = self._asked(window, weights, violation)
        if is_edited:
            # the edit is the program's decision: what the passes have brought is compared
            brought = window.brought_by(weights)
            asked = asked.of_arrivals({ids[key]: brought[key] for key in brought.keys() & ids})
            if not asked.observed:
                return
        with self._alone():
            # a model may count in a variable of its context
            found = copy_context().run(recompute, asked)
        self._note_recomputed(found, window.optimizer)
        if found.how is not None:
            compared, reached = found.covered
            some = f", {compared} of {reached} parameters" if compared < reached else ""
            self._recomputed[f"{found.how}{some}"] += 1
            self._schedule.again[window.optimizer] += 1
            if self.options.jax and self._calls is None:
                self._calls = kept_calls(found.parts)
        if violation is not None and found.error is not None:
            self._judge.note_size(window.number, found.error)
        elif found.name is not None:
            key = next((k for k, i in ids.items() if i == found.parameter), None)
            name = None if key is None else self._name_of(key)
            last = window.passes[max(window.passes)].site
            fault = violation_of(self._fault_found(found.name, found), window, last, name)
            self._judge.add(replace(fault, error=found.error, allowed=found.allowed))

    def _fault_found(self, name: str, found: RecomputeResult) -> StepFault:
        """Return the fault that a second computation has shown."""
        again = self._forwards.checkpoints.found
        # of the same fault, the comparison of the checkpoint knows the place and the cause
        if again is not None and again.written.name == name == "wrong-backward":
            return again.fault
        return StepFault(name, found.sentence, causes=found.causes)

    def _weights_of(self, window: StepWindow, violation: Violation | None) -> dict[int, float]:
        """Return the passes of a window that are in its gradient, or should be, and the right weight
        of each; none where it cannot be computed again.
        """
        if violation is not None:
            # what arrived holds the repetitions already; of a loss that each pass has as a whole,
            # no weight of a pass is the right one
            is_repeated = violation.diagnosis == "repeated-micro-batch"
            if is_repeated or _is_rescaled_each_time(window) or _is_of_weights_alone(violation):
                return {}
        if window.copies:
            said = (
                "a window was not computed again: the optimizer steps on copies of the parameters"
            )
            self._judge.note(finding("copied-parameters", said))
            return {}
        used = {i: c for (_, i), c in self._judge.used.items()}
        if violation is None:
            return used
        if violation.weights:
            return _righted(violation, used, window)
        own = (i for i, seen in window.passes.items() if not window.seen[i] and not seen.by_hand)
        return dict.fromkeys(own, 1.0)

    def _asked(
        self, window: StepWindow, weights: Mapping[int, float], violation: Violation | None
    ) -> tuple[RecomputeRequest, dict[int, int]]:
        """Return what is asked of a window that is computed again, and the id of each parameter by
        its key.
        """
        known = self._recorder.parameters
        live: dict[int, torch.Tensor] = {}
        for key in filter(known.__contains__, window.keys):
            p = known[key].reference()
            if p is not None:
                live[key] = p
        hooked = set[int]()
        if violation is None:
            # a hook of the program's own changes what arrives, which matters where the sums are not
            # known to be wrong
            for seen in window.passes.values():
                hooked.update(*(record.hooked for record in seen.records))
        observed = {
            id(p): p.grad for k, p in live.items() if p.grad is not None and k not in hooked
        }
        lines = self._recorder.used_at
        passes = {i: seen.records[0] for i, seen in window.passes.items() if i in weights}
        ids = {key: id(parameter) for key, parameter in live.items()}
        asked = RecomputeRequest(
            [self._running.get(i) or _not_kept(record) for i, record in passes.items()],
            [weights[i] for i in passes],
            window.factor or 1.0,
            observed,
            violation is not None,
            self._functions,
            {i: lines[key] for key, i in ids.items() if key in lines},
            None if violation is not None else self._turn(window, [*passes], ids),
            looked_at=self._looked_at,
        )
        return asked, ids

    def _turn(
        self, window: StepWindow, passes: Sequence[int], ids: Mapping[int, int]
    ) -> PassInTurn | None:
        """Return the one pass that is computed again in place of all; None for all of them.

        The first windows are computed again as a whole, and each later one as a whole where its
        pass differs. All passes have their turn.
        """
        again = self._schedule.again[window.optimizer]
        before = again - AGAIN
        if before < 0 or len(passes) < 2 or self._doubts or self._is_of_kept:
            return None
        if not again & (again + 1):
            # other inputs may take another branch of a function: with the 4th, 8th, 16th window all
            # are new
            self._functions.clear()
        arrived = [window.passes[i].arrived for i in passes]
        return turn_of(before % len(passes), arrived, ids)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Record nothing, and keep the program's gradients out of reach."""
        own = [known.reference() for known in self._recorder.parameters.values()]
        self._outside.is_muted = True
        try:
            with self._recorder.mute(), without_gradients([p for p in own if p is not None]):
                yield
        finally:
            self._outside.is_muted = False

    def _judge_written(self, window: StepWindow) -> None:
        """Judge what was written between a forward and its backward, which reads it."""
        for index in window.passes:
            found = self._running[index].written if index in self._running else None
            if found is not None and self._judge.of_last_step() is None:
                fault = StepFault(found.name, found.sentence, causes=("written",))
                self._judge.add(violation_of(fault, window, window.passes[index].site))

    def _judge_draws(self, window: StepWindow) -> None:
        """Judge what modules drew, or read, when a backward called them again."""
        found = self._forwards.repeated.found
        again = self._forwards.checkpoints.found
        if not window.passes or self._judge.of_last_step() is not None:
            return
        last = window.passes[max(window.passes)].site
        # what a checkpoint has computed has a place, and a cause that was looked for
        if again is not None and (found is None or found.name == "wrong-backward"):
            self._judge.add(violation_of(again.fault, window, last))
        elif found is not None:
            causes = () if found.name == "wrong-backward" else ("written",)
            step_fault = StepFault(found.name, found.sentence, causes=causes)
            self._judge.add(violation_of(step_fault, window, last))

    @preserve_rng()
    def _judge_functions(self, window: StepWindow) -> None:
        """Judge the custom functions that the program calls outside of recorded modules."""
        if self._recorder.is_off(WINDOW_AGAIN):
            return
        passes = [self._running[i] for i in window.passes if i in self._running]
        with self._alone():
            found = copy_context().run(
                judge_calls_of_program,
                self._outside,
                passes,
                self._functions,
                self._forwards.functions,
            )
        for note in found.notes:
            self._judge.note(note)
        if found.name is not None and self._judge.of_last_step() is None:
            last = window.passes[max(window.passes)].site
            step_fault = StepFault(found.name, found.sentence, causes=found.causes)
            fault = violation_of(step_fault, window, last)
            self._judge.add(replace(fault, error=found.error, allowed=found.allowed))

    def _note_recomputed(self, found: RecomputeResult, optimizer: int) -> None:
        """Note what a window that was computed again has shown, or why it could not be."""
        if found.keep is not None:
            self._forwards.keeps.add(found.keep)
        if found.doubt:
            self._doubts[optimizer] = found.doubt
        elif found.how is not None or found.reason:
            self._doubts.pop(optimizer, None)
        for note in found.notes:
            if note.name == UNEXPLAINED:
                self._reasons.setdefault(note.name, note)
            else:
                self._judge.note(note)

    @preserve_rng()
    def _tell(self, violation: Violation) -> None:
        """Print a violation, unless one of its diagnosis was printed."""
        # ranks that train by themselves may have a fault each at one place
        if self._told.has(violation.diagnosis) and self._ranks is None:
            return
        self._told.add(violation)
        if not self._quiet:
            tell(violation.words, self._standard_error.now)

    def _finished(self, error: BaseException | None) -> Result:
        found = self._told.final(self._judge.violations())
        is_accepted = [any(map(v.is_accepted_by, self.options.accept)) for v in found]
        violations = tuple(compress(found, map(not_, is_accepted)))
        accepted = tuple(compress(found, is_accepted))
        unknown = self._judge.unknown()
        findings = self._findings({part.found: steps for part, steps in unknown.items()})
        if not any(one.diagnosis == "wrong-mode" for one in found):
            findings += Counter(self._modes.findings())
        findings = self._with_skipped(findings)
        disagreements = tuple(self._opinion.findings) if self._opinion else ()
        named = [
            *(replace(one, steps=times) for one, times in findings.items()),
            *(finding("frameworks-differ", said) for said in disagreements),
        ]
        if self._recorder.off or self._recorder.concurrent:
            violations = accepted = ()
        if self not in _open:
            for violation in violations:
                # what the end of the run, or all ranks together, have shown
                self._tell(violation)
        windows = len(self._judge.weighed | self._judge.violated)
        if set(self.options.without) == {"weights", "sums"}:
            windows = self._recomputed.total()
        unjudged = None if violations or accepted else self._why_unjudged(windows, findings)
        return Result(
            loop=self._name,
            command="audit",
            windows=windows,
            windows_skipped=self._counted_windows(),
            steps=self._recorder.steps_seen,
            seconds=time.perf_counter() - self._start if self._opened else 0.0,
            violations=violations,
            accepted=accepted,
            again=dict(self._recomputed),
            second_opinion=self._opinion.summary() if self._opinion else None,
            unknown=tuple(replace(part, steps=steps) for part, steps in unknown.items()),
            disagreements=disagreements,
            findings=tuple(map(str, named)),
            named_findings=self._as_wanted(named, unjudged),
            unjudged=None if unjudged is None else unjudged.words,
            unjudged_reason=None if unjudged is None else unjudged.name,
            interrupted=isinstance(error, KeyboardInterrupt | Terminated),
            raised=in_words(error) or None,
            files=tuple((file, None) for file in sorted(self._files())),
        )

    def _findings(self, unknown: Mapping[Occurrence, int]) -> Counter[Occurrence]:
        """Return what was noted, with the number of steps for each.

        Args:
            unknown: losses that no rule knows, likewise.
        """
        off = Counter(
            finding(
                "failed-instrument",
                f"{what} could not be observed ({why}); please report it",
                remedy="",
            )
            for what, why in self._recorder.off.items()
        )
        strays = () if self._judge.has_copies else self._strays.findings(self._name_of)
        findings = Counter(unknown) + self._recorder.notes + self._judge.notes()
        findings += self._forwards.notes
        findings += Counter(self._forwards.unused.findings(self._recorder.steps_seen))
        return findings + Counter(strays) + off + Counter(self._recorder.declarations.unused)

    def _with_skipped(self, findings: Counter[Occurrence]) -> Counter[Occurrence]:
        """Return findings with those of the steps that were not judged, where the run has ended and
        some were.
        """
        is_whole = not {*self.options.without} & {"weights", "sums"} and not self._recorder.off
        if not is_whole or self in _open or not self._judge.weighed | self._judge.violated:
            return findings  # or it is said why none was
        skipped = self._judge.unjudged(self._recorder.recorded_until)
        if not skipped:
            return findings
        return Counter(skipped) + (findings - Counter(self._judge.skipped.values()))

    def _counted_windows(self) -> dict[str, int]:
        """Return how many windows were only counted, by the budget that did not pay for them."""
        if self._is_off:
            return {}
        after = self._recorder.steps_seen - self._recorder.recorded_until
        number = sum(map(len, self._judge.counted)) + after
        return {f"budget {self.options.budget or DEFAULT_BUDGET}": number} if number else {}

    def _files(self) -> set[str]:
        """Return the files that lines of the result may be in."""
        lines = set(chain.from_iterable((place.line, *place.path) for place in self._places))
        return {line.rpartition(":")[0] for line in lines | self._lines}

    def _as_wanted(
        self, named: Sequence[Occurrence], unjudged: Occurrence | None
    ) -> tuple[Occurrence, ...]:
        """Return the findings as the options have them, with the reason for which nothing was
        judged where they say something of it.
        """
        found = [self.options.judged(one) for one in named]
        if unjudged is not None:
            whole = self.options.judged(unjudged)
            found += [whole] if whole.fails or whole.reason is not None else []
        return tuple(found)

    def _why_unjudged(self, windows: int, findings: Counter[Occurrence]) -> Occurrence | None:
        """Return why nothing could be judged, and what to do; None where something was."""
        recorder = self._recorder
        if recorder.off:
            failed = "; ".join(
                f"{what} could not be observed ({why})" for what, why in recorder.off.items()
            )
            return finding("failed-instrument", failed, remedy="")
        if recorder.concurrent:
            said = "backward is called in several threads, whose passes cannot be told apart"
            return finding("concurrent-passes", said)
        if self._is_off:
            return finding("switched-off", "every instrument was switched off")
        if not recorder.steps_seen and recorder.passes_seen:
            if not recorder.unstepped.why:
                recorder.unstepped.look()
            why = recorder.unstepped.why or "the script trains without a torch.optim optimizer"
            passes = counted(recorder.passes_seen, "backward pass")
            return finding("no-step", f"no optimizer.step() was seen in {passes}: {why}")
        if not recorder.steps_seen:
            said = (
                "no backward pass and no optimizer.step() was seen in this process: the script"
                " trains nothing, or it trains in another process"
            )
            return finding("nothing-trained", said)
        if self._reasons:
            return next(iter(self._reasons.values()))
        if self._doubts and self not in _open:
            said = f"{next(iter(self._doubts.values()))}: the window could not be computed again, and no later one was"
            return finding(UNEXPLAINED, said)
        if windows:
            return None
        reasons = Counter(self._judge.skipped.values())
        if {*reasons} == {ORPHANS}:
            said = f"{recorder.passes_seen} calls of backward were seen, and {ORPHANS}"
            return replace(ORPHANS, sentence=said)
        why = "; ".join(map(str, [*(reasons | findings)][:2])) or "no loss went backward"
        return finding("nothing-judged", f"no step could be judged: {why}")


def _not_kept(record: PassRecord) -> ActivePass:
    """Return a pass whose calls are not there."""
    return ActivePass(record, Reader(), unrecorded=NOT_KEPT)


def _is_rescaled_each_time(window: StepWindow) -> bool:
    """Return whether `.grad` was multiplied by one factor after each pass: whether the last one is
    right is unknown.
    """
    every = [window.coefficient_of((0, index)) for index in window.passes]
    found = [coefficient for coefficient in every if coefficient is not None]
    factor = window.factor or 1.0
    return (
        len(found) > 1
        and factor != 1
        and all(near(one, factor * other, 1e-3) for one, other in pairwise(found))
    )


def _is_of_weights_alone(violation: Violation) -> bool:
    return violation.diagnosis == "unrecognised-weights" and not violation.weights


def _has_one_weight(record: PassRecord) -> bool:
    """Return whether all that went backward in a pass has one expression and one weight."""
    weights = [abs(term.weight or 0.0) for term in record.terms]
    expressions = {term.expression for term in record.terms}
    return len(expressions) <= 1 and all(near(one, weights[0], 1e-6) for one in weights)


def _righted(
    violation: Violation, weights: Mapping[int, float], window: StepWindow
) -> dict[int, float]:
    """Return the weights of passes times expected over observed, where a pass has one such ratio.

    None where a pass has other terms, too: a pass is computed again as a whole, and what they weigh
    is right.
    """
    if not all(_has_one_weight(window.passes[index].records[0]) for index in weights):
        return {}
    ratios: dict[int, set[float]] = {}
    for row in violation.weights:
        if row.observed and row.count and row.micro_batch is not None:
            ratios.setdefault(row.micro_batch, set()).add(round(row.expected / row.observed, 6))
    order = dict(enumerate(sorted(weights)))
    if any(len(found) > 1 for found in ratios.values()):
        return {}
    return {index: weights[index] * next(iter(ratios.get(j, {1.0}))) for j, index in order.items()}


def objective(
    loss: torch.Tensor, *, count: float | torch.Tensor, reduction: Literal["mean", "sum"] = "mean"
) -> torch.Tensor:
    """Declare what a loss is a mean of, where it is no loss function of torch; return the loss.

    Without an open audit this does nothing.

    Args:
        loss: a scalar tensor.
        count: what its mean divides by; for `"sum"`, the number of items.
        reduction: `"mean"` or `"sum"`.

    Raises:
        UsageError: `reduction` is neither, or `loss` is no scalar tensor.
    """
    if reduction not in ("mean", "sum"):
        raise UsageError(f"objective: reduction must be 'mean' or 'sum', got {reduction!r}")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise UsageError("objective: expected a scalar tensor, the loss of one micro-batch")
    if _open and _open[-1].observing and not torch.compiler.is_compiling():
        declare_terms(loss, count, reduction)
    return loss

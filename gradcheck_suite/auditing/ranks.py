"""An audit on several ranks: every rank writes its own lines, and they are put together afterwards."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.auditing import weights
from gradcheck_suite.auditing.judge import dropped_tail
from gradcheck_suite.auditing.losses import Place, living
from gradcheck_suite.auditing.passes import PROJECTIONS, Pass, Watched, as_array, resolution, tolerance
from gradcheck_suite.auditing.sums import SENTENCES, Explanation, Sums, clip_factor, empty, explain
from gradcheck_suite.auditing.weights import History, Term, term
from gradcheck_suite.core.comparison import UNIT_ROUNDOFF
from gradcheck_suite.core.results import LiveViolation
from gradcheck_suite.errors import UsageError

# The lines that each rank of a distributed run writes, from which its steps are judged together afterwards.
#
# A rank appends what its steps showed to a file of its own, in a directory that all ranks of the machine derive from
# their environment. Nothing is sent between ranks. The last entry of a file says how the rank ended; a file without
# it is that of a rank that died.


Sketches = dict[int, npt.NDArray[np.float64]]
"""The index of a parameter in its optimizer -> a sketch."""

PATIENCE = 60.0
"""Seconds for which rank 0 waits for ranks that have written nothing, as those of another machine."""


@dataclass(frozen=True)
class PassLine:
    """One backward pass of a rank.

    Attributes:
        place: `file:line` of the call of backward.
        accumulates: whether it left its gradients in `.grad`.
        terms: the calls of losses, with the weights that backward handed to them.
        arrivals: sketches of what arrived.
        unknown: the name of an autograd node of a loss that was not recognised, or None.
    """

    place: str
    accumulates: bool
    terms: tuple[Term, ...]
    arrivals: Sketches
    unknown: str | None


@dataclass(frozen=True)
class StepLine:
    """One optimizer step of a rank.

    Attributes:
        rank: of the process.
        optimizer: index of the optimizer.
        number: of the step of this optimizer.
        place: `file:line` of the call of `step`.
        passes: the backward passes since the step before.
        gradients: sketches of `.grad`.
        left: sketches of `.grad` after the last backward pass, where they were taken.
        previous: sketches of `.grad` at the step before.
        shapes: shape of each parameter.
        dtypes: dtype of each parameter's `.grad`.
        clip: factor of the clipping after the last backward pass.
        distributed: whether a process group is there.
        wrapped: whether a `DistributedDataParallel` is there.
        skipped: why the step cannot be judged, or None.
        steps: the accumulation steps of the trainer that runs, or None.
    """

    rank: int
    optimizer: int
    number: int
    place: str
    passes: tuple[PassLine, ...]
    gradients: Sketches
    left: Sketches
    previous: Sketches
    shapes: dict[int, tuple[int, ...]]
    dtypes: dict[int, str]
    clip: float
    distributed: bool
    wrapped: bool
    skipped: str | None = None
    steps: int | None = None


@dataclass
class RankFile:
    """What one rank has written.

    Attributes:
        rank: of the process.
        steps: its steps.
        findings: what it could not see -> how often.
        ended: how it ended: `""` for a normal end, else its exception; None where it died or runs still.
        writer: the process; None where it has written nothing.
        tail: the violation of micro-batches that were accumulated and never stepped, or None.
    """

    rank: int
    steps: list[StepLine] = field(default_factory=list)
    findings: dict[str, int] = field(default_factory=dict)
    ended: str | None = None
    writer: Writer | None = None
    tail: LiveViolation | None = None

    @property
    def is_open(self) -> bool | None:
        """Whether the rank may write more; None where that is not known here."""
        if self.ended is not None:
            return False
        return None if self.writer is None else self.writer.lives


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
    """Appends what a rank's steps show to its file.

    Raises:
        UsageError: the directory is not the user's own.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        ranks.folder.mkdir(mode=0o700, exist_ok=True)
        found = ranks.folder.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise UsageError(f"audit: {ranks.folder} is not this user's own: remove it")
        self._wrapped = False
        self._lengths: dict[int, Counter[int]] = {}
        self._file: IO[bytes] = ranks.own.open("wb")
        self._write(Writer(os.getpid(), socket.gethostname(), ranks.own.stat().st_mtime_ns))

    def _write(self, entry: Any) -> None:
        pickle.dump(entry, self._file)
        self._file.flush()

    def step(self, state: Watched, index: int, place: Place, steps: int | None) -> None:
        """Write a step; `steps` are the accumulation steps of the trainer that runs."""
        if not state.steps:
            # a search through all objects, once for each optimizer
            self._wrapped = self._wrapped or bool(living(torch.nn.parallel.DistributedDataParallel))
        self._lengths.setdefault(index, Counter())[len(state.pending)] += 1
        self._write(replace(_line(self.ranks.rank, state, index, place, self._wrapped), steps=steps))

    def tail(self, watched: Sequence[Watched], given: int | None) -> LiveViolation | None:
        """Return the violation of micro-batches that are left without a step, or None.

        Args:
            watched: the optimizers, at the end of the run.
            given: the accumulation steps that the user states, or None for the most frequent number.
        """
        for index, lengths in self._lengths.items():
            if found := dropped_tail(watched[index], given or lengths.most_common(1)[0][0]):
                return replace(found, explanation=f"on rank {self.ranks.rank}: {found.explanation}")
        return None

    def end(self, findings: Mapping[str, int], raised: str, tail: LiveViolation | None = None) -> None:
        """Write how the rank ended."""
        self._write((dict(findings), raised, tail))
        self._file.close()


def _line(rank: int, state: Watched, index: int, place: Place, wrapped: bool) -> StepLine:
    live = list(state.live())
    position = {key: i for i, (key, _) in enumerate(live)}
    gradients = state.gradients()
    previous, state.previous = state.previous, dict(gradients)
    passes = tuple(_pass_line(one, position) for one in state.pending)

    def indexed(found: Mapping[int, Any]) -> Sketches:
        return {position[key]: as_array(value) for key, value in found.items() if key in position}

    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return StepLine(
        rank=rank,
        optimizer=index,
        number=state.steps,
        place=place.line,
        passes=passes,
        gradients=indexed(gradients),
        left=indexed(state.pending[-1].after) if state.pending else {},
        previous=indexed(previous),
        shapes={i: tuple(p.shape) for i, (_, p) in enumerate(live)},
        dtypes={i: str((p if p.grad is None else p.grad).dtype)[6:] for i, (_, p) in enumerate(live)},
        clip=clip_factor(state.pending) if state.pending else 1.0,
        distributed=distributed,
        wrapped=wrapped,
        skipped=state.missing(),
    )


def _pass_line(one: Pass, position: Mapping[int, int]) -> PassLine:
    terms = []
    for received in one.received:
        received.settle()
        if np.isfinite(received.high):
            terms.append(term(received, 0, 1.0))
    arrivals = {position[key]: as_array(value) for key, value in one.arrivals.items() if key in position}
    return PassLine(one.place.line, one.accumulates, tuple(terms), arrivals, one.unknown)


def read(ranks: Ranks, rank: int) -> RankFile:
    """Return what a rank has written so far."""
    found = RankFile(rank)
    with suppress(EOFError, FileNotFoundError, pickle.UnpicklingError):
        if path := ranks.path(rank):
            with path.open("rb") as file:
                while True:
                    entry = pickle.load(file)
                    if isinstance(entry, StepLine):
                        found.steps.append(entry)
                    elif isinstance(entry, Writer):
                        found.writer = entry
                    else:
                        found.findings, found.ended, found.tail = entry
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
    return all(f.ended is None and f.is_open is False for f in files)


# The judgement of a distributed run from the lines of its ranks: every item of all ranks must weigh 1/N in `.grad`.
#
# Sketches are linear, so that of an averaged gradient is the average of the ranks' sketches. Which passes of which
# rank are in `.grad`, and by which factor, is read off as in a single process.


ALONE = "gradients are not reduced between ranks and nothing wraps the model: each rank was judged by itself"


@dataclass
class Together:
    """What the steps of all ranks showed.

    Attributes:
        violations: the first violation of each diagnosis.
        windows: number of steps judged.
        findings: what could not be judged -> how often.
    """

    violations: dict[str, LiveViolation] = field(default_factory=dict)
    windows: int = 0
    findings: Counter[str] = field(default_factory=Counter)


@dataclass
class _Memory:
    histories: dict[Hashable, History] = field(default_factory=dict)
    lengths: Counter[int] = field(default_factory=Counter)


def _interleaved(lines: Sequence[StepLine]) -> list[tuple[int, PassLine]]:
    """Return the passes of all ranks with their rank: the first of each, the second of each, and so on."""
    rows = zip_longest(*([(line.rank, one) for one in line.passes] for line in lines))
    return [item for row in rows for item in row if item is not None]


def _sums(line: StepLine, lines: Sequence[StepLine], passes: Sequence[tuple[int, PassLine]], *, left: bool) -> Sums:
    """Return the sketches of one rank's step beside the arrivals of all ranks."""
    gradients = line.left if left else line.gradients
    keys = sorted({key for _, one in passes for key in one.arrivals} | gradients.keys())
    arrivals = empty(len(keys), len(passes))
    now, before = np.zeros((len(keys), PROJECTIONS)), np.zeros((len(keys), PROJECTIONS))
    allowed, own = np.zeros(len(keys)), np.zeros(len(keys))
    for index, key in enumerate(keys):
        norms = []
        for j, (_, one) in enumerate(passes):
            if key in one.arrivals:
                arrivals[index, j] = one.arrivals[key][:PROJECTIONS]
                norms.append(max(float(one.arrivals[key][PROJECTIONS]), 0.0) ** 0.5)
        size = 0.0
        for target, source in ((now, gradients), (before, line.previous)):
            if key in source:
                target[index] = source[key][:PROJECTIONS]
                size = max(size, float(source[key][PROJECTIONS]) ** 0.5)
        dtype = line.dtypes.get(key, "float32")
        dtype = dtype if dtype in UNIT_ROUNDOFF else "float32"
        allowed[index] = tolerance(np.array(norms), line.shapes[key], dtype)
        own[index] = resolution(size, line.shapes[key], dtype)
    return Sums(arrivals, now, before, allowed, own, np.array([not one.accumulates for _, one in passes]))


def _only_own(line: StepLine, sums: Sums, passes: Sequence[tuple[int, PassLine]]) -> bool:
    """Whether a rank's `.grad` is what its own passes left there, and nothing of other ranks."""
    own = [j for j, (rank, _) in enumerate(passes) if rank == line.rank]
    part = replace(sums, arrivals=sums.arrivals[:, own], optional=sums.optional[own])
    return bool(np.abs(sums.arrivals).max(initial=0.0)) and len(own) < len(passes) and not explain(part).name


def _explained(line: StepLine, lines: Sequence[StepLine], passes: Sequence[tuple[int, PassLine]]) -> Explanation | str:
    """Return what a rank's gradient is made of; `not-reduced` where it is its own passes alone."""
    sums = _sums(line, lines, passes, left=False)
    found = explain(sums)
    if found.name and line.left:
        before = explain(_sums(line, lines, passes, left=True))
        found = before if not before.name else found
    if found.name and _only_own(line, sums, passes):
        return "not-reduced"
    return found


def _violation(name: str, sentence: str, lines: Sequence[StepLine], line: StepLine) -> LiveViolation:
    where = next((t.line for one in line.passes for t in one.terms), None)
    return LiveViolation(
        "gradient",
        name,
        sentence,
        step=line.number,
        where=where or (line.passes[-1].place if line.passes else line.place),
        backward=line.passes[-1].place if line.passes else None,
        stepped=line.place,
    )


def _judge(lines: Sequence[StepLine], memory: _Memory, found: Together, given: int | None, ranks: int) -> None:
    passes = _interleaved(lines)
    skipped = next((line.skipped for line in lines if line.skipped), None)
    finite = all(np.isfinite(s).all() for _, one in passes for s in one.arrivals.values())
    finite = finite and all(np.isfinite(s).all() for line in lines for s in line.gradients.values())
    if skipped or not passes or not finite:
        found.findings[f"a step was not judged: {skipped or 'a gradient was missing or not finite'}"] += 1
        return
    if not any(one.arrivals for _, one in passes):
        found.findings[
            "a step was not judged: none of its gradients is a dense, plain tensor, which alone are projected"
        ] += 1
        return
    for line in lines:
        explained = _explained(line, lines, passes)
        if isinstance(explained, str) or explained.name:
            name = explained if isinstance(explained, str) else explained.name
            sentence = f"rank {line.rank} of {ranks}: {SENTENCES[name]}"
            _add(found, _violation(name, sentence, lines, line))
            found.windows += 1
            return
    assert not isinstance(explained, str)
    factor = explained.factor / lines[-1].clip
    terms = [
        replace(t, weight=t.weight * c * factor, micro_batch=j)
        for j, ((_, one), c) in enumerate(zip(passes, explained.coefficients, strict=True))
        if c
        for t in one.terms
    ]
    if not terms:
        unknown = next((one.unknown for _, one in passes if one.unknown), "no loss")
        found.findings[f"a step was not judged: no loss was recognised ({unknown})"] += 1
        return
    found.windows += 1
    _judge_weights(lines, passes, terms, memory, found, given, ranks)


def _judge_weights(
    lines: Sequence[StepLine],
    passes: Sequence[tuple[int, PassLine]],
    terms: Sequence[Term],
    memory: _Memory,
    found: Together,
    given: int | None,
    ranks: int,
) -> None:
    steps = given or lines[0].steps
    whole = steps * ranks if steps else memory.lengths.most_common(1)[0][0] if memory.lengths else None
    memory.lengths[len(passes)] += 1
    counts = {sum(t.count for one in line.passes for t in one.terms) for line in lines}
    told_apart = ranks if len(counts) > 1 else 1
    readings = weights.readings(terms, whole, memory.histories, lines[0].number, told_apart)
    for reading in readings:
        if reading.status == "unknown":
            found.findings[f"{reading.terms[0].line}: a loss {reading.note} was not judged"] += 1
        elif not reading.holds:
            violation = weights.weight_violation(reading, whole)
            rows = tuple(replace(row, rank=passes[row.micro_batch][0]) for row in violation.weights)
            places = _violation(violation.diagnosis, "", lines, lines[0])
            sentence = f"over {ranks} ranks: {violation.explanation}"
            _add(
                found,
                replace(
                    violation,
                    explanation=sentence,
                    weights=rows,
                    step=lines[0].number,
                    backward=places.backward,
                    stepped=places.stepped,
                ),
            )
            return


def _add(found: Together, violation: LiveViolation) -> None:
    known = found.violations.get(violation.diagnosis)
    found.violations[violation.diagnosis] = violation if known is None else known.again(violation)


def judge_together(files: Sequence[RankFile], given: int | None) -> Together:
    """Judge the steps of all ranks.

    Args:
        files: what each rank has written.
        given: the accumulation steps of each rank that the user states, or None.
    """
    found = Together()
    by_step: dict[tuple[int, int], list[StepLine]] = {}
    for file in files:
        found.findings.update(file.findings)
        for line in file.steps:
            by_step.setdefault((line.optimizer, line.number), []).append(line)
    memories: dict[tuple[int, int], _Memory] = {}
    alone = _alone(list(by_step.values()), len(files))
    if alone:
        found.findings[ALONE] += 1
    for (optimizer, _), lines in by_step.items():
        if alone:
            for line in lines:
                _judge([line], memories.setdefault((optimizer, line.rank), _Memory()), found, given, 1)
        elif len(lines) == len(files):
            _judge(lines, memories.setdefault((optimizer, -1), _Memory()), found, given, len(files))
    counts = {file.rank: len(file.steps) for file in files}
    if len(set(counts.values())) > 1 and not alone:
        shown = ", ".join(f"{n} on rank {rank}" for rank, n in counts.items())
        found.findings[
            f"the ranks made different numbers of steps ({shown}): only those that every rank made were judged"
        ] += 1
    return found


def _alone(groups: Sequence[Sequence[StepLine]], ranks: int) -> bool:
    """Whether the ranks train each by itself: nothing is reduced at any step, and nothing would reduce it."""
    if not groups or any(line.wrapped for lines in groups for line in lines):
        return False
    for lines in groups:
        passes = _interleaved(lines)
        if len(lines) == ranks and any(one.arrivals for _, one in passes):
            for line in lines:
                if line.distributed and not _only_own(line, _sums(line, lines, passes, left=False), passes):
                    return False
    return True

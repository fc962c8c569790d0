"""The judgement of a distributed run from the lines of its ranks: every item of all ranks must weigh 1/N in `.grad`.

Sketches are linear, so that of an averaged gradient is the average of the ranks' sketches. Which passes of which rank
are in `.grad`, and by which factor, is read off as in a single process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np

from gradcheck_suite.live.judging import naming, objectives
from gradcheck_suite.live.judging.reading import History
from gradcheck_suite.live.judging.sums import Explanation, Sums, empty, explain
from gradcheck_suite.live.judging.terms import Term
from gradcheck_suite.live.judging.words import SENTENCES
from gradcheck_suite.live.ranks import PassLine, RankFile, StepLine
from gradcheck_suite.live.recording.sketches import PROJECTIONS, resolution, tolerance
from gradcheck_suite.numerics.bounds import UNIT_ROUNDOFF
from gradcheck_suite.schema.live_results import LiveViolation

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
    readings = objectives.readings(terms, whole, memory.histories, lines[0].number, told_apart)
    for reading in readings:
        if reading.status == "unknown":
            found.findings[f"{reading.terms[0].line}: a loss {reading.note} was not judged"] += 1
        elif not reading.holds:
            violation = naming.weight_violation(reading, whole)
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

"""Whether the gradients of a port are torch's, once its outputs are."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gradcheck_suite.port.changes import RAISED
from gradcheck_suite.port.gradients import place_gradient, stops, wrong_gradients
from gradcheck_suite.port.judgement import Judgement, Opaque, lines, named
from gradcheck_suite.port.sides import Point, input_name

ATTEMPTS = 4
"""Faults of the gradients at one point."""


def judge_gradients(judgement: Judgement) -> None:
    """Compare the gradients at every point, and name the differences."""
    if not judgement.is_explained:
        return
    report = judgement.report
    points = judgement.sides.points
    skip = {str(key[1]) for key in judgement.repairs.leaves if key[0] == "state"}
    skip |= judgement.unloaded
    if judgement.opaque is not None:
        # the values that were put in are those of one input
        points = [judgement.opaque.point]
        skip |= _upstream(judgement, judgement.opaque)
        report.note(
            "gradients were compared of what comes behind the unknown difference alone: those of"
            " what comes before it go through it"
        )
    report.judged.append("gradients")
    for point in points:
        wrong = _wrong_gradients(judgement, point, skip)
        for _ in range(ATTEMPTS):
            if wrong:
                wrong = _gradient_fault(judgement, point, wrong, skip)
        if wrong is not None and report.findings:
            return


def _wrong_gradients(
    judgement: Judgement, point: Point, skip: set[str]
) -> Mapping[str, float] | None:
    """Return the gradients that differ at a point, None where they cannot be compared there."""
    sides = judgement.sides
    try:
        program = sides.torch_program(point)
        judgement.run(point)
        run, expected = sides.torch_gradients(program, judgement.repairs)
    except RAISED:
        if point is sides.given:
            raise
        return None
    if not torch.isfinite(run.loss):
        return None
    return wrong_gradients(sides, point, expected, skip)


def _upstream(judgement: Judgement, opaque: Opaque) -> set[str]:
    """Return the parameters and inputs on which calls depend whose results were put in."""
    program = judgement.sides.torch_program(opaque.point)
    upstream = {*opaque.calls}
    todo = list(opaque.calls)
    found = set[str]()
    while todo:
        for ref in program.calls[todo.pop()].refs:
            if ref.kind == "state":
                found.add(str(ref.index))
            elif ref.kind == "input":
                found.add(input_name(int(ref.index)))
            elif isinstance(ref.kind, int) and ref.kind not in upstream:
                upstream.add(ref.kind)
                todo.append(ref.kind)
    # a tied parameter has its gradient from both of its places
    offsets = judgement.map.offsets
    tied = {offsets[n] for n in found if n in offsets}
    return found | {n for n, start in offsets.items() if start in tied}


def _gradient_fault(
    judgement: Judgement, point: Point, wrong: Mapping[str, float], skip: set[str]
) -> Mapping[str, float]:
    """Add a finding of wrong gradients; return those that it leaves."""
    sides = judgement.sides
    fault = place_gradient(sides, point, judgement.repairs, wrong, skip, judgement.budget)
    program = sides.torch_program(point)
    call = program.calls[fault.index] if fault.index is not None else None
    names = ", ".join(sorted(wrong, key=lambda n: -wrong[n])[:3])
    if fault.cause == "unknown" and fault.index in judgement.repairs.changes:
        # two forms have one value and different gradients, such as a mask that is added or put in
        # place
        judgement.report.note(
            f"the gradient of {names} is not judged: it differs where a value does, which is"
            " reported above"
        )
        return {}
    what = "another gradient" if call is None else f"the gradient of {named(call)}"
    place = next(iter(wrong)).rpartition(".")[0] if call is None else call.path
    judgement.report.add(
        "gradient",
        place,
        fault.cause,
        f"expected {what}, observed {fault.words}",
        f"{stops(sides.jax_program(point))}; off at {names}",
        error=max(wrong.values()),
        **lines(None if call is None else call.where),
    )
    if fault.repairs is not None:
        judgement.repairs = fault.repairs
    return fault.left

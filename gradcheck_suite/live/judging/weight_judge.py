"""The judgement of the weights: whether the items of a window weigh the same, and 1/N."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from gradcheck_suite.live.judging import naming, objectives
from gradcheck_suite.live.judging.reading import TWICE
from gradcheck_suite.live.judging.steps import Judged, Step
from gradcheck_suite.live.judging.sum_judge import clip_factor
from gradcheck_suite.live.judging.sums import Explanation
from gradcheck_suite.live.judging.terms import Term, term
from gradcheck_suite.live.judging.words import SENTENCES
from gradcheck_suite.live.recording.passes import Watched

SINGLES = 3
"""Windows of one micro-batch in a row that are no short last windows, where more micro-batches are asked for."""
DECLARE = "declare it with `loss = gradcheck_suite.objective(loss, count=n)`, n being what its mean divides by"


def _pending_scale(state: Watched) -> float:
    """Return the factor by which a fused optimizer divides its gradients inside its step, as GradScaler asks it to."""
    scale = getattr(state.optimizer(), "grad_scale", None)
    return float(scale) if isinstance(scale, torch.Tensor) else 1.0


def _coefficient(note: str) -> str:
    """Return a coefficient in words, without its value, which may differ from window to window."""
    return note.split(" of ")[0] + (TWICE if TWICE in note else "")


def judge_weights(step: Step, found: Explanation | None, result: Judged) -> None:
    """Judge the weights of the items of a window.

    Args:
        step: the step.
        found: what the gradient is made of, or None where sums are not judged.
        result: what the step showed; this adds to it.
    """
    passes, memory = step.passes, step.memory
    factor = 1.0 if found is None else found.factor / clip_factor(passes) / _pending_scale(step.state)
    coefficients = [1.0] * len(passes) if found is None else [c * factor for c in found.coefficients]
    if found is None:
        # without sums: what another optimizer has stepped on is not this one's
        coefficients = [0.0 if p.consumers or not p.accumulates else 1.0 for p in passes]
    by_call: dict[int, Term] = {}
    used = [(p, c) for p, c in zip(passes, coefficients, strict=True) if c]
    for index, (backward, coefficient) in enumerate(used):
        for received in backward.received:
            received.settle()
            if np.isfinite(received.high):
                one = term(received, index, coefficient)
                before = by_call.get(id(received.call))
                # a call that several passes reach weighs what they give it together
                by_call[id(received.call)] = (
                    one if before is None else replace(before, weight=before.weight + one.weight)
                )
    terms = list(by_call.values())
    unknown = sorted({p.unknown for p, _ in used if p.unknown})
    if not terms:
        return
    result.findings += [f"a part of the loss ({name}) was not recognised: {DECLARE}" for name in unknown]
    length, steps = len({t.micro_batch for t in terms}), step.whole
    accumulates = steps is not None and steps > 1
    readings = objectives.readings(terms, steps if accumulates else None, memory.histories, step.number)
    memory.lengths[length] += 1
    memory.singles = memory.singles + 1 if length == 1 else 0
    for reading in readings:
        if reading.status == "unknown":
            line = reading.terms[0].line
            remedy = f": {DECLARE}" if reading.note.startswith("with different") else ""
            result.findings.append(f"{line}: a loss {reading.note} was not judged{remedy}")
        elif reading.status == "coefficient" and reading.note.startswith("a coefficient of ") and reading.length > 1:
            result.findings.append(f"{reading.terms[0].line}: the loss has {_coefficient(reading.note)}")
    judged = [reading for reading in readings if reading.status != "unknown"]
    result.weights = bool(judged)
    faulty = next((reading for reading in judged if not reading.holds), None)
    if faulty is not None:
        violation = naming.weight_violation(faulty, steps)
        number = step.number if faulty.step is None else faulty.step
        result.violation = replace(violation, step=number, backward=step.backward, stepped=step.place.line)
    elif step.given is not None and step.given > 1 and memory.singles == SINGLES:
        violation = step.violation("step-per-micro-batch", SENTENCES["step-per-micro-batch"].format(steps=step.given))
        result.violation = replace(violation, kind="step-count")

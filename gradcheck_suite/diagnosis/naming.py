"""Naming a fault from weights: the pattern that fits all wrong steps, and whatever else fits them as well.

A name is given alone where the evidence refutes its rivals; where it does not, the name is "a or b".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcheck_suite.diagnosis.factors import constant_meaning, fitting_factors
from gradcheck_suite.diagnosis.other_windows import outside
from gradcheck_suite.diagnosis.patterns import INSIDE, Pattern, rescaled, rounded_to
from gradcheck_suite.diagnosis.presence import Steps
from gradcheck_suite.diagnosis.rank_patterns import RANKS
from gradcheck_suite.diagnosis.weights import Diagnosis, Weights, listed

MOST_NAMES = 3


def diagnose(violated: Weights, others: Sequence[Weights] = (), *, known_only: bool = False) -> Diagnosis:
    """Name the fault that gives such weights; `unrecognised-weights` where no known one does.

    Args:
        violated: the weights of the step that is violated.
        others: those of other steps, of this run or of another one, in the order of a run.
        known_only: whether factors that change from window to window and are none of the run's are no name.
    """
    steps = [violated, *others]
    wrong = [w for w in steps if not w.is_right]
    fitting = [p for p in _fitting(violated, wrong) if not (known_only and p.name == "wrong-scale" and p.rank)]
    # what predicts the steps that are right, too, is preferred
    complete = [p for p in fitting if all(p.fits(w) for w in steps)]
    chosen = _most_special(complete or fitting, wrong)
    if not chosen:
        return _unrecognised(violated)
    names = list(dict.fromkeys(pattern.name for pattern in chosen))[:MOST_NAMES]
    first = {name: next(p.sentence(violated, wrong) for p in chosen if p.name == name) for name in names}
    rare = "" if complete else _where(violated, steps)
    return Diagnosis(" or ".join(names), "; or: ".join(first.values()) + rare)


def names_nothing(diagnosis: Diagnosis) -> bool:
    """Return whether a diagnosis says no more than that the weights are wrong."""
    return diagnosis.name == "unrecognised-weights"


def _fitting(violated: Weights, wrong: Steps) -> list[Pattern]:
    if not wrong:
        return []
    patterns = (*outside(violated.accumulation_steps), *_scales(wrong), *rescaled(wrong), *INSIDE)
    if violated.owners:
        patterns = (*RANKS, *patterns)
    return [p for p in patterns if all(p.fits(w) for w in wrong) and any(p.informs(w) for w in wrong)]


def _most_special(fitting: Sequence[Pattern], wrong: Steps) -> list[Pattern]:
    """Return the patterns of the lowest rank, with those of the next where nothing tells them apart."""
    if not fitting:
        return []
    lowest = min(p.rank for p in fitting)
    chosen = [p for p in fitting if p.rank == lowest]
    if not any(p.tells(w) for p in chosen for w in wrong):
        chosen += [p for p in fitting if p.rank == lowest + 1]
    return chosen


def _scales(wrong: Steps) -> list[Pattern]:
    """Return the pattern of weights that are right but for one factor in each window, where they are like that."""
    if any(w.foreign or not len(w.inside) or not np.any(w.ratio) for w in wrong):
        return []
    ratios = [float(w.ratio.mean()) for w in wrong]
    if not all(w.close(w.ratio, ratio) for w, ratio in zip(wrong, ratios, strict=True)):
        return []
    factors = list(fitting_factors(list(wrong), ratios))
    constant = wrong[0].close(ratios, ratios[0])
    meaning, remedy = constant_meaning(ratios[0]) if constant else ("", "")
    known = bool(factors or constant)
    if not known and all(rounded_to(w) for w in wrong):
        return []

    def sentence(w: Weights, steps: Steps) -> str:
        scale = float(w.ratio.mean())
        said = f"every item of the window weighs {scale:.6g} times what it should"
        off = abs(scale - 1)
        if off < 1e-5:
            said = f"every item of the window weighs 1 {'+' if scale > 1 else '-'} {off:.3g} times what it should"
        if meaning:
            return f"{said}: {meaning}; {remedy}"
        if factors:
            texts = list(dict.fromkeys(factor.text(w) for factor in factors))
            remedies = list(dict.fromkeys(factor.remedy for factor in factors))
            return f"{said}, which is {' or '.join(texts[:3])}: {'; or '.join(remedies[:2])}"
        if len(steps) == 1:
            return f"{said}; no count of the run gives this factor"
        if constant:
            return (
                f"{said}, in every wrong window alike, whatever its counts: look for a constant, such as a number of "
                "ranks or a coefficient"
            )
        shown = listed([f"{ratio:.6g}" for ratio in ratios], 4)
        return f"{said}; over the wrong windows the factors are {shown}, and no count of the run gives them"

    def fits(w: Weights) -> bool:
        if any(w is v for v in wrong):
            return True
        values = [factor.value(w) for factor in factors]
        return w.is_right and any(value is None or w.close(value, 1.0) for value in values)

    return [Pattern("wrong-scale", fits, sentence, 0 if known else 1)]


def _where(violated: Weights, steps: Steps) -> str:
    """Return which steps of the violated run are right, as the end of a sentence."""
    own = [w for w in steps if w.windows == violated.windows and w.counts == violated.counts]
    right = [w for w in own if w.is_right]
    if not right or len(own) == 1:
        return ""
    shown = listed([f"window {w.index} of epoch {w.epoch}" for w in own if not w.is_right])
    return f" (only {shown} of this run; {len(right)} of {len(own)} steps are right)"


def _unrecognised(w: Weights) -> Diagnosis:
    shown = ", ".join(f"{weight:.6g}" for weight in w.observed[w.inside])
    also = f", and micro-batches {w.foreign} of other windows are in the gradient" if w.foreign else ""
    return Diagnosis(
        "unrecognised-weights",
        f"the window's micro-batches weigh {shown} per count, where {w.expected:.6g} is right for each{also}",
    )

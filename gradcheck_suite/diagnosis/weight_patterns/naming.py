"""Naming a fault from weights: the pattern that fits all wrong steps, and whatever else fits them as well.

A name is given alone where the evidence refutes its rivals; where it does not, the name is "a or b".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gradcheck_suite.diagnosis.weight_patterns.factors import constant_meaning, fitting_factors
from gradcheck_suite.diagnosis.weight_patterns.neighbours import NEIGHBOURS
from gradcheck_suite.diagnosis.weight_patterns.other_windows import averaged, outside, reordered
from gradcheck_suite.diagnosis.weight_patterns.patterns import INSIDE, Pattern, rounded_to
from gradcheck_suite.diagnosis.weight_patterns.places import by_place, rescaled
from gradcheck_suite.diagnosis.weight_patterns.presence import Steps
from gradcheck_suite.diagnosis.weight_patterns.rank_patterns import RANKS, by_rank
from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis, Weights, listed

MOST_NAMES = 3
SEVERAL = "windows of several micro-batches"
NO_COUNT = ", which no usual count or quotient of counts gives"
OF_SEVERAL = f" (only in {SEVERAL})"
NOT_A_SUM = (
    "; or the micro-batches' gradients are combined by a median, a minimum or an agreement of signs in place of a sum: "
    "on the weight probe each element is nonzero in one micro-batch only, so such a combination gives 0"
)
"""What a probe shows as a missing gradient as well."""


def diagnose(violated: Weights, others: Sequence[Weights] = (), *, known_only: bool = False) -> Diagnosis:
    """Name the fault that gives such weights; `unrecognised-weights` where no known one does.

    Args:
        violated: the weights of the step that is violated.
        others: those of other steps, of this run or of another one, in the order of a run.
        known_only: whether factors that change from window to window and are none of the run's are no name.
    """
    steps = [violated, *others]
    wrong = [w for w in steps if not w.is_right]
    fitting = [p for p in _fitting(violated, steps, wrong) if not (known_only and p.name == "wrong-scale" and p.rank)]
    # what predicts the steps that are right, too, is preferred
    complete = [p for p in fitting if all(p.fits(w) for w in steps)]
    chosen = _most_special(complete or fitting, wrong)
    if not chosen:
        return _unrecognised(violated)
    names = list(dict.fromkeys(pattern.name for pattern in chosen))[:MOST_NAMES]
    first = {name: next(p.sentence(violated, wrong) for p in chosen if p.name == name) for name in names}
    rare = _alike(steps) or ("" if complete else _where(violated, steps))
    if rare == OF_SEVERAL and names == ["no-gradient"]:
        rare += NOT_A_SUM
    return Diagnosis(" or ".join(names), "; or: ".join(first.values()) + rare)


def names_nothing(diagnosis: Diagnosis) -> bool:
    """Return whether a diagnosis says no more than that the weights are wrong."""
    return diagnosis.name == "unrecognised-weights"


def _fitting(violated: Weights, steps: Steps, wrong: Steps) -> list[Pattern]:
    if not wrong:
        return []
    scaled = (*_scales(steps, wrong), *rescaled(wrong), *by_place(wrong))
    ranks = (*RANKS, *by_rank(wrong)) if violated.owners else ()
    others = (*outside(violated.accumulation_steps), *averaged(steps), *reordered(steps))
    patterns = (*ranks, *others, *scaled, *INSIDE, *NEIGHBOURS)
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


def _scales(steps: Steps, wrong: Steps) -> list[Pattern]:
    """Return the pattern of weights that are right but for one factor in each window, where they are like that."""
    if any(w.foreign or not len(w.inside) or not np.any(w.ratio) for w in wrong):
        return []
    ratios = [float(w.ratio.mean()) for w in wrong]
    if not all(w.close(w.ratio, ratio) for w, ratio in zip(wrong, ratios, strict=True)):
        return []
    factors = list(fitting_factors(list(wrong), ratios))
    if len(wrong) == 1:
        # one number may be anything: the steps that are right must agree with what it is
        right = [w for w in steps if w.is_right]
        factors = [f for f in factors if all((v := f.value(w)) is None or w.close(v, 1.0) for w in right)]
    constant = wrong[0].close(ratios, ratios[0])
    meaning, remedy = constant_meaning(ratios[0]) if constant else ("", "")
    power = _power_of_steps(wrong, ratios)
    known = bool(factors or constant or power is not None)
    if not known and all(rounded_to(w) for w in wrong):
        return []

    def sentence(w: Weights, wrong: Steps) -> str:
        scale = float(w.ratio.mean())
        said = f"every item of the window weighs {scale:.6g} times what it should"
        off = abs(scale - 1)
        if off < 1e-5:
            said = f"every item of the window weighs 1 {'+' if scale > 1 else '-'} {off:.3g} times what it should"
        if meaning:
            return f"{said}: {meaning}; {remedy}"
        if factors:
            alternatives: dict[str, list[str]] = {}
            for factor in factors[:MOST_NAMES]:
                alternatives.setdefault(factor.remedy, []).append(factor.text(w))
            each = [f"{' or '.join(dict.fromkeys(texts))}: {remedy}" for remedy, texts in alternatives.items()]
            return f"{said}, which is {'; or '.join(each)}"
        if power is not None:
            return (
                f"{said}, and that of each step is {power:.6g} times that of the step before it: something is applied "
                "once more in every step, such as a hook that is registered anew and never removed"
            )
        if len(wrong) == 1:
            return f"{said}{NO_COUNT}: look for a coefficient, a schedule, a hook"
        if constant:
            return (
                f"{said}, in every wrong window alike, whatever its counts: look for a constant, such as a number of "
                "ranks or a coefficient"
            )
        shown = listed([f"{ratio:.6g}" for ratio in ratios], 4)
        look = "look for a schedule, a coefficient, or a count that other windows take part in"
        return f"{said}; over the wrong windows the factors are {shown}{NO_COUNT}: {look}"

    def fits(w: Weights) -> bool:
        if any(w is v for v in wrong):
            return True
        values = [factor.value(w) for factor in factors]
        return w.is_right and any(value is None or w.close(value, 1.0) for value in values)

    return [Pattern("wrong-scale", fits, sentence, 0 if known else 1)]


def _power_of_steps(wrong: Steps, ratios: Sequence[float]) -> float | None:
    """Return the number whose powers the ratios are, by the number of steps before each; None where there is none."""
    before = [w.epoch * len(w.windows) + (w.index or 0) for w in wrong]
    if len(set(before)) < 2 or not all(before) or not min(ratios) > 0:
        return None
    bases = [ratio ** (1 / steps) for ratio, steps in zip(ratios, before, strict=True)]
    return bases[0] if wrong[0].close(bases, bases[0]) else None


KINDS_OF_STEPS: tuple[tuple[str, Callable[[Weights], bool]], ...] = (
    ("short windows", lambda w: len(w.window) < w.accumulation_steps),
    ("whole windows", lambda w: len(w.window) == w.accumulation_steps),
    ("epochs after the first", lambda w: w.epoch > 0),
    ("the first epoch", lambda w: w.epoch == 0),
    ("the first window of the run", lambda w: not w.epoch and not w.index),
    ("windows after the first of the run", lambda w: bool(w.epoch or w.index)),
    ("the first window of an epoch", lambda w: w.index == 0),
    ("windows after the first of an epoch", lambda w: bool(w.index)),
    (SEVERAL, lambda w: len(w.inside) > 1),
    ("windows with a micro-batch without valid targets", lambda w: any(not w.counts[j] for j in w.window)),
)
"""What steps may have in common that are wrong."""


def _alike(steps: Steps) -> str:
    """Return what all wrong steps are and no right one is, as the end of a sentence; empty where there is no such."""
    if all(w.is_right == steps[0].is_right for w in steps) or not all(w.windows for w in steps):
        return ""
    found = (kind for kind, is_one in KINDS_OF_STEPS if all(is_one(w) != w.is_right for w in steps))
    kind = next(found, None)
    return "" if kind is None else f" (only in {kind})"


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

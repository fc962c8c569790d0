"""The name and the words of a fault in the weights of a window's items."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradcheck_suite.diagnosis.weight_patterns.naming import diagnose, names_nothing
from gradcheck_suite.diagnosis.weight_patterns.weights import TOLERANCE, Diagnosis, Weights
from gradcheck_suite.live.judging.reading import Reading
from gradcheck_suite.live.judging.terms import Term
from gradcheck_suite.schema.live_results import MAX_ROWS, LiveViolation, WeightRow


def _snapped(values: np.ndarray, tolerance: float) -> np.ndarray:
    """Return values that are equal up to rounding made exactly equal, so that exact rules see what is meant."""
    mean = values.mean()
    return np.full_like(values, mean) if np.abs(values - mean).max() <= tolerance * abs(mean) else values


def _observed(terms: list[Term], tolerance: float, simple: list[float]) -> np.ndarray:
    """Return the weights without their rounding errors, where they are the same for each item or for each mean."""
    weights, counts = np.array([t.weight for t in terms]), np.array([t.count for t in terms])
    means = _snapped(weights * counts, tolerance)
    if (means == means[0]).all():
        share = next((s for s in simple if abs(means[0] - s) <= tolerance * s), float(means[0]))
        return share / counts
    return _snapped(weights, tolerance)


def _preferred(found: Diagnosis) -> tuple[str, str]:
    """Return one name and its sentence where several fit: what scripts do most often."""
    names, sentences = found.name.split(" or "), found.sentence.split("; or: ")
    index = names.index("mean-of-means") if "mean-of-means" in names else 0
    return names[index], sentences[index] if len(sentences) == len(names) else found.sentence


def _by_elements(terms: list[Term], weights: Weights) -> Diagnosis | None:
    """Name a mean that divides by all elements of an unreduced loss, those without a weight (padding) included."""
    if any(t.reduction != "none" for t in terms):
        return None
    found = diagnose(replace(weights, counts=tuple(float(t.elements) for t in terms)))
    padded = "the mean divides by all elements of its micro-batch, padding included, and "
    return replace(found, sentence=padded + found.sentence) if found.name == "mean-of-means" else None


def _by_micro_batches(terms: list[Term], weights: Weights) -> Diagnosis | None:
    """Name a fault between micro-batches whose loss goes through several calls of equal weights, as in chunks."""
    parts = [[t for t in terms if t.micro_batch == m] for m in sorted({t.micro_batch for t in terms})]
    if len(parts) == len(terms) or not all(weights.close(t.weight, part[0].weight) for part in parts for t in part):
        return None
    whole = [replace(part[0], count=sum(t.count for t in part)) for part in parts]
    number = len(whole)
    merged = replace(
        weights,
        observed=_observed(whole, weights.tolerance, [1 / number, 1.0]),
        counts=tuple(t.count for t in whole),
        window=tuple(range(number)),
        accumulation_steps=number,
        items=(),
    )
    found = diagnose(merged)
    return None if names_nothing(found) else found


def _one_factor(terms: list[Term], weights: Weights) -> Diagnosis | None:
    """Name a factor that some micro-batches of a window have and most have not."""
    for values, what in ((weights.observed, "item"), (weights.observed * np.array(weights.counts), "mean")):
        usual = float(np.median(values))
        same = [bool(weights.close(v, usual)) for v in values]
        others = [j for j, is_usual in enumerate(same) if not is_usual]
        if usual and 2 * sum(same) > len(same) and len({round(float(values[j] / usual), 9) for j in others}) == 1:
            numbers = ", ".join(str(terms[j].micro_batch) for j in others)
            return Diagnosis(
                "unequal-factors",
                f"each {what} of micro-batch(es) {numbers} weighs {float(values[others[0]] / usual):.6g} times what it "
                "weighs in the others: the loss has a factor there that changes inside the window (a loss scale, a "
                "coefficient, a special case for the first or last micro-batch)",
            )
    return None


def table(reading: Reading) -> tuple[WeightRow, ...]:
    """Return what each call of an objective gave its items."""
    expected = reading.coefficient / reading.count if reading.count else 0.0
    rows = [WeightRow(t.micro_batch, t.line, t.count, expected, t.weight) for t in reading.terms]
    return tuple(rows[:MAX_ROWS])


def largest_error(reading: Reading) -> float:
    """Return the largest relative error of a weight."""
    return max((abs(t.weight * reading.count / reading.coefficient - 1) for t in reading.terms if t.count), default=0.0)


def weight_violation(reading: Reading, steps: int | None) -> LiveViolation:
    """Return the violation that a faulty reading is, without its place in the run."""
    counted = [t for t in reading.terms if t.count]
    tolerance = max(t.tolerance for t in counted)
    error = largest_error(reading)
    where = counted[0].line
    if reading.status == "scale":
        name = "wrong-scale"
        times = reading.factor / reading.coefficient
        sentence = f"every item of the window weighs {times:.6g} times what it should, which is {reading.note}"
        if len({t.micro_batch for t in reading.terms}) > len({t.micro_batch for t in counted}):
            name = "mean-of-means"
        # what leaks is shorter than a whole window
        if steps is not None and steps < reading.length < 2 * steps and abs(times * steps / reading.length - 1) < 1e-3:
            name = "tail-leak"
            sentence += (
                "; the gradient of micro-batches that belong to the window before is still in it: "
                "step after an epoch's last micro-batch too, and reset after it"
            )
    else:
        # the calls of a window in one graph are its micro-batches
        length = max(reading.length, len(counted))
        k = steps if steps is not None and len(counted) == reading.length else length
        weights = Weights(
            observed=_observed(counted, tolerance, [1 / length, 1 / k, 1.0]),
            counts=tuple(t.count for t in counted),
            window=tuple(range(len(counted))),
            accumulation_steps=k,
            epoch=0,
            reduction="mean",
            items=() if len({t.rows for t in counted}) == 1 else tuple(t.rows for t in counted),
            tolerance=max(tolerance, TOLERANCE),
        )
        found = diagnose(weights)
        if names_nothing(found):
            found = (
                _by_elements(counted, weights)
                or _by_micro_batches(counted, weights)
                or _one_factor(counted, weights)
                or found
            )
        name, sentence = _preferred(found)
        sentence = sentence.replace("run.count(batch)", "the batch's count")
    share = "less than 1%" if error < 0.01 else f"{100 * error:.3g}%"
    return LiveViolation(
        kind="gradient",
        diagnosis=name,
        explanation=f"{sentence} (weights are off by up to {share})",
        where=where,
        error=error,
        allowed=tolerance,
        weights=table(reading),
    )

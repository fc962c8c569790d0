"""The patterns of weights that depend on a micro-batch's place in its window, and are read off the longest one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gradcheck_suite.diagnosis.weight_patterns.patterns import SHARES, Pattern
from gradcheck_suite.diagnosis.weight_patterns.presence import Steps, more_than_one
from gradcheck_suite.diagnosis.weight_patterns.weights import Weights


def _grows(w: Weights, step: float) -> bool:
    """Whether each micro-batch weighs so many times the one before it, by sums or by means."""
    if w.foreign or not len(w.inside) or np.any(w.ratio == 0):
        return False
    return any(w.close(values[1:] / values[:-1], step) for values in (w.ratio, w.per_mean))


def rescaled(wrong: Steps) -> tuple[Pattern, ...]:
    """Return the patterns of a sum that is rescaled at every micro-batch: by K, or by what a long window shows."""
    steps: list[tuple[Callable[[Weights], float], Callable[[Weights], bool]]] = [
        # two micro-batches have some factor in any case: here it must be K, of means that weigh 1/K and less
        (
            lambda w: w.accumulation_steps,
            lambda w: w.close(w.per_mean[-2:], [w.accumulation_steps**-2, w.accumulation_steps**-1]),
        )
    ]
    longest = max(wrong, key=lambda w: len(w.inside))
    if len(longest.inside) > 2 and not np.any(longest.ratio == 0):
        k, size = longest.accumulation_steps, len(longest.window)
        for values, by_mean in ((longest.ratio, False), (longest.per_mean, True)):
            step, last = float(values[-1] / values[-2]), abs(float(values[-1]))
            # the latest contribution has its own weight, or was rescaled once
            usual = (1.0, 1 / k, 1 / size) if by_mean else (1.0, 1 / step if step else 1.0)
            if step > 0 and not longest.close(step, 1.0) and any(longest.close(last, share) for share in usual):
                steps.append((lambda w, step=step: step, lambda w: True))  # type: ignore[misc]

    def pattern(step: Callable[[Weights], float], last: Callable[[Weights], bool]) -> Pattern:
        return Pattern(
            "rescaled-accumulator",
            lambda w: w.is_right or (_grows(w, step(w)) and (len(w.inside) < 2 or last(w))),
            lambda w, wrong: (
                f"each micro-batch weighs {step(w):.6g} times the one before it: the running sum itself is rescaled at "
                "every micro-batch; scale each contribution instead"
            ),
            informs=more_than_one,
        )

    return tuple(pattern(*step) for step in steps)


def by_place(wrong: Steps) -> tuple[Pattern, ...]:
    """Return the pattern of weights that the micro-batches' places in their windows determine, where they do."""
    longest = max(wrong, key=lambda w: len(w.inside))
    factors = longest.ratio
    if len(factors) < 3 or len(factors) < len(longest.window) or np.any(factors == 0):
        return ()
    # whole factors say how often a micro-batch went backward
    if longest.foreign or longest.close(factors, factors[0]) or longest.close(factors, np.round(factors)):
        return ()

    def fits(w: Weights) -> bool:
        places = [w.window.index(j) for j in w.inside]
        return not w.foreign and max(places, default=0) < len(factors) and w.close(w.ratio, factors[places])

    shown = ", ".join(f"{factor:.6g}" for factor in factors[:4]) + (", ..." if len(factors) > 4 else "")
    return (
        Pattern(
            "weighted-by-place",
            fits,
            lambda w, wrong: (
                f"a micro-batch's weight depends on its place in the window: {shown} times what it should be for the "
                f"first and those after it, whatever they count: {SHARES}"
            ),
            2,
            informs=lambda w: w is not longest and len(w.inside) > 1,
        ),
    )

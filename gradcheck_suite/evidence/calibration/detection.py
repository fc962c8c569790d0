"""How small an error the suite's bound finds, and each of the rival rules, planted in the same sound gradients."""

from __future__ import annotations

import numpy as np

from gradcheck_suite.evidence.calibration.curve import NEVER, OURS, Curve, exponents
from gradcheck_suite.evidence.calibration.drawing import Drawn
from gradcheck_suite.evidence.calibration.planting import PLACES, Sound
from gradcheck_suite.evidence.calibration.styles import LOOPS
from gradcheck_suite.evidence.rivals import failed_rules
from gradcheck_suite.execution.runner import Outcome, run_loop
from gradcheck_suite.numerics.baselines import RIVALS
from gradcheck_suite.numerics.comparison import Vector
from gradcheck_suite.references.errors import CannotJudgeError
from gradcheck_suite.references.reference import REFERENCES, Reference
from gradcheck_suite.references.window import Window
from gradcheck_suite.schema.contract import assumptions_of


def curve_of(drawn: Drawn, seed: int) -> Curve:
    """Plant errors in a sound loop's gradient of one case.

    Args:
        drawn: the case.
        seed: of the choice of loop, window, places and signs.
    """
    rng = np.random.default_rng([seed, int(drawn.case.digest, 16)])
    reference = REFERENCES.get(drawn.case, None)
    curve = Curve(cases=1)
    try:
        index = int(rng.integers(len(drawn.case.plan.windows)))
        window = reference.window(index)
        # where the case cannot be judged in its dtype, this says why
        window.bound.expect_computable()
        if reference.finding is not None:
            curve.skipped["torch and JAX disagree"] += 1
            return curve
        outcome = _sound_outcome(drawn, reference, rng)
        observed = reference.flat(outcome.observations[index].gradients)
        if window.compare(observed).ratio > 1:
            curve.skipped["a false alarm"] += 1
            return curve
        sound = Sound(observed, window.bound.contributions, reference.layout, drawn.case.dtype)
    except CannotJudgeError as error:
        curve.skipped[" ".join(str(error).split())] += 1
        return curve
    for place, direction_of in PLACES.items():
        direction = direction_of(sound, rng)
        if direction is not None:
            sign = float(rng.choice((-1.0, 1.0)))
            curve.note(place, smallest_found(sound, window, sign * direction))
    return curve


def _sound_outcome(drawn: Drawn, reference: Reference, rng: np.random.Generator) -> Outcome:
    """Return what one of the loops does that fit the case, whose losses are of the case's own precision."""
    fitting = [loop for loop in LOOPS.values() if assumptions_of(loop) <= drawn.within]
    for i in rng.permutation(len(fitting)):
        outcome = run_loop(fitting[i], reference.instance)
        if outcome.compute is None and outcome.raised is None:
            return outcome
    raise AssertionError(f"no sound loop runs on case {drawn.case.digest}")


def smallest_found(sound: Sound, window: Window, direction: Vector) -> dict[str, int]:
    """Return, for each rule, k: it finds the error of size 2**-k in a direction, and all larger ones.

    Args:
        sound: the gradient.
        window: whose it is.
        direction: (P,), what an error of size 1 adds.
    """
    found = dict.fromkeys((OURS, *RIVALS), NEVER)
    looking = set(found)
    for k in exponents(sound.dtype):
        planted = sound.with_error(direction, 2.0**-k)
        finding = set(failed_rules(window, sound.layout, planted, sound.dtype))
        if OURS in looking and window.compare(planted).ratio > 1:
            finding.add(OURS)
        looking &= finding
        found |= dict.fromkeys(looking, k)
        if not looking:
            break
    return found

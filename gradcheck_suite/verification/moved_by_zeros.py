"""Parameters that a window does not reach, and that the optimizer moves since their gradient is zeros and not None.

The loop contract allows both, so that this is no violation. It is explained, since training differs: an optimizer skips
None, and steps on zeros, with weight decay and what is left of the momentum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gradcheck_suite.execution.observer import Observation, is_same
from gradcheck_suite.execution.optimizers import OPTIMIZERS
from gradcheck_suite.execution.replay import MakeOptimizer, largest_error, stepped
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.references.window import Window
from gradcheck_suite.schema.case import Case

BY_CHANCE = "normalized"
"""The optimizer of drawn cases where the user asked for none."""


def zeros_that_move(case: Case, observation: Observation) -> dict[str, float]:
    """Return the parameters that a step moved on a gradient of zeros, and would not move on None, with the distance.

    Args:
        case: whose optimizer stepped.
        observation: the step.
    """
    if case.optimizer in (None, BY_CHANCE):
        return {}
    make, before = OPTIMIZERS[str(case.optimizer)], observation.parameters
    found = {}
    for name, gradient in observation.gradients.items():
        if gradient is None or gradient.count_nonzero() or is_same(before[name], observation.after[name]):
            continue
        if is_same(before[name], _without_gradient(make, observation, name)):
            found[name] = largest_error(observation.after[name], before[name])
    return found


def _without_gradient(make: MakeOptimizer, observation: Observation, name: str) -> Any:
    """Return the parameter after the same step with None for its gradient."""
    evaluations = tuple(
        replace(e, gradients={**e.gradients, name: None}, sparse={n: g for n, g in e.sparse.items() if n != name})
        for e in observation.evaluations
    )
    return stepped(make, replace(observation, evaluations=evaluations), observation.state)[name]


def explain_zeros(case: Case, observation: Observation, moved: dict[str, float], window: Window) -> str | None:
    """Return a sentence about the first of these parameters that no item of the window reaches, or None."""
    name = next((name for name in moved if name not in window.reached), None)
    if name is None:
        return None
    settings = [{**group, "weight_decay": 0.0} if "weight_decay" in group else group for group in observation.settings]
    undecayed = stepped(OPTIMIZERS[str(case.optimizer)], replace(observation, settings=settings), observation.state)
    decay = largest_error(observation.after[name], undecayed[name])
    rest = largest_error(undecayed[name], observation.parameters[name])
    parts = [f"{decay:.2g} by weight decay"] * (decay > 0)
    parts += [f"{rest:.2g} by the rest of its rule (momentum, averages)"] * (rest > 0)
    return (
        f"no item of window {window.index} reaches {name}. Its gradient was zeros and not None, so {case.optimizer} "
        f"stepped on it and moved it by {moved[name]:.2g}: {', '.join(parts)}. With None, as after set_to_none=True, "
        f"{case.optimizer} leaves the parameter and its state alone"
    )


def moved_while_frozen(case: Case, outcome: Outcome) -> str:
    """Return what to say of a parameter that the loop froze and that zeros let the optimizer move; empty if nothing."""
    for observation in reversed(outcome.observations):
        for name, distance in zeros_that_move(case, observation).items():
            if f"{name}.requires_grad from True to False" in str(outcome.structure):
                return (
                    f"; a later step of {case.optimizer} moved the frozen {name} by {distance:.2g}, since its gradient "
                    "was zeros and not None: release it with set_to_none=True, and it stays where it is"
                )
    return ""

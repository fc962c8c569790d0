"""The step of every torch optimizer in optax: one record each, and the bound that rounding allows their parameters.

The only package that imports optax, which the extra `steps` installs. It judges steps alone: gradients are given.
"""

from __future__ import annotations

from gradcheck_suite.steps import adafactor, adam, descent, lbfgs, muon, scaled
from gradcheck_suite.steps.counterpart import Counterpart
from gradcheck_suite.steps.torch_steps import Steps, settings_of, take_steps
from gradcheck_suite.steps.trajectory import Trajectory, follow

__all__ = ["COUNTERPARTS", "Counterpart", "Steps", "Trajectory", "follow", "settings_of", "take_steps"]

COUNTERPARTS: dict[str, Counterpart] = {
    counterpart.name: counterpart
    for counterpart in (
        descent.SGD,
        descent.ASGD,
        descent.RPROP,
        scaled.ADAGRAD,
        scaled.RMSPROP,
        scaled.ADADELTA,
        adam.ADAM,
        adam.ADAMW,
        adam.ADAMAX,
        adam.NADAM,
        adam.RADAM,
        adam.SPARSE_ADAM,
        adafactor.ADAFACTOR,
        muon.MUON,
        lbfgs.LBFGS,
    )
}
"""Every optimizer of `torch.optim` by the name of its class in lower case."""

"""Why no optimizer steps, as long as none does: when the program has ended, its optimizers and scalers
are gone.
"""

from __future__ import annotations

import time

import torch

from gradcheck_suite.auditing.places import live_instances

MANY = 16
"""Passes without a step, from which on it is asked why."""
SHARE = 0.01
"""Of the time since the last search for it, which the next one may take: a search goes through all objects."""


class Unstepped:
    """Looks for an optimizer and a scaler that call no step.

    Attributes:
        why: no step may come; empty where nothing tells.
    """

    def __init__(self) -> None:
        self.why = ""
        self._searched_at = 0.0
        self._took = 0.0

    def on_pass(self, passes: int) -> None:
        """Look for them after many passes without a step, and each time that there are twice as many.

        Args:
            passes: that have gone backward so far.
        """
        is_due = passes >= MANY and not passes & (passes - 1)
        if is_due and self._took <= SHARE * (time.perf_counter() - self._searched_at):
            self.look()

    def look(self) -> None:
        """Look for them, by a search of all objects."""
        begun = time.perf_counter()
        made = live_instances(torch.optim.Optimizer, torch.amp.GradScaler)
        scalers = [one for one in made if isinstance(one, torch.amp.GradScaler)]
        if len(made) > len(scalers):
            self.why = "the step of a torch.optim optimizer that was made is never called"
        for scaler in scalers:
            if scaler._scale is not None and float(scaler._scale) < scaler._init_scale:
                self.why = (
                    "a GradScaler has called none, since the gradients were not finite (its scale"
                    f" fell from {scaler._init_scale:.3g} to {float(scaler._scale):.3g})"
                )
        self._searched_at = time.perf_counter()
        self._took = self._searched_at - begun
